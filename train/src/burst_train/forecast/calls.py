"""What one attention call takes over any number of ranks: seconds, exchange that nothing hides, bytes by kind of link.

Over as many ranks as the planner looks at, the planner's own figures. Of more ranks two smaller worlds with as many
tokens for each rank, heads cut alike and nodes as large are run on paper, and a line is laid through both: a rank's
work, its steps and what passes it grow by as much with each context slice that is added, but for blocks, whose sides
grow with the root. ``tests/unit/test_forecast.py`` holds the line against what it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

import numpy as np

from burst_attention.plan.cost import Shape
from burst_attention.plan.groups import WHOLE, Groups, divisors
from burst_attention.plan.mask import Mask
from burst_attention.plan.route import ROUTES
from burst_attention.plan.rows import Direction
from burst_attention.planner.choice import Candidate, HeadsOrAuto, Planner, Remat
from burst_attention.planner.rates import Rates
from burst_attention.planner.schedule import MOST_RANKS, Schedule, make_schedule
from burst_attention.planner.timing import OnPaper, Timed
from burst_attention.planner.traffic import Messages, edge_messages

MOST_BY_EDGES = 32  # ranks that are looked at on a route whose edges have to be made one by one
LEAST_STANDING = 64  # ranks that stand for many more


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One attention call over a cluster.

    Attributes:
        per_node: ranks of a node, neighbours; the last node may have fewer.
        remat: what of a layer is recomputed, for the planner.
    """

    seq_len: int
    mask: Mask
    world: int
    per_node: int
    shape: Shape
    rates: Rates
    remat: Remat = "none"

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """The node of each rank; None if they share one."""
        if self.world <= self.per_node:
            return None
        return tuple(rank // self.per_node for rank in range(self.world))

    @property
    def planner(self) -> Planner:
        return Planner(self.rates, self.nodes, replace(self.shape, batch=1), remat=self.remat)

    def over(self, world: int) -> Setting:
        """As many tokens for each rank, over fewer ranks.

        Raises:
            ValueError: what such a mask costs over these ranks does not go on over more.
        """
        seq_len = self.seq_len * world // self.world
        return replace(self, world=world, seq_len=seq_len, mask=_shortened(self.mask, seq_len, world))

    def schedule(self, way: Way, rank: int = 0) -> Schedule:
        """Of one rank that computes so."""
        options: dict[str, Any] = {"assignment": way.travels} if ROUTES[way.route].direct else {}
        return make_schedule(
            self.seq_len,
            mask=self.mask,
            layout=way.layout,
            route=way.route,
            rank=rank,
            world=self.world,
            heads=way.groups.query,
            keep=way.groups.keep if way.groups.query > 1 else "auto",
            waves=way.groups.waves,
            planner=self.planner,
            **options,
        )


def _shortened(mask: Mask, seq_len: int, world: int) -> Mask:
    """The mask of a shorter sequence that stands for a longer one."""
    if mask.cu_seqlens is None:
        if mask.window is not None and 2 * mask.window > seq_len:
            raise ValueError(
                f"--window {mask.window} is more than half of the {seq_len:,} tokens of the {world} ranks that stand "
                "for all; foretell fewer ranks, at most 256, or another window"
            )
        return mask
    longest = int(np.diff(mask.cu_seqlens).max())
    if 2 * longest > seq_len:
        raise ValueError(
            f"documents of {longest:,} tokens are longer than half of the {seq_len:,} of the {world} ranks that stand "
            "for all; foretell fewer ranks, at most 256, or give more --documents"
        )
    return replace(mask, cu_seqlens=(*(border for border in mask.cu_seqlens if border < seq_len), seq_len))


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a call is computed; ``travels`` is a name of ``TRAVELS``."""

    layout: str
    route: str = "direct"
    groups: Groups = field(default=WHOLE)
    travels: str

    def __str__(self) -> str:
        return f"{self.layout}, {self.route}, {Candidate(self.groups, self.travels)} travels"

    @property
    def most_ranks(self) -> int:
        """That are run on paper."""
        return MOST_RANKS if ROUTES[self.route].direct else MOST_BY_EDGES


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward, or a backward.

    Attributes:
        seconds: until the last rank is done.
        computing: of those the seconds in which that rank computes.
        inside, across: bytes that a rank sends, in the mean, to ranks of its node and of others.
        busiest: the same of the rank that sends or receives most, on each kind of link.
    """

    seconds: float
    computing: float
    inside: float
    across: float
    busiest: tuple[float, float]

    @property
    def exposed(self) -> float:
        """Seconds of exchange that nothing hides."""
        return self.seconds - self.computing


@dataclass(frozen=True, kw_only=True)
class Call:
    """A forward and a backward. ``standing``: the two worlds that were run on paper, if not the one asked for."""

    forward: Pass
    backward: Pass
    standing: tuple[int, int] | None = None

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds


def chosen(
    setting: Setting,
    *,
    layout: str = "auto",
    route: str = "auto",
    heads: HeadsOrAuto = "auto",
    travels: str = "auto",
) -> Way:
    """The planner's choice: what is left open as :func:`burst_attention.make_plan` chooses it.

    Of more than 256 ranks, what it chooses for the largest part of them that divides them.

    Raises:
        ValueError: no such part stands for all.
    """
    if setting.world > MOST_RANKS:
        setting = setting.over(_standing(setting.world, 1 if heads == "auto" else heads))
    options: dict[str, Any] = {"layout": layout, "route": route, "heads": heads}
    schedule = make_schedule(
        setting.seq_len, mask=setting.mask, **options, rank=0, world=setting.world, planner=setting.planner
    )
    groups, travels = schedule.decide(setting.shape, travels)
    return Way(layout=schedule.layout.name, route=schedule.route.name, groups=groups, travels=travels)


def _standing(world: int, heads: int) -> int:
    found = max((n for n in divisors(world) if n <= MOST_RANKS and n % heads == 0), default=1)
    if found < LEAST_STANDING:
        near = -(-world // MOST_RANKS) * MOST_RANKS
        raise ValueError(
            f"--ranks {world} can't be foretold: more than {MOST_RANKS} are, by a part of them of {LEAST_STANDING} to "
            f"{MOST_RANKS} that divides them, and {found} is the largest that does; ask for {near}"
        )
    return found


def foretell(way: Way, setting: Setting, *, most: int | None = None) -> Call:
    """What a call takes.

    Args:
        most: ranks that are run on paper; as many as the way allows if not told.

    Raises:
        ValueError: more are asked for than can be extrapolated to.
    """
    most = min(way.most_ranks, MOST_RANKS if most is None else most)
    if setting.world <= most:
        forward, backward = on_paper(way, setting)
        return Call(forward=forward, backward=backward)
    worlds = _two(way, most)
    if setting.per_node * 2 > worlds[0] and setting.per_node < setting.world:
        raise ValueError(
            f"--nodes of {setting.per_node} ranks each: more than {most} ranks are foretold from {worlds[0]} and "
            f"{worlds[1]}, which must be two nodes at least; give more --nodes"
        )
    few, many = (on_paper(way, setting.over(world)) for world in worlds)
    line = _Line(way, worlds, setting.world)
    both = [line.extended(a, b) for a, b in zip(few, many, strict=True)]
    return Call(forward=both[0], backward=both[1], standing=worlds)


def on_paper(way: Way, setting: Setting) -> list[Pass]:
    """Both passes, run step by step as :meth:`Schedule.timed` does."""
    schedule, passes = setting.schedule(way), []
    wire = setting.planner.wire(setting.world)
    for direction in Direction:
        one = sheet(way, setting, schedule, direction)
        sent = messages_of(way, one, schedule)
        kind = wire.across(sent)
        inside, across = (float(sent.size[kind == n].sum()) / setting.world for n in (0, 1))
        passes.append(_pass(one.run(sent), inside, across))
    return passes


def sheet(way: Way, setting: Setting, schedule: Schedule, direction: Direction) -> OnPaper:
    """One pass, ready to be run."""
    both = schedule.on_paper(setting.shape, way.travels, way.groups, setting.planner.wire(setting.world))
    return next(one for one in both if one.direction is direction)


def messages_of(way: Way, one: OnPaper, schedule: Schedule) -> Messages:
    """All that is sent in a pass."""
    if not schedule.route.direct:
        return edge_messages(schedule.work(way.travels, one.direction, way.groups), one.shape)
    steps = one.tally.cells(one.direction, one.groups, one.inner)
    return one.tally.messages(one.shape, one.direction, one.inner, one.groups, steps)


def _pass(timed: Timed, inside: float, across: float) -> Pass:
    busiest = (float(timed.inside), float(timed.across))
    return Pass(seconds=timed.seconds, computing=timed.computing, inside=inside, across=across, busiest=busiest)


def _two(way: Way, most: int) -> tuple[int, int]:
    """Two worlds of which the larger has at most ``most`` ranks, or four context slices: blocks' are squares."""
    cut = way.groups.query
    if way.travels == "blocks":
        side = max(4, isqrt(most // cut))
        return cut * (side // 2) ** 2, cut * side**2
    slices = max(4, most // cut)
    return cut * (slices // 2), cut * slices


@dataclass(frozen=True)
class _Line:
    """Through figures of two worlds, and on to a larger one."""

    way: Way
    worlds: tuple[int, int]
    world: int

    def extended(self, few: Pass, many: Pass) -> Pass:
        computing = self._at(float, few.computing, many.computing)
        # What a rank sends, and so what is not hidden of it: by blocks it grows with their sides.
        sides = _sides if self.way.travels == "blocks" else float
        return Pass(
            computing=computing,
            # Where less and less is exposed, no less than what was seen.
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
    """Half the sum of a block's sides, of so many slices."""
    return (isqrt(slices) + slices / isqrt(slices)) / 2
