"""An estimate of the fewest seconds of a call, whose passes compute and exchange at the same time.

Nothing hides what a rank receives before its first visit, nor the results that leave after its last one. So a pass
takes at least the larger of the wire's time and (computing + that first and that last exchange). Computing is measured
as processor time, which includes copies and sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from burst_attention import Plan
from burst_attention.planner.rates import Link
from burst_attention.planner.timing import PassSimulation


@dataclass(frozen=True)
class Exchanged:
    """Seconds of one pass's exchange.

    Attributes:
        moving: all messages of the busiest link.
        open: messages before any rank's first visit and after any rank's last one, of the rank with the fewest.
    """

    moving: float
    open: float

    def bound(self, computing: float) -> float:
        """Return the fewest seconds of the pass, if computing takes ``computing`` seconds."""
        return max(self.moving, computing + self.open)


def exchanged(plan: Plan, link: float) -> list[Exchanged]:
    """Return the exchanges of a forward and a backward of the call that the plan was made for.

    Each rank has one link of ``link`` bits per second. The route is direct.
    """
    planner, schedule, shape = plan.planner, plan.schedule, plan.planner.known
    if shape is None or not schedule.route.direct:
        raise ValueError(f"no bound is known: route={plan.route}, call={shape}; pass call= and a direct route")
    found = planner.decide(schedule, shape)
    across = Link(latency=0.0, bytes_per_second=link / 8)
    apart = replace(planner, nodes=tuple(range(plan.world)), rates=replace(planner.rates, across=across))
    return [_of_pass(one) for one in apart.simulations(schedule, shape, found.circulate, found.groups)]


def _of_pass(one: PassSimulation) -> Exchanged:
    messages, visited = one.messages(), one.work().seconds.any(0).nonzero()[0]
    first, last = (int(visited[at]) if len(visited) else 0 for at in (0, -1))
    final = int(messages.step.max(initial=0))
    took = one.wire.seconds(messages)[2]

    def fewest(rank: np.ndarray, these: np.ndarray) -> float:
        return float(np.bincount(rank, took * these, len(one.wire.nodes)).min())

    before = fewest(messages.target, messages.step <= first)
    after = fewest(messages.source, (messages.step == final) & (final > last))
    return Exchanged(float(one.wire.least(messages)), before + after)


def bound_of(passes: Sequence[Exchanged], processor: Sequence[float], cores: int) -> float:
    """Estimate the fewest seconds of a call.

    Args:
        passes: the exchanges of each pass.
        processor: the processor seconds of each pass, of all ranks together.
        cores: the cores that the ranks share.
    """
    return sum(one.bound(busy / cores) for one, busy in zip(passes, processor, strict=True))
