"""One pass of a call: what all ranks send, receive and compute at each step, and a simulation of the steps.

The planner uses it before any program exists. :class:`~burst_attention.plan.demand.PassSpec` says which rank computes a
cell, and when. Messages equal its edges; a test compares them. Arrays replace objects, which would be too many for
hundreds of ranks. The number of tiles is an estimate once several shards share a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..plan.assignment import circulating
from ..plan.cost import Shape
from ..plan.demand import PassSpec
from ..plan.groups import Groups
from ..plan.route import ROUTES
from ..plan.rows import Direction, Payload, Side, Union
from .timing import Computing, Timed, Wire, timed
from .traffic import PARTIAL, RELAYED, SHARD, Columns, Messages, TrafficModel

MOST_CELLS = 1 << 15  # with more cells, sampled head groups represent the others
RUNS = 1.5  # mean runs of positions per segment of a shard while a sequence group's buffer is incomplete
Estimate = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # launches, visits, folded rows of queries, of keys


@dataclass(frozen=True, eq=False, kw_only=True)
class PassModel(PassSpec):
    """One pass over direct routes, and what it costs.

    Axes: N pairs of shards or of their chunks, C chunks of all shards, G head groups (or a sample of the U head
    groups), R sequence groups, T steps.
    """

    whole: TrafficModel  # of shards
    shape: Shape
    wire: Wire
    calls: int = 1  # in a row, which overlap

    @cached_property
    def traffic(self) -> TrafficModel:
        """The traffic model of the parts that are sent separately."""
        return self.whole.for_groups(self.groups)

    @property
    def contexts(self) -> int:
        """Number of sequence groups."""
        return self.whole.world // self.groups.query

    # When cells are computed

    @cached_property
    def sampled(self) -> np.ndarray:
        """The head groups whose cells are computed, [G]: all, or a sample that represents them."""
        count = min(self.groups.query, max(2, MOST_CELLS // max(1, len(self.traffic.pairs.i))))
        return np.unique(np.linspace(0, self.groups.query - 1, count).round().astype(np.int64))

    @property
    def example(self) -> np.ndarray:
        """The index in :attr:`sampled` of the head group that represents each head group, [U]."""
        return np.abs(self.sampled - np.arange(self.groups.query)[:, None]).argmin(1)

    @cached_property
    def _cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ranks that compute the cells of all pairs, and the steps at which their sides arrive, [G, N] each."""
        return self.arrivals(self.traffic.pairs.i, self.traffic.pairs.j, self.sampled[:, None])

    @cached_property
    def step(self) -> np.ndarray:
        """The step at which each cell is computed, [G, N]."""
        return np.maximum(*self._cells[1:])

    @cached_property
    def user(self) -> np.ndarray:
        """The sequence group that computes each pair, [N]."""
        return self.groups.context(self._cells[0][0])

    @cached_property
    def last_step(self) -> int:
        """The last step at which any cell is computed."""
        return int(self.step.max(initial=0))

    # Messages

    def messages(self, *, bytes_only: bool = False) -> Messages:
        """Return all messages. ``bytes_only``: the steps of results mean nothing."""
        parts: list[Columns] = [(np.zeros(0, np.int64),) * 5]
        for side in Side:
            rows = self.rows(side)
            parts += self._outward(side, rows)
            if side in self.direction.returns:
                parts += self._homeward(side, rows, np.zeros((1, 1, 1), np.int64) if bytes_only else self._last(side))
        return Messages.of(parts)

    def rows(self, side: Side) -> np.ndarray:
        """Count the rows of each chunk that the ranks of each sequence group need, int64 [C, R]."""
        own, other, union = self.traffic.by_context(self.groups.query, side)
        user = self._user(side, self.groups.context(self.owner(own)), other)
        return self._counted(own, user, union, apart=bool((user == other).all()))

    def _counted(self, own: np.ndarray, user: np.ndarray, union: Union, *, apart: bool = False) -> np.ndarray:
        """Count rows by chunk and user, [C, R]; ``apart``: no chunk and user occur twice."""
        rows = np.zeros((self.traffic.parts, self.contexts), np.int64)
        if not apart:
            union = union.under(own * self.contexts + user)
            own, user = np.divmod(union.keys, self.contexts)
        rows[own, user] = union.counts
        return rows

    def _user(self, side: Side, own: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the sequence group that computes the pairs of two: ``own`` on ``side``, and ``other``."""
        own, other = self.groups.query * own, self.groups.query * other  # their first ranks
        rank = self.cube(own, other, 0) if side is Side.QUERY else self.cube(other, own, 0)
        return self.groups.context(rank)

    @cached_property
    def _owner(self) -> np.ndarray:
        return self.owner(np.arange(self.traffic.parts)[:, None])

    def _rank(self, context: np.ndarray) -> np.ndarray:
        """Return the ranks of sequence groups [C, R], by head group: [U, C, R]."""
        return self.groups.cache_owner(np.arange(self.groups.query)[:, None, None], context)

    def _bytes(self, side: Side, *, wide: int | None = None, payload: Payload = Payload.ALL) -> int:
        """Return the bytes of a row, for one part of the heads."""
        return self.shape.side_bytes(side, self.direction, wide=wide, payload=payload) // self.groups.count(side)

    def _outward(self, side: Side, rows: np.ndarray) -> list[Columns]:
        """Return the columns of :class:`Messages` for shards."""
        groups, traffic, contexts = self.groups, self.traffic, np.arange(self.contexts)
        owner, user, home = self._owner, self._rank(contexts), self.groups.context(self._owner)
        distance = self.distance(owner, user, self.turn(np.arange(traffic.parts)[:, None]))
        if not self.fetched_before:
            if groups.keep:
                rows = np.where(contexts == home, traffic.lengths[side][:, None], rows)
            return [(distance, owner, user, rows * self._bytes(side), SHARD)]
        slices = rows.reshape(self.contexts, -1, self.contexts).sum(1)
        cache_owner = self._rank(contexts[:, None])
        far = self.distance(cache_owner, user)
        kept = far, cache_owner, user, slices * self._bytes(side, payload=Payload.INPUTS), SHARD
        if side is Side.KEY:
            return [kept]
        return [kept, (distance, owner, user, rows * self._bytes(side, payload=groups.of_backward), SHARD)]

    def _homeward(self, side: Side, rows: np.ndarray, last: np.ndarray) -> list[Columns]:
        """Return the columns of :class:`Messages` for results; ``last``: the last step of each chunk, [U, C, R]."""
        groups, contexts, owner = self.groups, np.arange(self.contexts), self._owner
        home, user = groups.context(owner), self._rank(contexts)
        io, partial = (self._bytes(side, wide=wide) for wide in (self.shape.io, self.shape.partial))
        leaves = last + groups.in_flight
        if groups.query == 1:
            return [(leaves, user, owner, rows * partial, PARTIAL)]
        own, _, union = self.traffic.by_context(groups.query, side)
        all_rows = self._counted(own, 0 * own, union)[:, :1]  # that any rank needs
        grid = self._user(side, contexts[:, None], contexts)
        one_user = (grid == grid[:, :1]).all(1)
        shared = groups.query > groups.count(side)
        whole, here, cache_owner = one_user[home] & (not shared), contexts == home, self._rank(home)
        ready = np.where(last < 0, 0, leaves - here).max(2, keepdims=True)
        return [
            (leaves, user, owner, rows * whole * io, PARTIAL),
            (leaves, user, cache_owner, rows * (~whole & ~here) * partial, PARTIAL),
            (ready + 1, cache_owner, owner, all_rows * ~whole * (partial if shared else io), PARTIAL | RELAYED),
        ]

    def _last(self, side: Side) -> np.ndarray:
        """Return the last step at which the ranks of a head group use each chunk, int64 [U, C, R]."""
        own = self.traffic.pairs.i if side is Side.QUERY else self.traffic.pairs.j
        last = np.full((len(self.step), self.traffic.parts * self.contexts), -1, np.int64)
        code = own * self.contexts + self.user
        order = np.argsort(code, kind="stable")
        keys, first = np.unique(code[order], return_index=True)
        if len(keys):
            last[:, keys] = np.maximum.reduceat(self.step[:, order], first, axis=1)
        return last.reshape(-1, self.traffic.parts, self.contexts)[self.example]

    # Work

    @cached_property
    def _visit(self) -> np.ndarray:
        """Number of each cell's visit: its head group, sequence group and step, [G, N]."""
        group = np.arange(len(self.step))[:, None]
        return (group * self.contexts + self.user) * (self.last_step + 1) + self.step

    def _by_step(self, weights: np.ndarray) -> np.ndarray:
        """Sum weights [G, N] by head group, sequence group and step, float64 [G, R, T]."""
        sizes = len(self.step), self.contexts, self.last_step + 1
        values = np.broadcast_to(weights, self.step.shape).ravel()
        return np.bincount(self._visit.ravel(), values, int(np.prod(sizes))).reshape(sizes)

    def work(self) -> Computing:
        """Predict what each rank computes at each step."""
        extra, forward = self.wire.rates.overhead, self.direction is Direction.FORWARD
        launches, visits, queries, keys = self._launches()
        seconds = self._by_step(self._cell_seconds) + self._fold_seconds(queries, keys)
        seconds += launches * (extra.launch_forward if forward else extra.launch_backward)
        seconds += visits * extra.visit
        # from [U, R, T] to [W, T], where rank u + U c is row (u, c)
        parts = (x[self.example].swapaxes(0, 1).reshape(self.whole.world, -1) for x in (seconds, launches, visits))
        return Computing(*parts)

    def _fold_seconds(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return the seconds in which folded rows of queries and of keys are merged or added, [G, R, T]."""
        shape, groups, forward = self.shape, self.groups, self.direction is Direction.FORWARD
        folded = queries * (shape.batch * shape.q_heads / groups.query)
        folded = folded * (shape.v_head_dim if forward else shape.head_dim)
        if not forward:
            folded = folded + keys * (shape.batch * shape.kv_heads / groups.key) * shape.key_width
        return folded * shape.accumulate / self.wire.rates.overhead.fold

    @property
    def _cell_seconds(self) -> np.ndarray:
        """Seconds in which a kernel computes each pair of shards for one head group, [N]."""
        return self.traffic.computed(self.groups, self.wire.rates.overhead.block) * self._per_cell

    @property
    def _per_cell(self) -> float:
        """Seconds of one (query, key) pair of one head group."""
        shape, speed = self.shape, self.wire.rates.speed(self.shape.io)
        forward = self.direction is Direction.FORWARD
        products = (1, 1) if forward else (3, 2)  # scores, P V; scores, dS K, dS' Q; dO V', P' dO
        heads = shape.batch * shape.q_heads / self.groups.query
        flops = 2 * heads * (products[0] * shape.head_dim + products[1] * shape.v_head_dim)
        return flops / (speed.forward if forward else speed.backward)

    def _launches(self) -> Estimate:
        """Estimate launches, visits, and folded rows by side, [G, R, T]. New queries meet all keys, old ones new."""
        pairs, cut, by_step = self.traffic.pairs, self.traffic.segments, self._by_step
        rows, touched = pairs.rows, pairs.touched
        cells = by_step(np.ones(1))
        if self.groups.gather:  # all foreign keys share a buffer: a later segment of queries meets more runs
            here = np.minimum(cells, 1)
            folded = by_step(rows[Side.QUERY]) / np.maximum(cells, 1) * (cut + 1) / 2
            launches = here * cut * (cut + 1) / 2 + by_step(pairs.tiles - 1)
            return launches, here, folded, by_step(rows[Side.KEY])
        if self.groups.query == 1:
            return by_step(pairs.tiles), cells, by_step(rows[Side.QUERY]), by_step(rows[Side.KEY])
        new, key_is_new = (arrival == self.step for arrival in self._cells[1:])
        old = key_is_new & ~new
        counts = [by_step(these) for these in (new, old)]
        some = sum(np.minimum(count, 1) for count in counts)
        if self.groups.chunks:
            return self._of_chunks(np.minimum(some, 1))
        runs = 1.0 if self.fetched_before else RUNS * (1 + cut) / 2
        launches = runs * cut * some / (1 if self.fetched_before else 1.5)
        # A shard's rows are folded once per run that they meet, the other side's rows once per segment of the shard.
        queries, keys = (
            by_step(rows[side] * these) / np.maximum(count, 1) * runs + by_step(touched[side] * others)
            for side, these, count, others in zip(Side, (new, old), counts, (old, new), strict=True)
        )
        return launches + by_step(pairs.tiles - 1 + (pairs.border > 0)), np.minimum(some, 1), queries, keys

    def _of_chunks(self, visits: np.ndarray) -> Estimate:
        """Estimate :meth:`_launches` if a sequence group's chunks join into stretches.

        A stretch that meets itself is one tile. Other cells between two groups are one tile per stretch of queries, or
        of keys if those are fewer.
        """
        pairs, chunks, by_step = self.traffic.pairs, self.traffic.chunks, self._by_step
        query, key = self._stretch(pairs.i), self._stretch(pairs.j)
        runs, many = {side: self._runs(side) for side in Side}, self.contexts * chunks
        stretch = self._stretch(np.arange(self.traffic.parts))
        rows = {side: np.bincount(stretch, self.traffic.lengths[side]) for side in Side}
        first = _first((self._visit * many + query) * many + key)  # count each pair of stretches once
        inside, beyond = first * (query == key), first * (query != key)
        slices = (self._visit * many + query // chunks) * many + key // chunks
        which = np.unique(slices, return_inverse=True)[1].reshape(slices.shape)
        by_query, by_key = (beyond * _first(np.where(beyond, which * many + x, -1)) for x in (query, key))
        counts = [np.bincount(which.ravel(), x.ravel()) for x in (by_query, by_key)]
        queries_alone = (counts[0] <= counts[1])[which]
        tiles = np.where(queries_alone, by_query, by_key)
        launches = by_step((inside + tiles) * np.maximum(runs[Side.QUERY][query], runs[Side.KEY][key]))
        met = np.where(queries_alone, by_query, beyond), np.where(queries_alone, beyond, by_key)
        queries, keys = (
            by_step((inside + x) * rows[side][at]) for side, x, at in zip(Side, met, (query, key), strict=True)
        )
        return launches + by_step(pairs.tiles - 1), visits, queries, keys

    def _stretch(self, chunk: np.ndarray) -> np.ndarray:
        """Return equal numbers for chunks that arrive together: same sequence group, same place in the shard."""
        chunks = self.traffic.chunks
        return self.groups.context(self.owner(chunk)) * chunks + chunk % chunks

    def _runs(self, side: Side) -> np.ndarray:
        """Count the runs of consecutive positions in chunks that a sequence group sends together."""
        traffic, count = self.traffic, self.contexts * self.traffic.chunks
        chunk, _, first, length, stride = traffic.cuts[side].table(range(traffic.parts)).T
        order = np.lexsort([first, self._stretch(chunk)])
        beside, first, length, stride = (x[order] for x in (self._stretch(chunk), first, length, stride))
        follows = (beside[1:] == beside[:-1]) & (first[1:] == (first + length * stride)[:-1]) & (stride[1:] == 1)
        return np.bincount(beside[np.r_[True, ~follows][: len(beside)]], minlength=count)

    # Predictions

    def areas(self, block: float) -> np.ndarray:
        """Return the (query, key) pairs of one head group that each sequence group computes, float64 [R]."""
        user = self.groups.context(self.cube(self.whole.pairs.i, self.whole.pairs.j, 0))
        return np.bincount(user, self.whole.computed(self.groups, block), self.contexts)

    def computing(self) -> float:
        """Return a lower bound of the seconds that the busiest rank computes, or that ranks need on shared cores."""
        overhead = self.wire.rates.overhead
        areas = self.areas(overhead.block)
        shared = areas.sum() * self.groups.query / overhead.at_once if self.wire.shares_cores else 0.0
        return max(float(areas.max(initial=0.0)), float(shared)) * self._per_cell + overhead.call

    def moving(self, wires: Sequence[Wire]) -> tuple[tuple[int, int], list[float]]:
        """Return :meth:`Wire.moved`, and a lower bound of the busiest port's seconds for each of these wires."""
        whole = replace(self, groups=replace(self.groups, chunks=0))  # the number of chunks doesn't change the bytes
        messages = whole.messages(bytes_only=True)
        seconds = [wire.least(messages) + wire.rates.overhead.call for wire in wires]
        return self.wire.moved(messages), seconds

    def run(self, messages: Messages | None = None) -> Timed:
        """Simulate the pass; ``messages``: those of another route."""
        return self.run_on([self.wire], messages)[0]

    def run_on(self, wires: Sequence[Wire], messages: Messages | None = None) -> list[Timed]:
        """Simulate the pass on each of several wires that differ only in their links."""
        messages, work = self.messages() if messages is None else messages, self.work()
        return [timed(messages, work, wire, calls=self.calls, in_flight=self.groups.in_flight) for wire in wires]


def _first(codes: np.ndarray) -> np.ndarray:
    """Return 1 where a value occurs for the first time, else 0."""
    flags = np.zeros(codes.shape)
    flags.flat[np.unique(codes, return_index=True)[1]] = 1
    return flags


def passes(
    traffic: TrafficModel, shape: Shape, circulate: str, groups: Groups, wire: Wire, *, calls: int = 1
) -> list[PassModel]:
    """Return a forward and a backward; ``circulate`` is a name of ``CIRCULATIONS``."""

    def pass_of(direction: Direction) -> PassModel:
        cube, route = circulating(circulate, direction, groups, traffic.world), ROUTES["direct"]
        spread = traffic.layout, traffic.regions, cube, groups, route, direction, traffic.keys
        return PassModel(*spread, whole=traffic, shape=shape, wire=wire, calls=calls)

    return [pass_of(direction) for direction in Direction]
