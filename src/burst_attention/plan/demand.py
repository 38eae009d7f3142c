"""Which rank computes which cells at which step, which rows it therefore needs, and the edges that send them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import product

import numpy as np

from .assignment import Cube, HeadsFirst
from .chunks import Chunks, in_chunks, turn_of
from .groups import Groups, Ranks
from .layout import Layout
from .route import Edge, Key, Route, Use
from .rows import Direction, Payload, Rows, Side, Union
from .slices import Slice
from .tile import wanted_tiles

ROWS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class PassSpec:
    """One pass of a call: layout, visible pairs, assignment to ranks, and route."""

    layout: Layout
    regions: np.ndarray
    cube: Cube
    groups: Groups
    route: Route
    direction: Direction
    keys: Layout | None = None  # of the keys, if they differ from the queries
    tables: dict[bytes, np.ndarray] = field(default_factory=dict)  # tiles by wanted pairs, shared by all passes

    @cached_property
    def layouts(self) -> Mapping[Side, Layout]:
        """The layout of each side."""
        return {Side.QUERY: self.layout, Side.KEY: self.keys or self.layout}

    @cached_property
    def chunks(self) -> Mapping[Side, Layout | Chunks]:
        """The parts of each side that are sent separately: the shards, or their chunks."""
        return {side: in_chunks(layout, self.groups.chunk_count) for side, layout in self.layouts.items()}

    def owner(self, chunk: Ranks) -> Ranks:
        """Return the owner of a chunk's shard."""
        return chunk // self.groups.chunk_count

    def turn(self, chunk: Ranks) -> Ranks:
        """Return a chunk's place in the order of the exchange."""
        return turn_of(chunk, self.groups.chunk_count, self.direction)

    def rows_of(self, side: Side, owner: int, place: int) -> Rows:
        """Return the local rows of the chunk at this place in its shard."""
        chunks = self.chunks[side]
        return chunks.rows(owner, place) if isinstance(chunks, Chunks) else Rows.all(chunks.lengths[owner])

    @property
    def alike(self) -> int:
        """How many neighbouring owners are assigned alike, so that the first represents them: a sequence group's."""
        return self.groups.query if isinstance(self.cube, HeadsFirst) else 1

    @property
    def fetched_before(self) -> bool:
        """Whether this is a backward whose inputs the forward cached."""
        return self.groups.keep and self.direction is Direction.BACKWARD

    def cells(self, rank: int | None = None) -> Cells:
        """Return all cells that see anything, one for each tile.

        ``rank``: return only the cells that this rank must know: those that it owns, computes or caches, and those that
        it may forward. It forwards within its node; along a path it may forward all.
        """
        known_by = None if self.route.ring else rank
        table = self._table(self._wanted(known_by))
        i, j = (self.owner(chunk) for chunk in (table[:, 0], table[:, 1]))
        indices = [np.flatnonzero(self._concerns(known_by, i, j, group)) for group in range(self.groups.query)]
        group = np.repeat(np.arange(len(indices)), [len(these) for these in indices])
        columns = table.T.take(np.concatenate(indices), 1)
        i, j, tiles = columns[0], columns[1], columns[2:].T
        return Cells(i, j, group, *self.arrivals(i, j, group), tiles)

    def arrivals(self, i: np.ndarray, j: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rank that computes each cell, and the steps at which its query and its key chunk arrive there.

        ``i, j, group``: chunks of queries and keys, and head groups; any cells, as int64 arrays that broadcast.
        """
        groups, owners = self.groups, (self.owner(i), self.owner(j))
        rank = self.cube(*owners, group)
        query, key = (self.distance(x, rank, self.turn(chunk)) for x, chunk in zip(owners, (i, j), strict=True))
        if self.fetched_before:  # the query side's gradients start at their owner, the inputs at the cache
            before = [self.distance(groups.cache_owner(group, groups.context(owner)), rank) for owner in owners]
            query, key = np.maximum(query, before[0]), before[1]
        return rank, query, key

    def distance(self, source: np.ndarray, rank: np.ndarray, turn: np.ndarray | int = 0) -> np.ndarray:
        """Return the step at which data from ``source`` reaches ``rank``; ``turn``: of its chunk."""
        return self.route.distance(self.groups, source, rank, self.layout.world, turn=turn)

    def _wanted(self, rank: int | None) -> np.ndarray:
        """Return the pairs of owners of which ``rank`` must know any cell, bool [W, W], in little memory."""
        size, first = self.alike, np.arange(0, self.layout.world, self.alike)
        wanted = np.zeros((len(first), len(first)), bool)
        for begin in range(0, len(first), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            for n in range(self.groups.query):
                wanted[rows] |= self._concerns(rank, first[rows, None], first, n)
        return wanted.repeat(size, 0).repeat(size, 1)

    def _table(self, wanted: np.ndarray) -> np.ndarray:
        """Return the sorted tiles of these pairs, cached because forward and backward mostly share them."""
        key = bytes([self.groups.chunk_count]) + blake2b(np.packbits(wanted).data, digest_size=16).digest()
        if key not in self.tables:
            self.tables[key] = wanted_tiles(self.chunks[Side.QUERY], self.chunks[Side.KEY], self.regions, wanted)
        return self.tables[key]

    def _concerns(self, rank: int | None, i: np.ndarray, j: np.ndarray, group: int) -> np.ndarray:
        """Return whether ``rank`` must know the cells (i, j, group) of shards i and j. None: all cells."""
        if rank is None:
            return np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
        groups = self.groups
        user = self.cube(i, j, group)
        concerns = (i == rank) | (j == rank) | np.isin(user, self.route.mates(rank))
        if groups.query > 1:  # cells that it caches, or whose partial results it forwards
            own = groups.context(rank)
            concerns |= (user % groups.query == rank % groups.query) & (
                (groups.context(i) == own) | (groups.context(j) == own)
            )
        return concerns

    def edges(self, cells: Cells, rank: int | None = None) -> list[Edge]:
        """Return the edges that these cells need, or only those of ``rank``; one from a rank to itself is a copy."""
        world, groups, edges = self.layout.world, self.groups, list[Edge]()
        uses = self._uses(cells, rank if self.route.direct else None)
        for key, users in self._fetched(uses, rank):
            edges += self.route.outward(key, users, groups, world, rank)
            if groups.joins and key.owner in users:
                edges.append(Edge(0, key.owner, key.owner, key, users[key.owner].rows))
        for (side, chunk, part), users in uses.items():
            if side in self.direction.returns:
                key, owner = self.key(side, chunk, part), self.owner(chunk)
                ranks = self._ranks(side, owner, part) if groups.query > 1 else np.empty(0, np.int64)
                if groups.query == 1 or len(ranks) == 1:
                    finished = groups.query > 1
                    edges += self.route.homeward(key, users, groups, world, finished=finished, rank=rank)
                else:
                    finished = len(np.unique(ranks % groups.query)) == 1
                    edges += self.route.through_cache_owners(key, users, groups, finished=finished)
                if groups.joins and owner in users:
                    rows, last = users[owner].rows, users[owner].last
                    alone = groups.query > 1 and len(users) == 1  # nothing is added, so it is rounded at once
                    edges.append(Edge(last, owner, owner, key, rows, partial=True, exact=not alone, finished=alone))
        return [e for e in edges if rank is None or rank in (e.source, e.target)]

    def _fetched(self, uses: Uses, rank: int | None) -> Iterator[tuple[Key, dict[int, Use]]]:
        """Yield the tensors that are sent out, with the ranks that use them."""
        groups = self.groups
        if not groups.keep:
            yield from ((self.key(*key), users) for key, users in uses.items())
        elif not self.fetched_before:
            yield from ((self.key(*key), users) for key, users in self._with_own_context(uses, rank).items())
        else:
            yield from ((self.key(*key, groups.of_backward), u) for key, u in uses.items() if key[0] is Side.QUERY)
            yield from self._from_cache_owners(uses)

    def key(self, side: Side, chunk: int, part: int, payload: Payload = Payload.ALL) -> Key:
        """Return the key of a chunk's tensors."""
        return Key(side, self.owner(chunk), part, payload, self.turn(chunk))

    def _with_own_context(self, uses: Uses, rank: int | None) -> Uses:
        """Add all rows of the sequence groups (of those on ``rank``'s node), because their ranks cache them."""
        groups, wider = self.groups, {key: dict(users) for key, users in uses.items()}
        ranks = range(self.layout.world) if rank is None else self.route.mates(rank)
        contexts = sorted({groups.context(other) for other in ranks})
        for context in contexts:
            for owner, place, side in product(groups.members(context), range(groups.chunk_count), Side):
                whole, chunk = Use(self.rows_of(side, owner, place), 0), owner * groups.chunk_count + place
                for group, user in enumerate(groups.members(context) if whole.rows.count else ()):
                    wider.setdefault((side, chunk, groups.part(side, group)), {})[user] = whole
        return wider

    def _from_cache_owners(self, uses: Uses) -> Iterator[tuple[Key, dict[int, Use]]]:
        """Yield the cached tensors and the ranks of the same head group that need them; rows count in the slice."""
        groups = self.groups
        rows: dict[Key, dict[int, list[Rows]]] = defaultdict(lambda: defaultdict(list))
        slices: dict[tuple[Side, int], Slice] = {}
        for (side, chunk, part), users in uses.items():
            owner = self.owner(chunk)
            context = groups.context(owner)
            for user, use in users.items():
                cache_owner = groups.cache_owner(user % groups.query, context)
                if cache_owner != user:
                    if (side, context) not in slices:
                        members, layout = groups.members(context), self.layouts[side]
                        slices[side, context] = Slice(layout, members, chunks=groups.chunk_count)
                    placed = slices[side, context].place(owner, use.rows)
                    rows[Key(side, cache_owner, part, Payload.INPUTS)][user].append(placed)
        for key, wanted in rows.items():
            yield key, {user: Use(Rows.union(many), 0) for user, many in wanted.items()}

    def _ranks(self, side: Side, owner: int, part: int) -> np.ndarray:
        """Return the ranks that would compute cells of this key under a full mask."""
        key = side, owner // self.alike, part
        if key not in self._ranks_of:
            others = np.arange(0, self.layout.world, self.alike)
            owners = np.full_like(others, owner // self.alike * self.alike)
            pairs = (owners, others) if side is Side.QUERY else (others, owners)
            groups = [g for g in range(self.groups.query) if self.groups.part(side, g) == part]
            self._ranks_of[key] = np.unique([self.cube(*pairs, g) for g in groups])
        return self._ranks_of[key]

    @cached_property
    def _ranks_of(self) -> dict[tuple[Side, int, int], np.ndarray]:
        return {}

    def _uses(self, cells: Cells, rank: int | None) -> Uses:
        """Return who needs which rows of which chunk until which step; of ``rank``, what it sends or gets directly."""
        uses: Uses = {}
        groups, world = self.groups, self.layout.world
        for side, column in ((Side.QUERY, 0), (Side.KEY, 2)):
            parts = groups.count(side)
            chunk, user = cells.chunks(side), cells.rank
            code = (chunk * parts + groups.part(side, cells.group)) * world + user
            begins, ends, steps = cells.tiles[:, column], cells.tiles[:, column + 1], cells.step
            if rank is not None:
                owner = self.owner(chunk)
                cache_owner = groups.cache_owner(user % groups.query, groups.context(owner))
                ours = (owner == rank) | (user == rank) | (cache_owner == rank)
                code, begins, ends, steps = (x[ours] for x in (code, begins, ends, steps))
            rows = Union.of(code, begins, ends)
            last = np.zeros(len(rows.keys), np.int64)
            np.maximum.at(last, np.searchsorted(rows.keys, code), steps)
            for (key, needed), step in zip(rows.sets(), last.tolist(), strict=True):
                rest, by = divmod(key, world)
                uses.setdefault((side, *divmod(rest, parts)), {})[by] = Use(needed, step)
        return uses


Uses = dict[tuple[Side, int, int], dict[int, Use]]  # (side, chunk, part of the heads) -> rank -> use


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells as int64 arrays [N]: one entry for each tile."""

    i: np.ndarray  # the query's chunk
    j: np.ndarray  # the key's chunk
    group: np.ndarray  # the head group
    rank: np.ndarray  # that computes the cell
    query: np.ndarray  # the step at which the query's chunk arrives there
    key: np.ndarray  # the step at which the key's chunk arrives there
    tiles: np.ndarray  # [N, 6], in the order of :class:`~burst_attention.plan.tile.Tile`

    @cached_property
    def step(self) -> np.ndarray:
        """The step at which each cell is computed."""
        return np.maximum(self.query, self.key)

    def chunks(self, side: Side) -> np.ndarray:
        """Return the chunk of each cell on ``side``."""
        return self.i if side is Side.QUERY else self.j

    def at(self, rank: int) -> np.ndarray:
        """Return ``rank``'s cells: step, query chunk, key chunk, head group, is the query new; int64 [M, 5]."""
        mine = self.first[self.rank[self.first] == rank]
        new = self.query[mine] == self.step[mine]
        table = np.stack([self.step[mine], self.i[mine], self.j[mine], self.group[mine], new], 1)
        table = table[np.lexsort(table.T[::-1])]
        return table[np.r_[True, (table[1:] != table[:-1]).any(1)][: len(table)]]

    @cached_property
    def first(self) -> np.ndarray:
        """Indices at which a new cell begins."""
        fields = (self.i, self.j, self.group)
        return np.flatnonzero(np.r_[bool(len(self.i)), np.logical_or.reduce([x[1:] != x[:-1] for x in fields])])

    @cached_property
    def by_pair(self) -> dict[tuple[int, int], np.ndarray]:
        """The tiles of each pair, for whole heads."""
        ends = [*self.first[1:].tolist(), len(self.i)]
        first = self.first
        named = zip(self.i[first].tolist(), self.j[first].tolist(), first.tolist(), ends, strict=True)
        return {(i, j): self.tiles[begin:end] for i, j, begin, end in named}
