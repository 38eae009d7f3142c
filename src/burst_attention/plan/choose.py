"""The plan that is predicted to be fastest: how heads are cut, what travels, which layout. Chosen alike on all ranks.

A choice is a function of what all ranks know: lengths, what kind the mask is, a call's heads and dtype, rates (rank
0's) and nodes. What was chosen before is remembered, and changes nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from .assignment import TRAVELS
from .cost import Shape
from .groups import WHOLE, Groups, divisors
from .layout import Layout
from .mask import Mask
from .presets import preset
from .rates import Rates
from .rows import Direction, Side
from .tally import Tally
from .timing import OnPaper, Timed, Wire, node_numbers, on_paper

HeadsOrAuto = int | Literal["auto"]
KeepOrAuto = bool | Literal["auto"]
WavesOrAuto = int | Literal["auto"]
Remat = Literal["none", "layer", "keep-attention"]
WORTH = 1.02  # how many times as long the simpler of two may take
GUESSED = (1, 1 / 8, 1 / 64)  # of the rates of links that nobody measured, all that is looked at
MOST_REMEMBERED = 64
FEW = 32  # ranks up to which every candidate is run that may be the fastest
MOST_RUN = 6  # of more ranks'
LAYOUTS_TRIED = ("zigzag", "zigzag-by-halves", "contiguous")
T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """One way to compute a call: how heads are cut, and what travels, of ``TRAVELS``."""

    groups: Groups
    travels: str

    def __str__(self) -> str:
        kept = ", kept" if self.groups.keep else ""
        waves = f", {self.groups.waves} wave{'s'[: self.groups.waves > 1]}" if self.groups.waves else ""
        return f"heads={self.groups.query}{kept}{waves}, {self.travels}"


@dataclass(frozen=True)
class Prediction:
    """A candidate's two passes; None for those that can't be shorter than ``at_least``, which is enough to know.

    ``forwards``: how often the forward runs in a step.
    """

    candidate: Candidate
    at_least: float
    forward: Timed | None = None
    backward: Timed | None = None
    forwards: int = 1

    @property
    def launches(self) -> float:
        """Of the rank that has most."""
        return sum(one.launches for one in (self.forward, self.backward) if one)

    @property
    def seconds(self) -> float:
        """Of the forward, as often as it runs, and the backward."""
        if self.forward is None or self.backward is None:
            return self.at_least
        return self.forwards * self.forward.seconds + self.backward.seconds


@dataclass(eq=False)
class Planner:
    """What choices are made from, and those of late; one for a plan and those derived from it.

    Attributes:
        known: what ``make_plan`` was told of the calls to come: a layout that was left to it is chosen for them.
        nodes: the node of each rank; None if they share one.
        guessed: nobody measured these links, nor told them: what is chosen is what loses least if they are slower, too.
        remat: what of a layer is recomputed for its backward.
    """

    rates: Rates = field(default_factory=partial(preset, "cpu"))
    nodes: tuple[int, ...] | None = None
    known: Shape | None = None
    guessed: bool = False
    remat: Remat = "none"
    _remembered: OrderedDict[Hashable, object] = field(default_factory=OrderedDict, repr=False, init=False)

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gave for this key, of late or now."""
        if key not in self._remembered:
            self._remembered[key] = make()
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(key)
        return self._remembered[key]  # type: ignore[return-value]

    @property
    def forwards(self) -> int:
        """How often a call's forward runs in a step: again where the layer around it is recomputed."""
        return 2 if self.remat == "layer" else 1

    def wire(self, world: int) -> Wire:
        """The ports of ``world`` ranks."""
        return Wire(self.rates, node_numbers(self.nodes, world))

    def wires(self, world: int) -> list[Wire]:
        """The same, and slower ones if that is no more than a guess."""
        at = node_numbers(self.nodes, world)
        return [Wire(self.rates.slowed(part), at) for part in (GUESSED if self.guessed else GUESSED[:1])]


def least_regret(found: Sequence[Sequence[Prediction]]) -> int:
    """Which of the same candidates on each of several wires: that which at the worst takes least longer than the
    fastest there. On one wire that is the fastest. Of those that take longer by less than it is worth to look on that
    with the fewest launches, for small ones cost more than is known of them; then the fastest."""
    run = [n for n, one in enumerate(found[0]) if one.forward]
    worst = dict(zip(run, _regrets([[each[n] for n in run] for each in found]), strict=True))
    near = (n for n in run if worst[n] <= WORTH * min(worst.values()))
    return min(near, key=lambda n: (found[0][n].launches, worst[n]))


def _regrets(found: Sequence[Sequence[Prediction]]) -> list[float]:
    """How many times as long each takes as the fastest on the same wire, at the worst.

    Where the fastest takes no time (no tokens, no overheads), the seconds.
    """
    shortest = [min(one.seconds for one in each) or 1.0 for each in found]
    by_candidate = (zip(ones, shortest, strict=True) for ones in zip(*found, strict=True))
    return [max(one.seconds / least for one, least in each) for each in by_candidate]


def predict(
    tally: Tally, shape: Shape, candidates: Sequence[Candidate], wires: Sequence[Wire], *, forwards: int = 1
) -> list[list[Prediction]]:
    """On each wire both passes of each candidate over direct routes, in their order; ``forwards`` in a step.

    The first is run, for the others are compared with it; those that it or a better one rules out by their work and
    bytes alone are not. Of many ranks' no more than the most promising are, which differ in more than their waves, and
    the best of them in all waves.
    """
    both = [on_paper(tally, shape, each.travels, each.groups, wires[0]) for each in candidates]
    times = forwards, 1
    busy = [[one.computing() for one in ones] for ones in both]
    computing = [sum(n * seconds for n, seconds in zip(times, each, strict=True)) for each in busy]
    found = [[Prediction(*each, forwards=forwards) for each in zip(candidates, computing, strict=True)] for _ in wires]
    _run(found, both, 0, wires)
    alike = [replace(each, groups=replace(each.groups, waves=0)) for each in candidates]
    moving: dict[Candidate, list[tuple[float, ...]]] = {}  # in how many waves shards come does not change their bytes
    for n in range(1, len(candidates)):
        if any(computing[n] * WORTH < each[0].seconds for each in found):
            if alike[n] not in moving:
                moving[alike[n]] = [*zip(*(one.moving(wires) for one in both[n]), strict=True)]
            for each, moves in zip(found, moving[alike[n]], strict=True):
                least = (many * max(both_ends) for many, *both_ends in zip(times, busy[n], moves, strict=True))
                each[n] = replace(each[n], at_least=sum(least))
    # Where all take as long to compute, which they mostly do, those first that move least.
    moved = [sum(moving[each][-1]) if each in moving else math.inf for each in alike]
    promising = sorted(range(1, len(candidates)), key=[*zip(_regrets(found), moved, strict=True)].__getitem__)
    if tally.world <= FEW:
        _run_promising(found, both, promising, wires)
        return found
    firsts = {alike[n]: n for n in reversed(promising)}
    _run_promising(found, both, [n for n in promising if firsts[alike[n]] == n][:MOST_RUN], wires)
    best = alike[least_regret(found)]
    _run_promising(found, both, [n for n in promising if alike[n] == best and not found[0][n].forward], wires)
    return found


def _run_promising(
    found: Sequence[list[Prediction]], both: Sequence[Sequence[OnPaper]], order: Sequence[int], wires: Sequence[Wire]
) -> None:
    """Candidates in this order, until none can be better any more."""
    for n in order:
        worst = _regrets(found)
        if worst[n] * WORTH >= min(worst[m] for m, one in enumerate(found[0]) if one.forward):
            break
        _run(found, both, n, wires)


def _run(found: Sequence[list[Prediction]], both: Sequence[Sequence[OnPaper]], n: int, wires: Sequence[Wire]) -> None:
    """The ``n``-th candidate on every wire."""
    passes = zip(*(one.run_on(wires) for one in both[n]), strict=True)
    for each, timed in zip(found, passes, strict=True):
        each[n] = replace(each[n], forward=timed[0], backward=timed[1])


def cuts(layout: Layout, shape: Shape, heads: HeadsOrAuto, keep: KeepOrAuto, waves: WavesOrAuto) -> Iterator[Groups]:
    """The ways to cut heads that were left open, the fewest groups first.

    Raises:
        ValueError: these heads can't be cut into as many groups as were asked for.
    """
    q_heads, kv_heads, world = shape.q_heads, shape.kv_heads, layout.world
    if heads != "auto":
        counts = [heads]
    else:
        counts = [n for n in divisors(world) if Groups.divide(n, q_heads=q_heads, kv_heads=kv_heads)]
    for count in counts:
        groups = Groups.of(count, q_heads=q_heads, kv_heads=kv_heads)
        # Where a slice has no token its ranks would have nothing to keep, others would.
        nothing = count == 1 or _some_slice_is_empty(layout, count)
        keeps = [False] if nothing else [False, True] if keep == "auto" else [keep]
        for kept in keeps:
            yield from in_all_waves(layout, replace(groups, keep=kept), waves)


def _some_slice_is_empty(layout: Layout, count: int) -> bool:
    """Has none of ``count`` neighbours a token?"""
    return bool((np.add.reduceat(layout.lengths, range(0, layout.world, count)) == 0).any())


def in_all_waves(layout: Layout, groups: Groups, waves: WavesOrAuto) -> Iterator[Groups]:
    """The numbers of waves that are tried, if it is not said: all at once; one for each stretch of the sequence that is
    spread over all ranks; and owner by owner, where contexts behind one another hide that."""
    if groups.query == 1:
        counts: list[int] = [0]
    elif waves != "auto":
        counts = [waves]
    else:
        counts = [*divisors(layout.stretches)]
        counts += [0] if groups.query < layout.world else []
    yield from (replace(groups, waves=count) for count in counts)


def candidates(
    tally: Tally, shape: Shape, given: Sequence[Groups], travels: str, *, by_rule: bool, partial_bytes: int
) -> list[Candidate]:
    """All that was left open, the simplest first: heads that nobody cuts, by the rule for those.

    Args:
        given: how heads may be cut.
        travels: a name of ``TRAVELS``, or ``auto``.
        by_rule: what travels where none is cut is :func:`by_work_and_bytes`, and nothing else.
        partial_bytes: as for that.
    """
    found = []
    for groups in given:
        if travels != "auto":
            names: tuple[str, ...] = (travels,)
        elif groups.query == tally.world > 1:  # one context slice: nothing travels between slices
            names = ("query",)
        elif groups == WHOLE:  # blocks would hold many shards at once
            first = by_work_and_bytes(tally, shape, partial_bytes)
            names = (first,) if by_rule else (first, *(x for x in TRAVELS if x not in (first, "blocks")))
        else:
            names = tuple(TRAVELS)
        found += [Candidate(groups, name) for name in names]
    return found


def by_work_and_bytes(tally: Tally, shape: Shape, partial_bytes: int) -> str:
    """What had best travel if heads are not cut, whatever the rates.

    Either, where that leaves the busiest rank markedly less to compute: a contiguous layout under a causal mask. Else
    what needs fewer bytes in the backward, the query side on a tie. Counted as if each shard went straight to its users
    and partial results, of ``partial_bytes`` an element, straight home, whatever the route.
    """
    pairs = tally.pairs
    busiest = {}
    for travels in ("query", "key-value", "either"):
        by = TRAVELS[travels](tally.world)
        most = {d: np.bincount(assign(pairs.i, pairs.j), pairs.area, 1).max(initial=0) for d, assign in by.items()}
        busiest[travels] = most[Direction.FORWARD] + 2.5 * most[Direction.BACKWARD]
    if busiest["either"] < 0.95 * min(busiest["query"], busiest["key-value"]):
        return "either"
    totals = {}
    for name, side in (("query", Side.QUERY), ("key-value", Side.KEY)):
        out, home = (shape.side_bytes(side, Direction.BACKWARD, wide=wide) for wide in (None, partial_bytes))
        totals[name] = int(pairs.rows[side][pairs.i != pairs.j].sum()) * (out + home)
    return min(totals, key=totals.__getitem__)


def representative(layout: Layout, mask: Mask) -> tuple[Layout, Mask]:
    """A mask of the same kind: packed documents as so many equal ones, a power of two, as have about their work.

    So that steps whose documents differ share a choice; a choice need not be made anew for each.
    """
    if mask.cu_seqlens is None:
        return layout, mask
    lengths = np.diff(np.asarray(mask.cu_seqlens, np.float64))
    work, total = float((lengths**2).sum()), layout.seqlen
    count = 1 << max(0, round(float(np.log2(total * total / work)))) if work else 1
    borders = tuple(n * total // count for n in range(count + 1))
    alike = replace(mask, cu_seqlens=borders if count > 1 else None)
    return layout.cut_for(alike, total) if layout.by_mask else layout, alike
