"""Predict the seconds of a pass by simulating the sweep's steps: post the next exchange, compute, wait, fold.

The simulation uses the messages of :mod:`.traffic` and the cells that each step completes. Messages are exact. The
number of tiles is an estimate once several shards share a buffer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..plan.assignment import CIRCULATIONS, Assignment
from ..plan.cost import Shape
from ..plan.groups import IN_FLIGHT, Groups
from ..plan.rows import Direction, Side
from .rates import Rates
from .traffic import PARTIAL, RELAYED, Messages, Steps, TrafficModel

RUNS = 1.5  # mean runs of positions per segment of a shard while a sequence group's buffer is incomplete


@dataclass(frozen=True, eq=False)
class Computing:
    """Work of each rank at each step, float64 [W, T]."""

    seconds: np.ndarray
    launches: np.ndarray
    visits: np.ndarray


@dataclass(frozen=True, eq=False)
class Wire:
    """The ports that messages use, and the seconds that they take."""

    rates: Rates
    nodes: np.ndarray  # node of each rank, from 0

    @cached_property
    def ports(self) -> np.ndarray:
        """Port by which each rank sends inside of its node, and across nodes, int64 [2, W]."""
        world, links = len(self.nodes), (self.rates.inside, self.rates.across)
        each = [self.nodes if link.shared else np.arange(world) for link in links]
        return np.stack([n * world + ports for n, ports in enumerate(each)])

    def across(self, messages: Messages) -> np.ndarray:
        """Return 1 for messages between two nodes and 0 for others, int64 [N]."""
        return (self.nodes[messages.source] != self.nodes[messages.target]).astype(np.int64)

    def seconds(self, messages: Messages) -> tuple[np.ndarray, ...]:
        """Return each message's sending port, receiving port, and seconds on either of them."""
        kind, links = self.across(messages), (self.rates.inside, self.rates.across)
        latency, rate = (np.array([getattr(x, name) for x in links]) for name in ("latency", "bytes_per_second"))
        took = latency[kind] + messages.size / rate[kind]
        return self.ports[kind, messages.source], self.ports[kind, messages.target], took

    def busy(self, messages: Messages, rank: int) -> float:
        """Return the seconds that a rank's ports need for all their messages."""
        out, into, took = self.seconds(messages)
        each = np.maximum(*(np.bincount(port, took, 2 * len(self.nodes)) for port in (out, into)))
        return float(each[self.ports[:, rank]].sum())

    def least(self, messages: Messages) -> float:
        """Return a lower bound of the exchange: the seconds of the busiest port."""
        out, into, took = self.seconds(messages)
        return max((np.bincount(port, took).max(initial=0.0) for port in (out, into)), default=0.0)


def computing(
    traffic: TrafficModel, shape: Shape, direction: Direction, steps: Steps, groups: Groups, rates: Rates
) -> Computing:
    """Predict the work of one pass."""
    before = groups.keep and direction is Direction.BACKWARD
    contexts, step = traffic.world // groups.query, steps.step
    last = int(step.max(initial=0)) + 1
    rows = np.arange(len(step))[:, None] * contexts
    code = ((rows + steps.user) * last + step).ravel()

    def by_step(weights: np.ndarray) -> np.ndarray:
        """Sum weights [G, N] by head group, sequence group and step, float64 [G, R, T]."""
        total = np.bincount(code, np.broadcast_to(weights, step.shape).ravel(), len(step) * contexts * last)
        return total.reshape(len(step), contexts, last)

    heads = shape.batch * shape.q_heads / groups.query
    extra, forward = rates.overhead, direction is Direction.FORWARD
    area = by_step(traffic.computed(groups, extra.block))
    launches, visits, folded = _launches(traffic, by_step, steps, groups, fetched_before=before)
    kv_heads = shape.batch * shape.kv_heads / groups.key
    bytes_folded = folded[Side.QUERY] * heads * (shape.v_head_dim if forward else shape.head_dim)
    if not forward:
        bytes_folded = bytes_folded + folded[Side.KEY] * kv_heads * (shape.head_dim + shape.v_head_dim)
    seconds = area * _per_cell(shape, direction, groups, rates)
    seconds += launches * (extra.launch_forward if forward else extra.launch_backward)
    seconds += visits * extra.visit + bytes_folded * shape.accumulate / extra.fold
    order = traffic.example(groups)
    # from [U, R, T] to [W, T], where rank u + U c is row (u, c)
    return Computing(*(x[order].swapaxes(0, 1).reshape(traffic.world, last) for x in (seconds, launches, visits)))


def _per_cell(shape: Shape, direction: Direction, groups: Groups, rates: Rates) -> float:
    """Return the seconds of one (query, key) pair of one head group."""
    heads, speed = shape.batch * shape.q_heads / groups.query, rates.speed(shape.io)
    forward = direction is Direction.FORWARD
    products = (1, 1) if forward else (3, 2)  # scores, P V; scores, dS K, dS' Q; dO V', P' dO
    flops = 2 * heads * (products[0] * shape.head_dim + products[1] * shape.v_head_dim)
    return flops / (speed.forward if forward else speed.backward)


def _launches(
    traffic: TrafficModel,
    by_step: Callable[[np.ndarray], np.ndarray],
    steps: Steps,
    groups: Groups,
    *,
    fetched_before: bool,
) -> tuple[np.ndarray, np.ndarray, dict[Side, np.ndarray]]:
    """Estimate launches, visits, and folded rows by side, [G, R, T]. New queries meet all keys, old ones new keys."""
    pairs = traffic.pairs
    if groups.gather:
        return _of_gathered(traffic, by_step)
    if groups.query == 1:
        touched = {side: by_step(pairs.rows[side]) for side in Side}
        return by_step(pairs.tiles), by_step(np.ones(1)), touched
    if groups.chunks:
        return _of_chunks(traffic, by_step, steps, groups)
    cut = traffic.segments
    runs = 1.0 if fetched_before else RUNS * (1 + cut) / 2
    new, old = steps.new_query, steps.new_key & ~steps.new_query
    counts = [by_step(these) for these in (new, old)]
    here = [np.minimum(count, 1) for count in counts]
    more = by_step(pairs.tiles - 1 + (pairs.border > 0))
    launches = runs * cut * (here[0] + here[1]) / (1 if fetched_before else 1.5) + more
    # A shard's rows are folded once per run that they meet, the other side's rows once per segment of the shard.
    whole = {
        side: by_step(pairs.rows[side] * these) / np.maximum(count, 1) * runs
        for side, these, count in zip(Side, (new, old), counts, strict=True)
    }
    folded = {
        Side.QUERY: whole[Side.QUERY] + by_step(pairs.touched[Side.QUERY] * old),
        Side.KEY: whole[Side.KEY] + by_step(pairs.touched[Side.KEY] * new),
    }
    return launches, np.minimum(here[0] + here[1], 1), folded


def _of_gathered(
    traffic: TrafficModel, by_step: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, dict[Side, np.ndarray]]:
    """Estimate :func:`_launches` if all foreign keys share a buffer: a later segment of queries meets more runs."""
    pairs, cut = traffic.pairs, traffic.segments
    pairs_here = by_step(np.ones(1))
    here = np.minimum(pairs_here, 1)
    folded = by_step(pairs.rows[Side.QUERY]) / np.maximum(pairs_here, 1) * (cut + 1) / 2
    launches = here * cut * (cut + 1) / 2 + by_step(pairs.tiles - 1)
    return launches, here, {Side.QUERY: folded, Side.KEY: by_step(pairs.rows[Side.KEY])}


def _of_chunks(
    traffic: TrafficModel, by_step: Callable[[np.ndarray], np.ndarray], steps: Steps, groups: Groups
) -> tuple[np.ndarray, np.ndarray, dict[Side, np.ndarray]]:
    """Estimate :func:`_launches` if a sequence group's chunks join into stretches.

    A stretch that meets itself is one tile. Other cells between two groups are one tile per stretch of queries, or of
    keys if those are fewer.
    """
    pairs = traffic.pairs
    query, key = (traffic.beside(chunk, groups) for chunk in (pairs.i, pairs.j))
    stretch = traffic.beside(np.arange(traffic.parts), groups)
    runs = {side: traffic.runs(groups, side) for side in Side}
    rows = {side: np.bincount(stretch, traffic.lengths[side]) for side in Side}
    many, last = len(runs[Side.KEY]), int(steps.step.max(initial=0)) + 1
    visit = (np.arange(len(steps.step))[:, None] * many + steps.user) * last + steps.step
    one = _first((visit * many + query) * many + key)  # count each pair of stretches once
    inside, beyond = one * (query == key), one * (query != key)
    slices = (visit * many + query // traffic.chunks) * many + key // traffic.chunks
    _, which = np.unique(slices, return_inverse=True)
    which = which.reshape(slices.shape)
    by_query, by_key = (beyond * _first(np.where(beyond, which * many + each, -1)) for each in (query, key))
    counts = [np.bincount(which.ravel(), each.ravel()) for each in (by_query, by_key)]
    queries_alone = (counts[0] <= counts[1])[which]
    tiles = np.where(queries_alone, by_query, by_key)
    launches = by_step((inside + tiles) * np.maximum(runs[Side.QUERY][query], runs[Side.KEY][key])) + by_step(
        pairs.tiles - 1
    )
    here = [np.minimum(by_step(these), 1) for these in (steps.new_query, steps.new_key & ~steps.new_query)]
    met = {Side.QUERY: np.where(queries_alone, by_query, beyond), Side.KEY: np.where(queries_alone, beyond, by_key)}
    folded = {
        side: by_step((inside + met[side]) * rows[side][each]) for side, each in zip(Side, (query, key), strict=True)
    }
    return launches, np.minimum(here[0] + here[1], 1), folded


def _first(codes: np.ndarray) -> np.ndarray:
    """Return 1 where a value occurs for the first time, else 0."""
    found = np.zeros(codes.shape)
    found.flat[np.unique(codes, return_index=True)[1]] = 1
    return found


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The predicted figures of one pass."""

    seconds: float  # until the last rank is done; of calls that overlap, the mean
    computing: float  # seconds in which that rank computes, or waits for cores that ranks share
    visits: float  # of the rank with the most
    launches: float  # of the rank with the most
    inside: float  # bytes inside of a node, of the rank that sends or receives the most
    across: float  # bytes across nodes, of the rank that sends or receives the most

    @property
    def exposed(self) -> float:
        """Seconds of exchange that no computation hides."""
        return self.seconds - self.computing


def timed(messages: Messages, work: Computing, wire: Wire, *, calls: int = 1, in_flight: int = IN_FLIGHT) -> Timed:
    """Simulate a pass of all ranks together; ``in_flight`` exchanges may be posted and not yet waited for.

    Of ``calls`` equal calls in a row, each posts its first exchange before its predecessor computes, and waits for its
    last one after its successor has begun. These waits occur once, as far as other work can fill them.
    """
    world = len(wire.nodes)
    ends, computed, outer = _run(messages, work.seconds, wire, in_flight)
    slowest = int(ends.argmax()) if world else 0
    call = wire.rates.overhead.call
    inside, across = moved_bytes(messages, wire)
    alone, busy = float(ends[slowest]), float(computed[slowest])
    at_once, shared = wire.rates.overhead.at_once, 0.0
    if 0 < at_once < world:  # what its ports don't need, it waits for cores
        busy, shared = max(busy, alone - wire.busy(messages, slowest)), computed.sum() / at_once
    if calls > 1:
        least = max(float(computed.max()), float(shared), wire.least(messages))
        alone -= max(0.0, min(float(outer[slowest]), alone - least)) * (1 - 1 / calls)
    return Timed(
        seconds=alone + call,
        computing=min(busy, alone) + call,
        visits=float(work.visits.sum(1).max()),
        launches=float(work.launches.sum(1).max()),
        inside=inside,
        across=across,
    )


def moved_bytes(messages: Messages, wire: Wire) -> tuple[int, int]:
    """Return the bytes inside of a node, and across nodes, of the rank that sends or receives the most."""
    kind, ends = wire.across(messages), (messages.source, messages.target)
    inside, across = (max(int(np.bincount(end, messages.size * (kind == n), 1).max()) for end in ends) for n in (0, 1))
    return inside, across


def _run(
    messages: Messages, seconds: np.ndarray, wire: Wire, in_flight: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the time at which each rank is done, its seconds of computation, and those of the first and last wait."""
    world, at_once = len(wire.nodes), wire.rates.overhead.at_once
    order = np.argsort(messages.step, kind="stable")
    out, into, took = (x[order] for x in wire.seconds(messages))
    step, source, target, kind = (x[order] for x in (messages.step, messages.source, messages.target, messages.kind))
    folding = np.where(kind & PARTIAL, messages.size[order] / wire.rates.overhead.fold, 0.0)
    last = max(seconds.shape[1], int(step.max(initial=0)) + 1)
    cuts = np.searchsorted(step, np.arange(last + 1))
    free = np.zeros((2, 2 * world))  # when each port, out and in, becomes free
    now, posted, waited, computed = (np.zeros(world) for _ in range(4))
    done: list[np.ndarray] = []  # after the visits of each step
    waits: list[np.ndarray] = []  # of each exchange
    for t in range(last):
        at = slice(cuts[t], cuts[t + 1])
        if at.start < at.stop:
            room = done[t - in_flight] if t >= in_flight else np.zeros(world)
            posted = np.maximum(posted, room)
            relayed = source[at][(kind[at] & RELAYED) > 0]
            posted[relayed] = np.maximum(posted[relayed], waited[relayed])
            waited = np.maximum(waited, _exchange(source[at], target[at], out[at], into[at], took[at], posted, free))
            waits.append(np.maximum(0.0, waited - now))
            fold = np.bincount(target[at], folding[at], world)
            now, computed = np.maximum(now, waited) + fold, computed + fold
        if t < seconds.shape[1]:
            now, computed = _share(now, seconds[:, t], at_once), computed + seconds[:, t]
        if 0 < at_once < world:  # ranks at different steps also share the cores
            now = now + max(0.0, computed.sum() / at_once - now.max())
        done.append(now)
    return now, computed, sum(waits[1:][-1:], waits[0] if waits else np.zeros(world))


def _share(begin: np.ndarray, seconds: np.ndarray, at_once: float) -> np.ndarray:
    """Return when each rank ends a step that it begins at ``begin``, if ``at_once`` ranks run at full speed."""
    if not 0 < at_once < len(begin):
        return begin + seconds
    end, computing = begin.copy(), list[tuple[float, int]]()
    now = given = 0.0  # the time, and the core seconds until then of a rank that always computes
    for rank in [*np.argsort(begin, kind="stable").tolist(), None]:
        until = float("inf") if rank is None else float(begin[rank])
        while computing:
            pace = min(1.0, at_once / len(computing))
            done = now + (computing[0][0] - given) / pace
            if done > until:
                given += (until - now) * pace
                break
            now, given = done, computing[0][0]
            end[heapq.heappop(computing)[1]] = done
        now = until
        if rank is not None:
            heapq.heappush(computing, (given + float(seconds[rank]), rank))
    return end


def _exchange(
    source: np.ndarray,
    target: np.ndarray,
    out: np.ndarray,
    into: np.ndarray,
    took: np.ndarray,
    posted: np.ndarray,
    free: np.ndarray,
) -> np.ndarray:
    """Return when each rank has sent and received its messages of one step; those on one port share its bandwidth."""
    busy = [np.bincount(port, took, free.shape[1]) for port in (out, into)]
    begin = np.maximum.reduce([posted[source], posted[target], free[0, out], free[1, into]])
    end = begin + np.maximum(busy[0][out], busy[1][into])
    arrived = np.zeros(len(posted))
    for latest, at in ((arrived, source), (arrived, target), (free[0], out), (free[1], into)):
        np.maximum.at(latest, at, end)
    return arrived


def node_numbers(nodes: Sequence[int] | None, world: int) -> np.ndarray:
    """Return each rank's node, int64 [W], numbered from 0; None: all share one node."""
    if nodes is None:
        return np.zeros(world, np.int64)
    return np.unique(np.asarray(nodes), return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True, eq=False)
class PassSimulation:
    """One pass, ready to be simulated; over direct routes by default."""

    whole: TrafficModel  # of shards
    shape: Shape
    direction: Direction
    inner: Assignment
    groups: Groups
    wire: Wire
    calls: int = 1  # in a row, which overlap

    @property
    def traffic(self) -> TrafficModel:
        """The traffic model of the parts that are sent separately."""
        return self.whole.for_groups(self.groups)

    def computing(self) -> float:
        """Return a lower bound of the seconds that the busiest rank computes, or that ranks need on shared cores."""
        rates = self.wire.rates
        areas = self.whole.areas(self.inner, self.groups, rates.overhead.block)
        each, at_once = _per_cell(self.shape, self.direction, self.groups, rates), rates.overhead.at_once
        shared = areas.sum() * self.groups.query / at_once if 0 < at_once < len(self.wire.nodes) else 0.0
        return max(float(areas.max(initial=0.0)), float(shared)) * each + rates.overhead.call

    def moving(self, wires: Sequence[Wire]) -> tuple[tuple[int, int], list[float]]:
        """Return :func:`moved_bytes`, and a lower bound of the busiest port's seconds for each of these wires."""
        whole = replace(self.groups, chunks=0)  # the number of chunks doesn't change the bytes
        messages = self.whole.messages(self.shape, self.direction, self.inner, whole)
        seconds = [wire.least(messages) + wire.rates.overhead.call for wire in wires]
        return moved_bytes(messages, self.wire), seconds

    def run(self, messages: Messages | None = None) -> Timed:
        """Simulate the pass; ``messages``: those of another route."""
        return self.run_on([self.wire], messages)[0]

    def steps(self) -> Steps:
        """Return when pairs are computed."""
        return self.traffic.cells(self.direction, self.groups, self.inner)

    def work(self, steps: Steps) -> Computing:
        """Return what each rank computes."""
        return computing(self.traffic, self.shape, self.direction, steps, self.groups, self.wire.rates)

    def messages(self, steps: Steps) -> Messages:
        """Return all messages."""
        return self.traffic.messages(self.shape, self.direction, self.inner, self.groups, steps)

    def run_on(self, wires: Sequence[Wire], messages: Messages | None = None) -> list[Timed]:
        """Simulate the pass on each of several wires that differ only in their links."""
        steps, most = self.steps(), self.groups.in_flight
        messages, work = self.messages(steps) if messages is None else messages, self.work(steps)
        return [timed(messages, work, wire, calls=self.calls, in_flight=most) for wire in wires]


def simulations(
    traffic: TrafficModel, shape: Shape, circulate: str, groups: Groups, wire: Wire, *, calls: int = 1
) -> list[PassSimulation]:
    """Return the simulations of a forward and a backward; ``circulate`` is a name of ``CIRCULATIONS``."""
    inner = CIRCULATIONS[circulate](traffic.world // groups.query)
    return [PassSimulation(traffic, shape, direction, inner[direction], groups, wire, calls) for direction in Direction]
