"""Predict one attention call over any number of ranks: seconds, exposed exchange, bytes by kind of link.

Up to the planner's limit of ranks, the figures are the planner's. Beyond it, two smaller worlds are simulated and the
figures are extrapolated along a line through both. The smaller worlds have the same tokens per rank, Ulysses degree and
ranks per node. A line fits because each further sequence group adds the same work, steps and messages to a rank. For
``blocks`` messages grow with the sides of a block, the square root of the groups. ``tests/unit/test_forecast.py``
compares the line with full simulations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, isqrt, log2

import numpy as np

from burst_attention.plan.cost import Shape
from burst_attention.plan.groups import WHOLE, Groups, divisors
from burst_attention.plan.mask import Mask
from burst_attention.plan.route import ROUTES
from burst_attention.plan.rows import Direction
from burst_attention.plan.schedule import Schedule
from burst_attention.plan.strategy import Strategy
from burst_attention.planner.choice import Candidate
from burst_attention.planner.planner import MOST_SIMULATED, Planner, Remat
from burst_attention.planner.rates import Link, Rates
from burst_attention.planner.timing import PassSimulation, Timed
from burst_attention.planner.traffic import Messages, edge_messages

MOST_BY_EDGES = 32  # most ranks simulated on a route whose messages are built edge by edge
LEAST_STANDING = 64  # fewest simulated ranks that may represent a larger world


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call over a cluster.

    Attributes:
        per_node: ranks per node, with consecutive numbers; the last node may have fewer.
        remat: recompute policy of the layers, for the planner.
        calls: how many such calls run in a row and overlap: a layer's chunks of heads.
        widest: the mask of the layers with the widest window, which a balanced layout follows. None: ``mask``.
    """

    seq_len: int
    mask: Mask
    world: int
    per_node: int
    shape: Shape
    rates: Rates
    remat: Remat = "none"
    calls: int = 1
    widest: Mask | None = None

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """The node of each rank; None if all share one."""
        if self.world <= self.per_node:
            return None
        return tuple(rank // self.per_node for rank in range(self.world))

    @property
    def planner(self) -> Planner:
        """A planner for one sequence per call."""
        return Planner(self.rates, self.nodes, replace(self.shape, batch=1), remat=self.remat, calls=self.calls)

    def over(self, world: int) -> Workload:
        """Return the same setting over fewer ranks, with the same tokens per rank.

        Raises:
            ValueError: with this mask, costs over these ranks can't be extrapolated to more.
        """
        seq_len = self.seq_len * world // self.world
        widest = None if self.widest is None else _shortened(self.widest, seq_len, world)
        mask = _shortened(self.mask, seq_len, world)
        return replace(self, world=world, seq_len=seq_len, mask=mask, widest=widest)

    def schedule(self, way: AttentionStrategy, rank: int = 0) -> Schedule:
        """Return the schedule of one rank that computes in this way."""
        return self.laid_out(way.strategy, rank)

    def laid_out(self, strategy: Strategy, rank: int = 0) -> Schedule:
        """Return the planner's schedule of one rank, on the layout that all layers share."""
        planner, mask = self.planner, self.widest or self.mask
        schedule = planner.choose(self.seq_len, mask=mask, strategy=strategy, rank=rank, world=self.world)
        return schedule if mask == self.mask else planner.with_mask(schedule, self.mask)


def _shortened(mask: Mask, seq_len: int, world: int) -> Mask:
    """Return the mask of a shorter sequence that represents a longer one."""
    if mask.cu_seqlens is None:
        if mask.window is not None and 2 * mask.window > seq_len:
            raise ValueError(
                f"--window {mask.window} is more than half of the {seq_len:,} tokens of the {world} simulated ranks; "
                "use at most 256 ranks, or a smaller --window"
            )
        return mask
    longest = int(np.diff(mask.cu_seqlens).max())
    if 2 * longest > seq_len:
        raise ValueError(
            f"documents of {longest:,} tokens are longer than half of the {seq_len:,} of the {world} simulated ranks; "
            "use at most 256 ranks, or more --documents"
        )
    return replace(mask, cu_seqlens=(*(border for border in mask.cu_seqlens if border < seq_len), seq_len))


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

    @property
    def most_ranks(self) -> int:
        """The most ranks that are simulated."""
        return MOST_SIMULATED if ROUTES[self.route].direct else MOST_BY_EDGES


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Figures of one forward or backward.

    Attributes:
        seconds: time until the last rank is done.
        computing: seconds in which that rank computes.
        inside, across: bytes that a rank sends within its node and to other nodes, mean over ranks.
        busiest: (inside, across) bytes of the rank that sends or receives most on that kind of link.
    """

    seconds: float
    computing: float
    inside: float
    across: float
    busiest: tuple[float, float]

    @property
    def exposed(self) -> float:
        """Seconds of exchange that computation does not hide."""
        return self.seconds - self.computing


@dataclass(frozen=True, kw_only=True)
class Call:
    """Figures of a forward and a backward.

    Attributes:
        standing: sizes of the two simulated worlds; None if all ranks were simulated.
    """

    forward: Pass
    backward: Pass
    standing: tuple[int, int] | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a forward and a backward."""
        return self.forward.seconds + self.backward.seconds


def chosen(setting: Workload, strategy: Strategy, *, caches: bool = True, lse: bool = False) -> AttentionStrategy:
    """Return the planner's choice of what the strategy leaves open, as :func:`burst_attention.make_plan` makes it.

    Above 256 ranks it is the choice for the largest part of them that divides them.

    Args:
        caches, lse: as for :meth:`~burst_attention.planner.planner.Planner.decide`.

    Raises:
        ValueError: no number of ranks that can be simulated divides all.
    """
    degree = strategy.over(setting.world).ulysses_degree
    if setting.world > MOST_SIMULATED:
        setting = setting.over(_standing(setting.world, degree if isinstance(degree, int) else 1))
    schedule = setting.laid_out(strategy)
    groups, circulate = setting.planner.decide(schedule, setting.shape, caches=caches, lse=lse)
    return AttentionStrategy(layout=schedule.layout.name, route=schedule.route.name, groups=groups, circulate=circulate)


def _standing(world: int, heads: int) -> int:
    found = max((n for n in divisors(world) if n <= MOST_SIMULATED and n % heads == 0), default=1)
    if found < LEAST_STANDING:
        near = -(-world // MOST_SIMULATED) * MOST_SIMULATED
        raise ValueError(
            f"--ranks {world} can't be predicted: above {MOST_SIMULATED} ranks, a divisor from {LEAST_STANDING} to "
            f"{MOST_SIMULATED} is simulated, but the largest is {found}; use --ranks {near}"
        )
    return found


def predict_call(way: AttentionStrategy, setting: Workload, *, most: int | None = None) -> Call:
    """Predict the time and traffic of a call.

    Args:
        most: the most ranks to simulate. Default: the most that the way allows.

    Raises:
        ValueError: the figures can't be extrapolated to this many ranks.
    """
    most = min(way.most_ranks, MOST_SIMULATED if most is None else most)
    if setting.world <= most:
        forward, backward = simulations(way, setting)
        return Call(forward=forward, backward=backward)
    worlds = _two(way, most)
    if setting.per_node * 2 > worlds[0] and setting.per_node < setting.world:
        raise ValueError(
            f"--nodes of {setting.per_node} ranks each are too large: more than {most} ranks are extrapolated from "
            f"{worlds[0]} and {worlds[1]} ranks, which must fill two nodes at least; give more --nodes"
        )
    few, many = (simulations(way, setting.over(world)) for world in worlds)
    line = _Line(way, worlds, setting.world)
    both = [line.extended(a, b) for a, b in zip(few, many, strict=True)]
    return Call(forward=both[0], backward=both[1], standing=worlds)


def simulations(way: AttentionStrategy, setting: Workload) -> list[Pass]:
    """Simulate both passes step by step, as :meth:`Schedule.timed` does."""
    schedule, passes = setting.schedule(way), []
    wire = setting.planner.wire(setting.world)
    for direction in Direction:
        one = sheet(way, setting, schedule, direction)
        sent = messages_of(way, one, schedule)
        kind = wire.across(sent)
        inside, across = (float(sent.size[kind == n].sum()) / setting.world for n in (0, 1))
        passes.append(_pass(one.run(sent), inside, across))
    return passes


def sheet(way: AttentionStrategy, setting: Workload, schedule: Schedule, direction: Direction) -> PassSimulation:
    """Return one pass, ready to be simulated."""
    both = setting.planner.simulations(schedule, setting.shape, way.circulate, way.groups)
    return next(one for one in both if one.direction is direction)


def messages_of(way: AttentionStrategy, one: PassSimulation, schedule: Schedule) -> Messages:
    """Return all messages of one pass."""
    if not schedule.route.direct:
        return edge_messages(schedule.work(way.circulate, one.direction, way.groups), one.shape)
    steps = one.traffic.cells(one.direction, one.groups, one.inner)
    return one.traffic.messages(one.shape, one.direction, one.inner, one.groups, steps)


def _pass(timed: Timed, inside: float, across: float) -> Pass:
    busiest = (float(timed.inside), float(timed.across))
    return Pass(seconds=timed.seconds, computing=timed.computing, inside=inside, across=across, busiest=busiest)


def _two(way: AttentionStrategy, most: int) -> tuple[int, int]:
    """Return the sizes of two worlds to simulate.

    The larger has at most ``most`` ranks, but at least four sequence groups. For ``blocks`` the groups are squares.
    """
    cut = way.groups.query
    if way.circulate == "blocks":
        side = max(4, isqrt(most // cut))
        return cut * (side // 2) ** 2, cut * side**2
    slices = max(4, most // cut)
    return cut * (slices // 2), cut * slices


@dataclass(frozen=True)
class _Line:
    """A line through the figures of two worlds, extrapolated to a larger one."""

    way: AttentionStrategy
    worlds: tuple[int, int]
    world: int

    def extended(self, few: Pass, many: Pass) -> Pass:
        """Extrapolate two small worlds' passes to this world."""
        computing = self._at(float, few.computing, many.computing)
        # A rank's bytes, and so its exposed exchange, grow with the sides of a block for ``blocks``.
        sides = _sides if self.way.circulate == "blocks" else float
        return Pass(
            computing=computing,
            # If the exposed time falls, the line would go below zero: use at least the larger world's.
            seconds=computing + max(many.exposed, self._at(sides, few.exposed, many.exposed)),
            inside=self._at(sides, few.inside, many.inside),
            across=self._at(sides, few.across, many.across),
            busiest=(
                self._at(sides, few.busiest[0], many.busiest[0]),
                self._at(sides, few.busiest[1], many.busiest[1]),
            ),
        )

    def _at(self, axis: Callable[[int], float], few: float, many: float) -> float:
        a, b, x = (axis(n // self.way.groups.query) for n in (*self.worlds, self.world))
        return many + (x - b) * (many - few) / (b - a)


def _sides(slices: int) -> float:
    """Return half the sum of a block's sides, in sequence groups."""
    return (isqrt(slices) + slices / isqrt(slices)) / 2


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes that a rank sends within its node and to other nodes, mean over ranks, and the time in seconds."""

    inside: float = 0.0
    across: float = 0.0
    seconds: float = 0.0


def gather(size: float, world: int, per_node: int, rates: Rates) -> Exchange:
    """Return an all-gather of ``size`` bytes, the total of all ranks, by rings; a reduce-scatter costs the same.

    Each rank sends W - 1 of W parts. A node sends each part once to the next node, spread over its ranks' ports. The
    time is that of the busier kind of link, plus one message latency per doubling of the ranks.
    """
    if world == 1:
        return Exchange()
    sent, here = size * (world - 1) / world, min(per_node, world)
    if world <= per_node:
        return Exchange(inside=sent, seconds=sent / rates.inside.bytes_per_second + _latency(rates.inside, world))
    inside, across = sent * (here - 1) / here, sent / here
    port = across * (here if rates.across.shared else 1)
    seconds = max(inside / rates.inside.bytes_per_second, port / rates.across.bytes_per_second)
    return Exchange(inside=inside, across=across, seconds=seconds + _latency(rates.across, world))


def _latency(link: Link, world: int) -> float:
    return link.latency * ceil(log2(world))


ALONE = AttentionStrategy(layout="contiguous", circulate="query")


def alone(setting: Workload) -> Workload:
    """Return the call over all tokens for a rank's share of the heads."""
    shape, world = setting.shape, setting.world
    own = replace(shape, q_heads=shape.q_heads // world, kv_heads=shape.kv_heads // world)
    return replace(setting, world=1, shape=own)


def tensor(setting: Workload, hidden: int) -> Call:
    """Predict tensor parallelism with sequence parallelism.

    Attention and feed-forward layer each gather all tokens' hidden states before and scatter them after. The backward
    does the same number. The call includes the feed-forward layer's collectives, which computation does not hide.
    """
    size = setting.shape.batch * setting.seq_len * hidden * setting.shape.io
    moved, call = gather(size, setting.world, setting.per_node, setting.rates), predict_call(ALONE, alone(setting))

    def both(one: Pass) -> Pass:
        inside, across = 4 * moved.inside, 4 * moved.across
        busiest = (one.busiest[0] + inside, one.busiest[1] + across)
        seconds = one.seconds + 4 * moved.seconds
        return replace(one, seconds=seconds, inside=one.inside + inside, across=one.across + across, busiest=busiest)

    return replace(call, forward=both(call.forward), backward=both(call.backward))
