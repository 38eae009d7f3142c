"""The traffic model: what all ranks send, receive and compute at each step, as arrays.

The planner uses it before any program exists. Its messages equal :meth:`~burst_attention.plan.demand.PassSpec.edges`; a
test compares them. Arrays replace objects, which would be too many for hundreds of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..plan.assignment import Assignment
from ..plan.band import band_area
from ..plan.chunks import in_chunks, turn_of
from ..plan.cost import Shape
from ..plan.demand import PassSpec
from ..plan.groups import Groups
from ..plan.layout import Layout
from ..plan.rows import Direction, Payload, Side, Union
from ..plan.tile import region_tiles

SHARD, PARTIAL, RELAYED = 0, 1, 2
MOST_CELLS = 1 << 15  # with more cells, sampled head groups represent the others


Columns = tuple[np.ndarray | int, ...]


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages of one pass, int64 [N] each."""

    step: np.ndarray
    source: np.ndarray
    target: np.ndarray
    size: np.ndarray  # bytes
    kind: np.ndarray  # a shard (0) or a PARTIAL result, | RELAYED if an earlier exchange brought the data

    @classmethod
    def of(cls, parts: list[Columns]) -> Messages:
        """Make messages of broadcastable columns; drop empty ones and those that stay on a rank."""
        flat = [[x.ravel() for x in np.broadcast_arrays(*part)] for part in parts]
        step, source, target, size, kind = (np.concatenate(column) for column in zip(*flat, strict=True))
        sent = (size > 0) & (source != target)
        return cls(*(x[sent] for x in (step, source, target, size, kind)))


def edge_messages(work: PassSpec, shape: Shape) -> Messages:
    """Return the messages of any route from its edges; practical for few ranks."""
    edges, groups = work.edges(work.cells()), work.groups
    rows = [
        (
            e.step,
            e.source,
            e.target,
            e.rows.count * shape.row_bytes(e, work.direction) // groups.count(e.side),
            PARTIAL * e.partial | RELAYED * (not e.partial and e.source != e.owner),
        )
        for e in edges
    ]
    return Messages.of([tuple(np.array(rows, np.int64).reshape(-1, 5).T)])


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of shards with any visible pair of tokens, int64 [N] each."""

    i: np.ndarray  # owner of the queries
    j: np.ndarray  # owner of the keys
    area: np.ndarray  # visible (query, key) pairs
    border: np.ndarray  # rows of tiles that a band cuts at one end; counted twice if at both
    spare: np.ndarray  # masked (query, key) pairs of these tiles
    tiles: np.ndarray  # those of one document or prefix count as one, because joining merges nearly all of them
    rows: Mapping[Side, np.ndarray]  # that some tile touches
    touched: Mapping[Side, np.ndarray]  # the same, counted once per tile between segments


@dataclass(frozen=True, eq=False)
class Steps:
    """The step at which each of N pairs is computed, for each of G head groups."""

    user: np.ndarray  # [N], the sequence group that computes the pair
    step: np.ndarray  # [G, N]
    new_query: np.ndarray  # [G, N], whether the query's shard arrives at this step
    new_key: np.ndarray  # [G, N], whether the key's shard does


class TrafficModel:
    """One layout under one mask, in ``chunks`` per shard. ``keys``: the keys' layout, if it is not the queries'."""

    def __init__(self, layout: Layout, regions: np.ndarray, *, keys: Layout | None = None, chunks: int = 1) -> None:
        self.layout, self.regions, self.world, self.chunks = layout, regions, layout.world, chunks
        self.keys, self.layouts = keys, {Side.QUERY: layout, Side.KEY: keys or layout}
        self.cuts = {side: in_chunks(one, chunks) for side, one in self.layouts.items()}
        self.lengths = {side: np.array(cut.lengths) for side, cut in self.cuts.items()}
        self.parts = self.world * chunks  # shards, or their chunks
        self._table = region_tiles(self.cuts[Side.QUERY], self.cuts[Side.KEY], regions)
        self._rows: dict[tuple[int, Side], tuple[np.ndarray, np.ndarray, Union]] = {}
        self._finer: dict[int, TrafficModel] = {}

    def for_groups(self, groups: Groups) -> TrafficModel:
        """Return this model, or the model of the chunks if shards are sent in several chunks."""
        count = groups.chunk_count
        if count == self.chunks:
            return self
        if count not in self._finer:
            self._finer[count] = TrafficModel(self.layout, self.regions, keys=self.keys, chunks=count)
        return self._finer[count]

    def owner(self, chunk: np.ndarray) -> np.ndarray:
        """Return the owner of a chunk's shard."""
        return chunk // self.chunks

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs of shards, with their areas and numbers of rows."""
        i, j, region, q0, q1, k0, k1, lo, hi = self._table.T
        code, at = np.unique(i * self.parts + j, return_inverse=True)

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(at, values, minlength=len(code)).astype(np.int64)

        rows, columns = q1 - q0, k1 - k0
        area = band_area(rows, columns, lo, hi)
        apart = np.unique(np.stack([at, region]), axis=1)[0] if len(code) < len(at) else at
        return Pairs(
            *np.divmod(code, self.parts),
            total(area),
            total(rows * (1 * (lo > 1 - columns) + (hi < rows - 1))),
            total(rows * columns - area),
            np.bincount(apart, minlength=len(code)),
            {side: self._by_context(1, side)[2].counts[self._order(side)] for side in Side},
            {Side.QUERY: total(rows), Side.KEY: total(columns)},
        )

    @cached_property
    def segments(self) -> float:
        """Mean number of segments per shard of queries, over some ranks."""
        ranks = range(0, self.world, -(-self.world // 8))
        return max(1.0, sum(len(self.layout.segments(rank)) for rank in ranks) / len(ranks))

    def runs(self, groups: Groups, side: Side) -> np.ndarray:
        """Count the runs of consecutive positions in chunks that a sequence group sends together: [R * chunks]."""
        chunk, _, first, length, stride = self.cuts[side].table(range(self.parts)).T
        beside = self.beside(chunk, groups)
        order = np.lexsort([first, beside])
        beside, first, length, stride = (x[order] for x in (beside, first, length, stride))
        if not len(beside):  # no tokens
            return np.zeros(self.world // groups.query * self.chunks, np.int64)
        goes_on = (beside[1:] == beside[:-1]) & (first[1:] == (first + length * stride)[:-1]) & (stride[1:] == 1)
        return np.bincount(beside[np.r_[True, ~goes_on]], minlength=self.world // groups.query * self.chunks)

    def beside(self, chunk: np.ndarray, groups: Groups) -> np.ndarray:
        """Return equal numbers for chunks that arrive together: same sequence group, same place in the shard."""
        return groups.context(self.owner(chunk)) * self.chunks + chunk % self.chunks

    def _order(self, side: Side) -> np.ndarray:
        """Return the permutation of pairs from the order (own, other) to (query owner, key owner)."""
        own, other, _ = self._by_context(1, side)
        return np.argsort(own * self.parts + other if side is Side.QUERY else other * self.parts + own)

    def _by_context(self, size: int, side: Side) -> tuple[np.ndarray, np.ndarray, Union]:
        """Return a side's chunks, the other side's groups of ``size`` ranks (1: chunks), and the rows of each pair."""
        if (size, side) not in self._rows:
            contexts = self.parts if size == 1 else self.world // size
            if size == 1:
                own, first = (self._table[:, 0], 3) if side is Side.QUERY else (self._table[:, 1], 5)
                other = self._table[:, 1] if side is Side.QUERY else self._table[:, 0]
                union = Union.of(own * contexts + other, self._table[:, first], self._table[:, first + 1])
            else:
                own, other, finer = self._by_context(1, side)
                at = np.repeat(np.arange(len(own)), finer.intervals)
                slices = self.owner(other[at]) // size
                union = Union.of(own[at] * contexts + slices, finer.starts, finer.stops)
            self._rows[size, side] = *np.divmod(union.keys, contexts), union
        return self._rows[size, side]

    def rows(self, groups: Groups, inner: Assignment, side: Side) -> np.ndarray:
        """Count the rows of each chunk that the ranks of each sequence group need, int64 [W * chunks, R]."""
        contexts = self.world // groups.query
        own, other, union = self._by_context(groups.query, side)
        mine = groups.context(self.owner(own))
        user = inner(mine, other) if side is Side.QUERY else inner(other, mine)
        rows = np.zeros((self.parts, contexts), np.int64)
        if (user == other).all():
            rows[own, user] = union.counts
        else:
            at = np.repeat(np.arange(len(own)), union.intervals)
            joined = Union.of((own * contexts + user)[at], union.starts, union.stops)
            rows.flat[joined.keys] = joined.counts
        return rows

    def sampled(self, groups: Groups) -> np.ndarray:
        """Return the head groups whose cells are computed: all, or a sample that represents them."""
        count = min(groups.query, max(2, MOST_CELLS // max(1, len(self.pairs.i))))
        return np.unique(np.linspace(0, groups.query - 1, count).round().astype(np.int64))

    def cells(self, direction: Direction, groups: Groups, inner: Assignment) -> Steps:
        """Return the steps at which pairs are computed, for each head group of :meth:`sampled`."""
        owners = [self.owner(chunk) for chunk in (self.pairs.i, self.pairs.j)]
        user, group = inner(*map(groups.context, owners)), self.sampled(groups)[:, None]
        rank = groups.cache_owner(group, user)
        query, key = (
            groups.distance(owner, rank, self.world, turn=turn_of(chunk, self.chunks, direction))
            for owner, chunk in zip(owners, (self.pairs.i, self.pairs.j), strict=True)
        )
        if groups.keep and direction is Direction.BACKWARD:  # inputs start where they are cached
            kept = [groups.cache_owner(group, groups.context(owner)) for owner in owners]
            before = [groups.distance(source, rank, self.world) for source in kept]
            query, key = np.maximum(query, before[0]), before[1]
        step = np.maximum(query, key)
        return Steps(user, step, query == step, key == step)

    def messages(
        self, shape: Shape, direction: Direction, inner: Assignment, groups: Groups, steps: Steps | None = None
    ) -> Messages:
        """Return all messages of one pass over direct routes. Without ``steps``, the steps of results mean nothing."""
        parts: list[Columns] = [(np.zeros(0, np.int64),) * 5]
        for side in Side:
            one = _Side(self, shape, inner, groups, direction, side)
            parts += one.outward()
            if side in direction.returns:
                parts += one.homeward(self._last(side, steps, groups))
        return Messages.of(parts)

    def computed(self, groups: Groups, block: float) -> np.ndarray:
        """Estimate the (query, key) pairs that a kernel computes for each pair of shards, float64 [N].

        A kernel works in blocks of ``block``. Beyond a border it wastes half a block per row, at most all masked pairs
        of the tiles. The tiles of neighbouring shards join into larger ones.
        """
        finer = groups.chunk_count / self.chunks  # this model has whole shards, but the tiles will be of chunks
        beyond = np.minimum(self.pairs.border * block / 2, self.pairs.spare * groups.query / finer)
        return self.pairs.area + beyond

    def areas(self, inner: Assignment, groups: Groups, block: float) -> np.ndarray:
        """Return the (query, key) pairs of one head group that each sequence group computes, float64 [R]."""
        user = inner(*(groups.context(self.owner(chunk)) for chunk in (self.pairs.i, self.pairs.j)))
        return np.bincount(user, self.computed(groups, block), self.world // groups.query)

    def _last(self, side: Side, steps: Steps | None, groups: Groups) -> np.ndarray:
        """Return the last step at which the ranks of a head group use each chunk, int64 [U, W * chunks, R]."""
        contexts = self.world // groups.query
        if steps is None:
            return np.zeros((1, 1, contexts), np.int64)
        own = self.pairs.i if side is Side.QUERY else self.pairs.j
        last = np.full((len(steps.step), self.parts * contexts), -1, np.int64)
        code = own * contexts + steps.user
        order = np.argsort(code, kind="stable")
        keys, first = np.unique(code[order], return_index=True)
        if len(keys):
            last[:, keys] = np.maximum.reduceat(steps.step[:, order], first, axis=1)
        return last.reshape(-1, self.parts, contexts)[self.example(groups)]

    def example(self, groups: Groups) -> np.ndarray:
        """Return the index in :meth:`sampled` of the head group that represents each head group."""
        known = self.sampled(groups)
        return np.abs(known - np.arange(groups.query)[:, None]).argmin(1)


class _Side:
    """One side of one pass, as arrays [U, W * chunks, R]. The first axis is 1 long where all head groups are equal."""

    def __init__(
        self, traffic: TrafficModel, shape: Shape, inner: Assignment, groups: Groups, direction: Direction, side: Side
    ) -> None:
        self.shape, self.groups, self.direction, self.side = shape, groups, direction, side
        self.lengths, self.world, self.chunks = traffic.lengths[side], traffic.world, traffic.chunks
        contexts = np.arange(self.world // groups.query)
        chunks = np.arange(traffic.parts)[:, None]
        self.owner, self.turn, self.context = traffic.owner(chunks), turn_of(chunks, self.chunks, direction), contexts
        self.home = groups.context(self.owner)
        self.user = groups.cache_owner(np.arange(groups.query)[:, None, None], contexts)
        self.cache_owner = groups.cache_owner(np.arange(groups.query)[:, None, None], self.home)
        self.rows = traffic.rows(groups, inner, side)
        self.all_rows = traffic.rows(groups, lambda i, j: 0 * i + 0 * j, side)[:, :1]  # that any rank needs
        grid = inner(contexts[:, None], contexts)
        self.whole = (grid == grid[:, :1]).all(1) if side is Side.QUERY else (grid == grid[:1]).all(0)

    def _bytes(self, *, wide: int | None = None, payload: Payload = Payload.ALL) -> int:
        """Return the bytes of a row, for one part of the heads."""
        size = self.shape.side_bytes(self.side, self.direction, wide=wide, payload=payload)
        return size // self.groups.count(self.side)

    def outward(self) -> list[Columns]:
        """Return the columns of :class:`Messages` for shards."""
        distance = self.groups.distance(self.owner, self.user, self.world, turn=self.turn)
        rows = self.rows
        if not (self.groups.keep and self.direction is Direction.BACKWARD):
            if self.groups.keep:
                rows = np.where(self.context == self.home, self.lengths[:, None], rows)
            return [(distance, self.owner, self.user, rows * self._bytes(), SHARD)]
        contexts = len(self.context)
        slices = rows.reshape(contexts, -1, contexts).sum(1)
        cache_owner = self.cache_owner[:, :: self.groups.query * self.chunks]
        far = self.groups.distance(cache_owner, self.user, self.world)
        kept = far, cache_owner, self.user, slices * self._bytes(payload=Payload.INPUTS), SHARD
        if self.side is Side.KEY:
            return [kept]
        return [kept, (distance, self.owner, self.user, rows * self._bytes(payload=self.groups.of_backward), SHARD)]

    def homeward(self, last: np.ndarray) -> list[Columns]:
        """Return the columns of :class:`Messages` for results; ``last``: their last step, [U, W * chunks, R]."""
        io, partial = (self._bytes(wide=wide) for wide in (self.shape.io, self.shape.partial))
        leaves = last + self.groups.in_flight
        if self.groups.query == 1:
            return [(leaves, self.user, self.owner, self.rows * partial, PARTIAL)]
        shared = self.groups.query > self.groups.count(self.side)
        whole = self.whole[self.home] & (not shared)
        here = self.context == self.home
        all_rows = self.all_rows * ~whole
        ready = np.where(last < 0, 0, leaves - here).max(2, keepdims=True)
        return [
            (leaves, self.user, self.owner, self.rows * whole * io, PARTIAL),
            (leaves, self.user, self.cache_owner, self.rows * (~whole & ~here) * partial, PARTIAL),
            (ready + 1, self.cache_owner, self.owner, all_rows * (partial if shared else io), PARTIAL | RELAYED),
        ]


def rows_leaving(tiles: np.ndarray, host: np.ndarray, *, by_nodes: bool) -> int:
    """Count the key rows that leave the busiest node if a shard goes to each rank, or node, that needs it."""
    place = host if by_nodes else np.arange(len(host))
    many = int(place.max()) + 1
    union = Union.of(tiles[:, 1] * many + place[tiles[:, 0]], tiles[:, 4], tiles[:, 5])
    owner, there = np.divmod(union.keys, many)
    away = host[owner] != (there if by_nodes else host[there])
    return int(np.bincount(host[owner], union.counts * away, minlength=1).max())
