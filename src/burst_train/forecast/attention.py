"""Predict one attention call over any number of ranks: seconds, exposed exchange, bytes by kind of link.

Beyond the planner's limit of ranks, two smaller worlds with the same tokens per rank are simulated, and the figures are
extrapolated along a line through both: each further sequence group adds the same work, steps and messages to a rank.
For ``blocks`` messages grow with the square root of the groups. ``tests/unit/test_forecast.py`` compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, log2

import numpy as np

from burst_attention.plan.assignment import KEYS_CIRCULATE
from burst_attention.plan.cost import Shape
from burst_attention.plan.groups import WHOLE, Groups
from burst_attention.plan.indexed import Indexed
from burst_attention.plan.mask import Mask
from burst_attention.plan.route import ROUTES
from burst_attention.plan.schedule import Schedule
from burst_attention.plan.strategy import Strategy
from burst_attention.planner.choice import Candidate
from burst_attention.planner.planner import MOST_SIMULATED, Planner, Remat
from burst_attention.planner.rates import Rates
from burst_attention.planner.standing import MOST_BY_EDGES, extrapolated, two_worlds
from burst_attention.planner.timing import Timed


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call over a cluster."""

    seq_len: int
    mask: Mask
    world: int
    per_node: int  # with consecutive numbers; the last node may have fewer
    shape: Shape
    rates: Rates
    remat: Remat = "none"
    calls: int = 1  # that run in a row and overlap: chunks of heads
    indexed: Indexed | None = None  # how it attends to chosen keys; None: to all keys
    widest: Mask | None = None  # the widest mask of all layers, which a balanced layout follows; None: ``mask``

    @property
    def planner(self) -> Planner:
        """A planner for one sequence per call."""
        several = self.world > self.per_node
        nodes = tuple(rank // self.per_node for rank in range(self.world)) if several else None
        return Planner(self.rates, nodes, replace(self.shape, batch=1), remat=self.remat, calls=self.calls)

    def over(self, world: int) -> Workload:
        """Return the setting over fewer ranks with the same tokens per rank; ValueError if it is not representative."""
        seq_len = self.seq_len * world // self.world
        widest = None if self.widest is None else _shortened(self.widest, seq_len, world)
        return replace(self, world=world, seq_len=seq_len, mask=_shortened(self.mask, seq_len, world), widest=widest)

    def schedule(self, strategy: Strategy, rank: int = 0) -> Schedule:
        """Return the planner's schedule of one rank, on the layout that all layers share."""
        planner, mask = self.planner, self.widest or self.mask
        schedule = planner.choose(self.seq_len, mask=mask, strategy=strategy, rank=rank, world=self.world)
        return schedule if mask == self.mask else planner.with_mask(schedule, self.mask)


def _shortened(mask: Mask, seq_len: int, world: int) -> Mask:
    """Return the mask of a shorter sequence that represents a longer one."""
    borders, reach = mask.cu_seqlens, mask.window or 0
    if borders is not None:
        reach = int(np.diff(borders).max())
    if 2 * reach > seq_len:
        what = f"documents of {reach:,} tokens are longer" if borders else f"the window {reach} is more"
        more = ", or more --documents" * (borders is not None)
        raise ValueError(
            f"{what} than half of the {seq_len:,} tokens of the {world} simulated ranks; use at most 256 ranks{more}"
        )
    return mask if borders is None else replace(mask, cu_seqlens=(*(n for n in borders if n < seq_len), seq_len))


@dataclass(frozen=True, kw_only=True)
class AttentionStrategy:
    """How an attention call is computed; ``circulate`` is a name of ``CIRCULATIONS``."""

    layout: str
    route: str = "direct"
    groups: Groups = field(default=WHOLE)
    circulate: str

    def __str__(self) -> str:
        return f"{self.layout} layout, {self.route} route, {Candidate(self.groups, self.circulate)}"

    @property
    def strategy(self) -> Strategy:
        """The strategy that selects this."""
        strategy = Candidate(self.groups, self.circulate).strategy(self.layout, self.route)
        return strategy if ROUTES[self.route].direct else replace(strategy, circulate="auto", chunks="auto")


@dataclass(frozen=True, kw_only=True)
class AttentionTimes:
    """Figures of a forward and a backward."""

    forward: Timed
    backward: Timed
    standing: tuple[int, int] | None = None  # sizes of the two simulated worlds, if not all ranks were simulated


def chosen(setting: Workload, strategy: Strategy, *, caches: bool = True, lse: bool = False) -> AttentionStrategy:
    """Return the planner's choice of what the strategy leaves open, as :func:`burst_attention.make_plan` makes it."""
    schedule = setting.schedule(strategy)
    if setting.indexed is not None:
        groups, circulate = WHOLE, KEYS_CIRCULATE
    else:
        groups, circulate = setting.planner.decide(schedule, setting.shape, caches=caches, lse=lse)
    return AttentionStrategy(layout=schedule.layout.name, route=schedule.route.name, groups=groups, circulate=circulate)


def predict_call(way: AttentionStrategy, setting: Workload, *, most: int | None = None) -> AttentionTimes:
    """Predict a call's time and traffic, simulating ``most`` ranks at most; ValueError if it can't be extrapolated."""
    simulated = MOST_SIMULATED if ROUTES[way.route].direct else MOST_BY_EDGES
    most = simulated if most is None else min(most, simulated)
    if setting.world <= most:
        forward, backward = simulations(way, setting)
        return AttentionTimes(forward=forward, backward=backward)
    worlds = two_worlds(way.groups, way.circulate, most)
    if setting.per_node * 2 > worlds[0] and setting.per_node < setting.world:
        raise ValueError(
            f"--nodes of {setting.per_node} ranks each are too large: more than {most} ranks are extrapolated from "
            f"{worlds[0]} and {worlds[1]} ranks, which must fill two nodes at least; give more --nodes"
        )
    forward, backward = extrapolated(
        lambda world: simulations(way, setting.over(world)), (*worlds, setting.world), way.groups, way.circulate
    )
    return AttentionTimes(forward=forward, backward=backward, standing=worlds)


def simulations(way: AttentionStrategy, setting: Workload) -> list[Timed]:
    """Simulate a forward and a backward step by step, on all ranks; an indexed layer's choice is in the forward."""
    if setting.indexed is not None:
        return setting.planner.simulated_indexed(setting.schedule(way.strategy), setting.indexed, setting.shape)
    return setting.planner.simulated(setting.schedule(way.strategy), setting.shape, way.circulate, way.groups)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes that a rank sends within its node and to other nodes, mean over ranks, and the time in seconds."""

    inside: float = 0.0
    across: float = 0.0
    seconds: float = 0.0


def gather(size: float, world: int, per_node: int, rates: Rates, *, calls: int = 1) -> Transfer:
    """Return all-gathers of ``size`` bytes in all over all ranks by rings; a reduce-scatter costs the same.

    A node sends each part once to the next one, spread over its ranks' ports. The busier kind of link takes the time,
    plus one message latency per doubling of the ranks for each of the calls.
    """
    if world == 1:
        return Transfer()
    sent, here = size * (world - 1) / world, min(per_node, world)
    doublings = ceil(log2(world))
    if world <= per_node:
        seconds = sent / rates.inside.bytes_per_second + calls * (rates.inside.latency * doublings)
        return Transfer(inside=sent, seconds=seconds)
    inside, across = sent * (here - 1) / here, sent / here
    port = across * (here if rates.across.shared else 1)
    seconds = max(inside / rates.inside.bytes_per_second, port / rates.across.bytes_per_second)
    return Transfer(inside=inside, across=across, seconds=seconds + calls * (rates.across.latency * doublings))


ALONE = AttentionStrategy(layout="contiguous", circulate="query")


def alone(setting: Workload) -> Workload:
    """Return the call over all tokens for a rank's share of the heads."""
    shape, world = setting.shape, setting.world
    own = replace(shape, q_heads=shape.q_heads // world, kv_heads=shape.kv_heads // world)
    return replace(setting, world=1, shape=own)


def tensor(setting: Workload, hidden: int) -> AttentionTimes:
    """Predict tensor parallelism with sequence parallelism, the feed-forward layer's collectives included.

    In each pass, attention and feed-forward layer each gather all tokens' hidden states and scatter them.
    """
    size = setting.shape.batch * setting.seq_len * hidden * setting.shape.io
    moved, call = gather(size, setting.world, setting.per_node, setting.rates), predict_call(ALONE, alone(setting))

    def both(timing: Timed) -> Timed:
        inside, across = timing.mean_inside + 4 * moved.inside, timing.mean_across + 4 * moved.across
        return replace(timing, seconds=timing.seconds + 4 * moved.seconds, mean_inside=inside, mean_across=across)

    return replace(call, forward=both(call.forward), backward=both(call.backward))
