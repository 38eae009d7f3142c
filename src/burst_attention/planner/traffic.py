"""What any pass over one layout and mask needs: its pairs of shards and their rows, as arrays. Messages of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..plan.band import band_area
from ..plan.chunks import in_chunks
from ..plan.cost import Shape
from ..plan.demand import PassSpec
from ..plan.groups import Groups
from ..plan.layout import Layout
from ..plan.rows import Side, Union
from ..plan.tile import region_tiles

SHARD, PARTIAL, RELAYED = 0, 1, 2


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
    rows = [
        (
            e.step,
            e.source,
            e.target,
            shape.edge_bytes(e, work.direction, work.groups),
            PARTIAL * e.partial | RELAYED * (not e.partial and e.source != e.key.owner),
        )
        for e in work.edges(work.cells())
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


class TrafficModel:
    """One layout under one mask, in ``chunks`` per shard. ``keys``: the keys' layout, if it is not the queries'."""

    def __init__(self, layout: Layout, regions: np.ndarray, *, keys: Layout | None = None, chunks: int = 1) -> None:
        self.layout, self.regions, self.world, self.chunks = layout, regions, layout.world, chunks
        self.keys = keys
        self.cuts = {Side.QUERY: in_chunks(layout, chunks), Side.KEY: in_chunks(keys or layout, chunks)}
        self.lengths = {side: np.array(cut.lengths) for side, cut in self.cuts.items()}
        self.parts = self.world * chunks  # shards, or their chunks
        self.table = region_tiles(self.cuts[Side.QUERY], self.cuts[Side.KEY], regions)
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

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs of shards, with their areas and numbers of rows."""
        i, j, region, q0, q1, k0, k1, lo, hi = self.table.T
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
            {side: self.by_context(1, side)[2].counts for side in Side},
            {Side.QUERY: total(rows), Side.KEY: total(columns)},
        )

    @cached_property
    def segments(self) -> float:
        """Mean number of segments per shard of queries, over some ranks."""
        ranks = range(0, self.world, -(-self.world // 8))
        return max(1.0, sum(len(self.layout.segments(rank)) for rank in ranks) / len(ranks))

    def by_context(self, size: int, side: Side) -> tuple[np.ndarray, np.ndarray, Union]:
        """Return a side's chunks, the other side's groups of ``size`` ranks (1: chunks), and the rows of each pair."""
        if (size, side) not in self._rows:
            if size == 1:
                code, first = self.table[:, 0] * self.parts + self.table[:, 1], 3 if side is Side.QUERY else 5
                union = Union.of(code, self.table[:, first], self.table[:, first + 1])
                i, j = np.divmod(union.keys, self.parts)
                own, other = (i, j) if side is Side.QUERY else (j, i)
            else:
                own, other, finer = self.by_context(1, side)
                contexts = self.world // size
                union = finer.under(own * contexts + other // (self.chunks * size))
                own, other = np.divmod(union.keys, contexts)
            self._rows[size, side] = own, other, union
        return self._rows[size, side]

    def computed(self, groups: Groups, block: float) -> np.ndarray:
        """Estimate the (query, key) pairs that a kernel computes for each pair of shards, float64 [N].

        A kernel works in blocks of ``block``. Beyond a border it wastes half a block per row, at most all masked pairs
        of the tiles. The tiles of neighbouring shards join into larger ones.
        """
        finer = groups.chunk_count / self.chunks  # this model has whole shards, but the tiles will be of chunks
        beyond = np.minimum(self.pairs.border * block / 2, self.pairs.spare * groups.query / finer)
        return self.pairs.area + beyond

    def rows_leaving(self, nodes: Sequence[int], *, by_nodes: bool) -> int:
        """Count the key rows that leave the busiest node if a shard goes to each rank, or node, that needs it."""
        host = np.asarray(nodes)
        place = host if by_nodes else np.arange(self.world)
        users, owners, many = self.table[:, 0], self.table[:, 1], int(place.max()) + 1
        union = Union.of(owners * many + place[users], self.table[:, 5], self.table[:, 6])
        owner, there = np.divmod(union.keys, many)
        away = host[owner] != (there if by_nodes else host[there])
        return int(np.bincount(host[owner], union.counts * away, minlength=1).max())
