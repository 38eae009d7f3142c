"""The ways to compute a call, their predicted times, and the rule that picks one of them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np

from ..plan.assignment import CIRCULATIONS, PASS_QUERY
from ..plan.cost import Shape
from ..plan.groups import WHOLE, Groups, divisors
from ..plan.layout import Layout
from ..plan.strategy import ChunksOrAuto, Strategy
from .passes import Pass, passes
from .presets import preset
from .timing import Timed, Wire
from .traffic import TrafficModel

TIE = 1.05  # times within this factor are a tie: the model's own error is about as large
WORTH = 1.02  # of candidates that send and hold as much, one with fewer launches may take this multiple of the time
GUESSED = (1, 1 / 8, 1 / 64)  # of the preset's network: speeds to consider if it was not measured
MOST_REMEMBERED = 64
MOST_RANKS = 384  # of the simulations of the most promising candidates together, but at least LEAST_RUN candidates
LEAST_RUN = 6
LAYOUTS_TRIED = ("zigzag", "zigzag-by-halves", "contiguous")
T = TypeVar("T")


class Candidate(NamedTuple):
    """One way to compute a call: a split of heads, and what circulates (a name of ``CIRCULATIONS``)."""

    groups: Groups
    circulate: str

    def strategy(self, layout: str = "auto", route: str = "auto") -> Strategy:
        """Return the strategy that selects this candidate."""
        groups = self.groups
        strategy = Strategy(layout=layout, route=route, circulate=self.circulate, ulysses_degree=groups.query)
        if groups.gather:
            return replace(strategy, route="direct", gather_kv=True)
        return strategy if groups.query == 1 else replace(strategy, cache_qkv=groups.keep, chunks=groups.chunks)

    def __str__(self) -> str:
        return repr(self.strategy()).removeprefix("Strategy(").removesuffix(")")


@dataclass(frozen=True)
class Prediction:
    """A candidate's predicted passes; None if the lower bound ``at_least`` already rules it out."""

    candidate: Candidate
    at_least: float  # seconds
    across: float = math.inf  # bytes of the busiest rank across nodes, in all passes; inf if it is too slow to count
    inside: float = math.inf  # the same inside of a node
    forward: Timed | None = None
    backward: Timed | None = None
    times: tuple[int, int] = (1, 1)  # how often the forward and the backward run in a step

    @property
    def launches(self) -> float:
        """Launches of the rank with the most."""
        return sum(one.launches for n, one in zip(self.times, (self.forward, self.backward), strict=True) if one and n)

    @property
    def seconds(self) -> float:
        """Seconds of all forwards and backwards of a step."""
        if self.forward is None or self.backward is None:
            return self.at_least
        return self.times[0] * self.forward.seconds + self.times[1] * self.backward.seconds


def remembered(kept: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T], *, most: int | None = None) -> T:
    """Return ``make()`` for this key, remembered if it is among the ``most`` recent ones (:data:`MOST_REMEMBERED`)."""
    try:  # another thread may drop the oldest at any time
        kept.move_to_end(key)
        return kept[key]
    except KeyError:
        value = kept[key] = make()
        if len(kept) > (MOST_REMEMBERED if most is None else most):
            with suppress(KeyError):
                kept.popitem(last=False)
        return value


def least_regret(found: Sequence[Sequence[Prediction]]) -> int:
    """Return the index of the candidate with the smallest worst-case slowdown over several link speeds.

    ``found``: predictions of the same candidates, for each link speed. The slowdown is against the fastest candidate at
    the same speed. Candidates within :data:`TIE` of the best at every speed are a tie. It goes to the fewest bytes
    across nodes, then inside of a node, then to the least memory. If several remain, the fewest launches of those
    within :data:`WORTH` win, then the fastest: small launches cost more than the model knows.
    """
    run = [n for n, one in enumerate(found[0]) if one.forward]
    worst = dict(zip(run, _regrets([[each[n] for n in run] for each in found]), strict=True))
    best = min(run, key=worst.__getitem__)
    tied = [n for n in run if all(each[n].seconds <= TIE * each[best].seconds for each in found)]
    price = min(_price(found[0][n]) for n in tied)
    cheapest = [n for n in tied if _price(found[0][n]) == price]
    shortest = min(worst[n] for n in cheapest)
    near = (n for n in cheapest if worst[n] <= WORTH * shortest)
    return min(near, key=lambda n: (found[0][n].launches, worst[n]))


def _price(one: Prediction) -> tuple[float, float, float]:
    """Return what decides a tie: bytes across nodes and inside of one, and how often a rank holds keys and values."""
    groups = one.candidate.groups
    copies = groups.query // groups.key if groups.keep else 1  # each head group caches the key heads that it needs
    return one.across, one.inside, math.inf if groups.gather else copies


def _regrets(found: Sequence[Sequence[Prediction]]) -> list[float]:
    """Return each candidate's worst slowdown against the fastest at the same link speed; seconds if that takes none."""
    seconds = np.array([[one.seconds for one in each] for each in found])
    shortest = seconds.min(1, keepdims=True)
    worst: list[float] = (seconds / np.where(shortest, shortest, 1.0)).max(0).tolist()
    return worst


class _Search:
    """Predictions of candidates, for each link speed: lower bounds by work and bytes at first, then simulations."""

    def __init__(
        self,
        traffic: TrafficModel,
        shape: Shape,
        candidates: Sequence[Candidate],
        wires: Sequence[Wire],
        times: tuple[int, int],
        calls: int,
    ) -> None:
        self._given, self._candidates, self._wires, self._times = (traffic, shape), candidates, wires, times
        self._calls = calls
        busy = [[one.computing() for one in self._passes(n)] for n in range(len(candidates))]
        computing = [float(np.dot(times, each)) for each in busy]
        self.found = [
            [Prediction(*each, times=times) for each in zip(candidates, computing, strict=True)] for _ in wires
        ]
        self._simulate(0)
        # Candidates that differ in chunks alone move the same bytes.
        self.alike = [each._replace(groups=replace(each.groups, chunks=0)) for each in candidates]
        moving = cache(lambda whole: [one.moving(wires) for one in self._passes(self.alike.index(whole))])
        for n, whole in enumerate(self.alike):
            if any(computing[n] <= TIE * each[0].seconds for each in self.found):
                moved, seconds = zip(*moving(whole), strict=True)
                inside, across = np.dot(times, moved).tolist()
                for each, by_pass in zip(self.found, zip(*seconds, strict=True), strict=True):
                    least = sum(many * max(ends) for many, *ends in zip(times, busy[n], by_pass, strict=True))
                    each[n] = replace(each[n], at_least=least, across=across, inside=inside)

    def _passes(self, n: int) -> list[Pass]:
        """Make a candidate's passes anew, because a pass caches large arrays."""
        circulate, groups = self._candidates[n].circulate, self._candidates[n].groups
        return passes(*self._given, circulate, groups, self._wires[0], calls=self._calls)

    def _simulate(self, n: int) -> None:
        both = zip(*(one.run_on(self._wires) for one in self._passes(n)), strict=True)
        for each, (forward, backward) in zip(self.found, both, strict=True):
            each[n] = replace(each[n], forward=forward, backward=backward)

    def run(self, order: Sequence[int]) -> None:
        """Simulate candidates in this order until bounds show that no other can win.

        A candidate can't win if it is neither clearly faster than the best, nor a tie that moves or holds less.
        """
        prices, left = [_price(one) for one in self.found[0]], [*order]
        while True:
            worst, price = _regrets(self.found), prices[least_regret(self.found)]
            best = min(worst[n] for n, one in enumerate(self.found[0]) if one.forward)
            n = next((n for n in left if worst[n] < best * (TIE if prices[n] < price else 1 / WORTH)), None)
            if n is None:
                return
            self._simulate(n)
            left.remove(n)


def predict(
    traffic: TrafficModel,
    shape: Shape,
    candidates: Sequence[Candidate],
    wires: Sequence[Wire],
    *,
    times: tuple[int, int] = (1, 1),
    calls: int = 1,
) -> list[list[Prediction]]:
    """Predict both passes of each candidate over direct routes, for each link speed.

    ``times``: how often a step runs the forward and the backward. ``calls``: how many equal calls run in a row and
    overlap.

    The first candidate is always simulated. Of the others the most promising are, each with one number of chunks, and
    then the best of them with every number of chunks. Those whose lower bound shows that they can't win are left out.
    """
    search = _Search(traffic, shape, candidates, wires, times, calls)
    found, alike = search.found, search.alike
    # Most candidates need equally long to compute. Of these, the ones that move least come first.
    order = [*zip(_regrets(found), map(_price, found[0]), strict=True)]
    promising = sorted(range(1, len(candidates)), key=order.__getitem__)
    firsts = {alike[n]: n for n in reversed(promising)}
    most = max(LEAST_RUN, MOST_RANKS // traffic.world)
    search.run([n for n in promising if firsts[alike[n]] == n][:most])
    worst, best = _regrets(found), least_regret(found)
    near = {alike[n] for n, one in enumerate(found[0]) if one.forward and worst[n] <= WORTH * worst[best]}
    search.run([n for n in promising if alike[n] in near and not found[0][n].forward])
    return found


def cuts(layout: Layout, shape: Shape, strategy: Strategy, *, keys: Layout | None = None) -> Iterator[Groups]:
    """Yield the ways to split heads that a strategy leaves open, the fewest groups first.

    ``keys``: their layout, if it is not that of the queries. Raise ValueError if the heads can't be split as asked.
    """
    q_heads, kv_heads, world = shape.q_heads, shape.kv_heads, layout.world
    if strategy.gather_kv is True:
        yield Groups(gather=True)
        return
    if isinstance(strategy.ulysses_degree, int):
        counts = [strategy.ulysses_degree]
    else:
        counts = [n for n in divisors(world) if Groups.divide(n, q_heads=q_heads, kv_heads=kv_heads)]
    for count in counts:
        groups = Groups.of(count, q_heads=q_heads, kv_heads=kv_heads)
        # Ranks of a sequence group without tokens would have nothing to cache, and others would.
        nothing = count == 1 or not np.add.reduceat(layout.lengths, range(0, world, count)).all()
        keeps = [False] if nothing else [False, True] if strategy.cache_qkv == "auto" else [strategy.cache_qkv]
        for kept in keeps:
            whole = kept and count == world
            yield from chunkings(layout, replace(groups, keep=kept, results=whole), strategy.chunks)
        may_gather = strategy.gather_kv == "auto" and strategy.circulate in ("auto", "key-value")
        # All keys and values must take at most the memory of a rank's queries and results.
        few_keys = kv_heads * sum((keys or layout).lengths) * world <= q_heads * sum(layout.lengths)
        if count == 1 < world and may_gather and few_keys:
            yield Groups(gather=True)


def chunkings(layout: Layout, groups: Groups, chunks: ChunksOrAuto) -> Iterator[Groups]:
    """Yield the numbers of chunks to try: one, one per stretch over all ranks, and 0 if other groups can hide it."""
    if groups.query == 1:
        counts: list[int] = [0]
    elif chunks != "auto":
        counts = [chunks]
    else:
        counts = [*divisors(layout.stretches)]
        counts += [0] if groups.query < layout.world else []
    yield from (replace(groups, chunks=count) for count in counts)


def fixed_circulation(circulate: str, groups: Groups, world: int) -> str | None:
    """Return what circulates, if the strategy or the split of heads leaves no choice."""
    if circulate != "auto":
        return circulate
    if groups.query == world > 1:  # one sequence group: nothing circulates between groups
        return "query"
    return "key-value" if groups.gather else None


def candidates(
    traffic: TrafficModel, shape: Shape, given: Sequence[Groups], circulate: str, *, by_rule: bool, grad: bool = True
) -> list[Candidate]:
    """List the candidates that a strategy leaves open, simplest first; ``given``: the allowed splits of heads.

    ``by_rule``: with whole heads, only the choice of :func:`by_work_and_bytes` is a candidate.
    """
    found, known = list[Candidate](), [name for name in CIRCULATIONS if traffic.keys or name != PASS_QUERY]
    for groups in given:
        if fixed := fixed_circulation(circulate, groups, traffic.world):
            names = [fixed]
        elif groups == WHOLE:  # blocks would hold many shards in memory
            first = by_work_and_bytes(traffic, shape, shape.partial, grad=grad)
            names = [first] if by_rule else [first, *(x for x in known if x not in (first, "blocks"))]
        else:
            names = known
        found += [Candidate(groups, name) for name in names]
    return found


def by_work_and_bytes(traffic: TrafficModel, shape: Shape, partial_bytes: int, *, grad: bool = True) -> str:
    """Choose what circulates with whole heads. The rule ignores rates.

    ``nearest`` if it leaves the busiest rank clearly less to compute, as for a contiguous layout under a causal mask.
    Otherwise what moves fewer bytes; the query side on a tie. Bytes are counted as if each shard went directly to its
    users, and partial results (``partial_bytes`` per element) directly home. If queries and keys have two layouts,
    ``pass-query`` is also considered, and only ways whose busiest rank has little more to compute than the best's.

    ``grad``: whether the backward counts.
    """
    names, shape = (
        ("query", "key-value", *([PASS_QUERY] if traffic.keys else [])),
        replace(shape, partial=partial_bytes),
    )
    busiest, moved = dict[str, float](), dict[str, int]()
    wire = Wire(preset("cpu"), np.zeros(traffic.world, np.int64))
    for name in (*names, "nearest"):
        both = passes(traffic, shape, name, WHOLE, wire)[: 1 + grad]
        areas = [traffic.areas(one.inner, WHOLE, 0).max(initial=0) for one in both]
        busiest[name] = np.dot(areas, (1, 2.5)[: 1 + grad])
        moved[name] = sum(int(one.messages(bytes_only=True).size.sum()) for one in both)
    least = min(busiest[name] for name in names)
    if busiest["nearest"] < 0.95 * least:
        return "nearest"
    fair = [name for name in names if traffic.keys is None or 0.95 * busiest[name] <= least]
    return min(fair, key=moved.__getitem__)
