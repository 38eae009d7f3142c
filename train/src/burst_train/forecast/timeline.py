"""Data for drawings of a pass over a few ranks: computed cells, messages and a timeline.

Times come from the planner (:mod:`~burst_attention.planner.timing`). A pass is simulated up to each of its steps. A
rank's bar ends when the rank is done with that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from burst_attention.plan.assignment import CIRCULATIONS
from burst_attention.plan.rows import Direction
from burst_attention.planner.timing import Computing, Wire, computing, timed
from burst_attention.planner.traffic import Messages

from .calls import AttentionStrategy, Workload, messages_of, sheet

MOST_DRAWN = 16  # ranks, or two sequence groups if that is more


@dataclass(frozen=True)
class Bar:
    """A rank's work, or wait, from ``begin`` to ``end`` in seconds.

    Attributes:
        step: the step that the rank computes, or whose input it waits for.
        waits: whether the rank waits.
    """

    step: int
    begin: float
    end: float
    waits: bool


@dataclass(frozen=True, eq=False)
class Picture:
    """One pass over a few ranks.

    Attributes:
        ranks: int64 [W, W]: for each (query owner, key owner) the rank that computes head group 0; -1 if the cell is
            masked.
        steps: int64 [W, W]: the step at which the cell is computed.
        bytes: [W, W]: bytes sent from each rank to each other rank.
        shown: the ranks that have a timeline.
        bars: the bars of each rank in ``shown``.
    """

    world: int
    ranks: np.ndarray
    steps: np.ndarray
    bytes: np.ndarray
    shown: Sequence[int]
    bars: Sequence[Sequence[Bar]]


def drawn(way: AttentionStrategy, setting: Workload) -> Workload:
    """Return the setting over as few ranks as a picture has room for."""
    cut = way.groups.query
    slices = min(setting.world // cut, max(2, MOST_DRAWN // cut))
    return setting if setting.world <= slices * cut else setting.over(slices * cut)


def picture(way: AttentionStrategy, setting: Workload, direction: Direction, *, shown: int = 4) -> Picture:
    """Compute the picture of one pass over the ranks of ``setting``."""
    world, schedule = setting.world, setting.schedule(way)
    one = sheet(way, setting, schedule, direction)
    traffic, groups, pairs = one.traffic, one.groups, one.traffic.pairs
    cells = traffic.cells(direction, groups, CIRCULATIONS[way.circulate](world // groups.query)[direction])
    ranks, steps = (np.full((world, world), -1, np.int64) for _ in range(2))
    of_shards = tuple(traffic.owner(chunk) for chunk in (pairs.i, pairs.j))
    ranks[of_shards] = groups.cache_owner(0, cells.user)
    np.maximum.at(steps, of_shards, cells.step[0])  # the last of a pair's chunks counts
    sent = messages_of(way, one, schedule)
    moved = np.zeros((world, world))
    np.add.at(moved, (sent.source, sent.target), sent.size)
    work = computing(traffic, setting.shape, direction, cells, groups, setting.rates)
    some = sorted({n * (world - 1) // max(1, shown - 1) for n in range(shown)})
    last = max(work.seconds.shape[1], int(sent.step.max(initial=0)) + 1)
    seconds = np.pad(
        work.seconds, ((0, 0), (0, last - work.seconds.shape[1]))
    )  # in the last steps ranks only return results
    ends = [_ends(sent, seconds, one.wire, rank, groups.in_flight) for rank in some]
    bars = [_bars(end, seconds[rank]) for end, rank in zip(ends, some, strict=True)]
    return Picture(world, ranks, steps, moved, some, bars)


def _ends(sent: Messages, seconds: np.ndarray, wire: Wire, rank: int, in_flight: int) -> list[float]:
    """Return the times at which ``rank`` is done with each step.

    The pass is simulated up to each step with much additional work for this rank, so that it finishes last. The work is
    then subtracted.
    """
    much, ends = 1e6, []
    for step in range(seconds.shape[1]):
        early = sent.step <= step
        before = Messages(*(getattr(sent, name)[early] for name in ("step", "source", "target", "size", "kind")))
        longer = seconds[:, : step + 1].copy()
        longer[rank, step] += much
        nothing = np.zeros_like(longer)
        whole = timed(before, Computing(longer, nothing, nothing), wire, in_flight=in_flight).seconds
        ends.append(max(0.0, whole - much - wire.rates.overhead.call))
    return ends


def _bars(ends: Sequence[float], seconds: np.ndarray) -> list[Bar]:
    found, now = list[Bar](), 0.0
    for step, (end, took) in enumerate(zip(ends, seconds.tolist(), strict=True)):
        begin = max(now, end - took)
        if begin > now:
            found.append(Bar(step, now, begin, waits=True))
        if end > begin:
            found.append(Bar(step, begin, end, waits=False))
        now = max(now, end)
    return found
