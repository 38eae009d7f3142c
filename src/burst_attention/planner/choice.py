"""The ways to compute a call, their predicted times, and the rule that picks one of them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..plan.assignment import CIRCULATIONS, PASS_QUERY
from ..plan.cost import Shape
from ..plan.groups import WHOLE, Groups, divisors
from ..plan.layout import Layout
from ..plan.strategy import ChunksOrAuto, Strategy
from .passes import PassModel, passes
from .presets import preset
from .timing import Timed, Wire
from .traffic import TrafficModel

TIE = 1.05  # times within this factor are a tie: the model's own error is about as large
WORTH = 1.02  # of candidates that send and hold as much, one with fewer launches may take this multiple of the time
GUESSED = (1, 1 / 8, 1 / 64)  # of the preset's network: speeds to consider if it was not measured
MOST_REMEMBERED = 64
FEW = 32  # up to this many ranks, every candidate that may win is simulated
MOST_RUN = 6  # for more ranks, simulate at most this many candidates
LAYOUTS_TRIED = ("zigzag", "zigzag-by-halves", "contiguous")
T = TypeVar("T")
BothPasses = list[tuple[Timed, Timed]]  # forward and backward, for each link speed
Share = Callable[[Callable[[int, int], Any]], list[Any]]  # calls f(rank, world) on every rank; returns all results


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


def least_regret(predictions: Sequence[Sequence[Prediction]]) -> int:
    """Return the index of the candidate with the smallest worst-case slowdown over several link speeds.

    ``predictions``: of the same candidates, for each link speed. The slowdown is against the fastest candidate at the
    same speed. Candidates within :data:`TIE` of the best at every speed are a tie. It goes to the fewest bytes
    across nodes, then inside of a node, then to the least memory. If several remain, the fewest launches of those
    within :data:`WORTH` win, then the fastest: small launches cost more than the model knows.
    """
    run = [n for n, one in enumerate(predictions[0]) if one.forward]
    worst = dict(zip(run, _regrets([[row[n] for n in run] for row in predictions]), strict=True))
    best = min(run, key=worst.__getitem__)
    tied = [n for n in run if all(row[n].seconds <= TIE * row[best].seconds for row in predictions)]
    price = min(_price(predictions[0][n]) for n in tied)
    cheapest = [n for n in tied if _price(predictions[0][n]) == price]
    shortest = min(worst[n] for n in cheapest)
    near = (n for n in cheapest if worst[n] <= WORTH * shortest)
    return min(near, key=lambda n: (predictions[0][n].launches, worst[n]))


def _price(prediction: Prediction) -> tuple[float, float, float]:
    """Return what decides a tie: bytes across nodes and inside of one, and how often a rank holds keys and values."""
    groups = prediction.candidate.groups
    copies = groups.query // groups.key if groups.keep else 1  # each head group caches the key heads that it needs
    return prediction.across, prediction.inside, math.inf if groups.gather else copies


def _regrets(predictions: Sequence[Sequence[Prediction]]) -> list[float]:
    """Return each candidate's worst slowdown against the fastest at the same link speed; seconds if that takes none."""
    seconds = np.array([[prediction.seconds for prediction in row] for row in predictions])
    shortest = seconds.min(1, keepdims=True)
    worst: list[float] = (seconds / np.where(shortest, shortest, 1.0)).max(0).tolist()
    return worst


def predict(
    traffic: TrafficModel,
    shape: Shape,
    candidates: Sequence[Candidate],
    wires: Sequence[Wire],
    *,
    times: tuple[int, int] = (1, 1),
    calls: int = 1,
    share: Share | None = None,
) -> list[list[Prediction]]:
    """Predict both passes of each candidate over direct routes, for each link speed.

    ``times``: how often a step runs the forward and the backward. ``calls``: how many equal calls run in a row and
    overlap. ``share``: the ranks divide the simulations among them. The predictions are the same without it.

    The first candidate is always simulated. Others are skipped when a lower bound by work and bytes shows that they
    can't win: they are neither clearly faster, nor a tie that moves or holds less. For many ranks only the most
    promising are simulated, and then the best of them with every number of chunks.
    """

    def both(n: int) -> list[PassModel]:  # made again, because a pass caches large arrays
        return passes(traffic, shape, candidates[n].circulate, candidates[n].groups, wires[0], calls=calls)

    busy = [[one.computing() for one in both(n)] for n in range(len(candidates))]
    computing = [sum(n * seconds for n, seconds in zip(times, each, strict=True)) for each in busy]
    predictions = [[Prediction(*each, times=times) for each in zip(candidates, computing, strict=True)] for _ in wires]

    @cache
    def simulated(n: int) -> BothPasses:
        return [*zip(*(one.run_on(wires) for one in both(n)), strict=True)]

    alike = [each._replace(groups=replace(each.groups, chunks=0)) for each in candidates]  # they move the same bytes

    @cache
    def moving(whole: Candidate) -> list[tuple[tuple[int, int], list[float]]]:
        return [one.moving(wires) for one in both(alike.index(whole))]

    _put(predictions, 0, simulated(0))
    for n, whole in enumerate(alike):
        if any(computing[n] <= TIE * each[0].seconds for each in predictions):
            moved, seconds = zip(*moving(whole), strict=True)
            inside, across = np.dot(times, moved).tolist()
            for row, by_pass in zip(predictions, zip(*seconds, strict=True), strict=True):
                least = sum(many * max(ends) for many, *ends in zip(times, busy[n], by_pass, strict=True))
                row[n] = replace(row[n], at_least=least, across=across, inside=inside)
    # Most candidates need equally long to compute. Of these, the ones that move least come first.
    order = [*zip(_regrets(predictions), map(_price, predictions[0]), strict=True)]
    promising = sorted(range(1, len(candidates)), key=order.__getitem__)
    if traffic.world <= FEW:
        _simulate(predictions, promising, simulated, share)
        return predictions
    firsts = {alike[n]: n for n in reversed(promising)}
    _simulate(predictions, [n for n in promising if firsts[alike[n]] == n][:MOST_RUN], simulated, share)
    best = alike[least_regret(predictions)]
    rest = [n for n in promising if alike[n] == best and not predictions[0][n].forward]
    _simulate(predictions, rest, simulated, share)
    return predictions


def _simulate(
    predictions: Sequence[list[Prediction]],
    order: Sequence[int],
    simulated: Callable[[int], BothPasses],
    share: Share | None,
) -> None:
    """Simulate candidates in this order until no other can win; with ``share``, each rank first every W-th one."""
    results: dict[int, BothPasses] = {}

    def every(rank: int, world: int) -> list[tuple[int, list[list[dict[str, Any]]]]]:
        ran = _until_none_wins([[*each] for each in predictions], order[rank::world], simulated)
        return [(n, [[asdict(one) for one in both] for both in simulated(n)]) for n in ran]

    if share is not None and len(order) > 1:
        for ran in share(every):
            results |= {n: [(Timed(**forward), Timed(**backward)) for forward, backward in both] for n, both in ran}
    _until_none_wins(predictions, order, lambda n: results[n] if n in results else simulated(n))


def _until_none_wins(
    predictions: Sequence[list[Prediction]], order: Sequence[int], simulated: Callable[[int], BothPasses]
) -> list[int]:
    """Fill in passes of candidates in this order until bounds show that no other can win. Return these candidates."""
    prices, left, ran = [_price(prediction) for prediction in predictions[0]], [*order], list[int]()
    while True:
        worst, price = _regrets(predictions), prices[least_regret(predictions)]
        best = min(worst[n] for n, prediction in enumerate(predictions[0]) if prediction.forward)
        n = next((n for n in left if worst[n] < best * (TIE if prices[n] < price else 1 / WORTH)), None)
        if n is None:
            return ran
        _put(predictions, n, simulated(n))
        left.remove(n)
        ran.append(n)


def _put(predictions: Sequence[list[Prediction]], n: int, both: BothPasses) -> None:
    """Put the passes of the ``n``-th candidate into the predictions of every link speed."""
    for row, (forward, backward) in zip(predictions, both, strict=True):
        row[n] = replace(row[n], forward=forward, backward=backward)


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
    traffic: TrafficModel, shape: Shape, splits: Sequence[Groups], circulate: str, *, by_rule: bool, grad: bool = True
) -> list[Candidate]:
    """List the candidates that a strategy leaves open, simplest first; ``splits``: the allowed splits of heads.

    ``by_rule``: with whole heads, only the choice of :func:`by_work_and_bytes` is a candidate.
    """
    result, circulations = list[Candidate](), [name for name in CIRCULATIONS if traffic.keys or name != PASS_QUERY]
    for groups in splits:
        if fixed := fixed_circulation(circulate, groups, traffic.world):
            names = [fixed]
        elif groups == WHOLE:  # blocks would hold many shards in memory
            first = by_work_and_bytes(traffic, shape, shape.partial, grad=grad)
            names = [first] if by_rule else [first, *(x for x in circulations if x not in (first, "blocks"))]
        else:
            names = circulations
        result += [Candidate(groups, name) for name in names]
    return result


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
        areas = [one.areas(0).max(initial=0) for one in both]
        busiest[name] = np.dot(areas, (1, 2.5)[: 1 + grad])
        moved[name] = sum(int(one.messages(bytes_only=True).size.sum()) for one in both)
    least = min(busiest[name] for name in names)
    if busiest["nearest"] < 0.95 * least:
        return "nearest"
    fair = [name for name in names if traffic.keys is None or 0.95 * busiest[name] <= least]
    return min(fair, key=moved.__getitem__)
