"""Who computes which cells at which step, hence who needs which rows of what, and the edges that bring them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .assignment import Cube
from .band import band_area
from .groups import Groups
from .layout import Layout
from .route import Edge, Key, Route, Use
from .rows import Direction, Payload, Rows, Side, Union
from .slices import Slice
from .tile import wanted_tiles


@dataclass(frozen=True, eq=False)
class Work:
    """One pass of a call: whose tokens, what is seen, who computes it, and how it gets there."""

    layout: Layout
    regions: np.ndarray
    cube: Cube
    groups: Groups
    route: Route
    direction: Direction
    tables: dict[bytes, np.ndarray] = field(default_factory=dict)  # tiles by pairs wanted, kept for the other passes

    @property
    def fetched_before(self) -> bool:
        """Is this a backward whose inputs were kept by the forward?"""
        return self.groups.keep and self.direction is Direction.BACKWARD

    def cells(self, rank: int | None = None) -> Cells:
        """All cells that see anything, one for each tile; of ``rank`` those that it must know.

        It must know what it owns, computes or keeps; on a path, all that passes by.
        """
        world, groups = self.layout.world, self.groups
        known_by = rank if self.route.direct else None
        owner, several = np.arange(world), groups.query > 1
        wanted = np.zeros((world, world), bool)
        for n in range(groups.query):
            wanted |= self._concerns(known_by, owner[:, None], owner, n)
        table = self._table(wanted)
        i, j = table[:, 0], table[:, 1]
        known = [self._concerns(known_by, i, j, n) for n in range(groups.query)] if several else []
        group = np.repeat(np.arange(len(known)), [mine.sum() for mine in known]) if several else np.zeros_like(i)
        table = np.concatenate([table[mine] for mine in known]) if several else table
        i, j = table[:, 0], table[:, 1]
        ranks = np.concatenate([self.cube(i[group == g], j[group == g], g) for g in range(groups.query)])
        if self.fetched_before:  # the query side's gradients start at home, the inputs where they were kept
            sources = [i, *(groups.keeper(group, groups.context(owner)) for owner in (i, j))]
        else:
            sources = [i, j]
        step = np.maximum.reduce([groups.distance(source, ranks, world) for source in sources])
        return Cells(i, j, group, ranks, step, table[:, 2:])

    def _table(self, wanted: np.ndarray) -> np.ndarray:
        """The tiles of these pairs, in order: a forward's are mostly its backward's."""
        key = np.packbits(wanted).tobytes()
        if key not in self.tables:
            self.tables[key] = wanted_tiles(self.layout, self.regions, wanted)
        return self.tables[key]

    def _concerns(self, rank: int | None, i: np.ndarray, j: np.ndarray, group: int) -> np.ndarray:
        """Must ``rank`` know the cells (i, j, group)? None: all."""
        if rank is None:
            return np.ones_like(i, bool)
        groups = self.groups
        known = (i == rank) | (j == rank) | (self.cube(i, j, group) == rank)
        if groups.query > 1:  # what it keeps, and whose partial results pass through it
            alike = self.cube(i, j, group) % groups.query == rank % groups.query
            own = groups.context(rank)
            known |= alike & ((groups.context(i) == own) | (groups.context(j) == own))
        return known

    def edges(self, cells: Cells, rank: int | None = None) -> list[Edge]:
        """Every edge that these cells ask for; of all cells, every edge of the pass. Only those of ``rank`` if given.

        An edge from a rank to itself, of heads that are cut, is on no wire.
        """
        world, groups, edges = self.layout.world, self.groups, list[Edge]()
        uses = _uses(cells, groups, world)
        for key, users in self._fetched(uses, rank):
            edges += self.route.outward(key, users, groups, world)
            if groups.query > 1 and key.owner in users:
                edges.append(Edge(0, key.owner, key.owner, key, users[key.owner].rows))
        for (side, owner, part), users in uses.items():
            if side in self.direction.returns:
                key, ranks = Key(side, owner, part), self._ranks(side, owner, part)
                if groups.query == 1 or len(ranks) == 1:
                    finished = groups.query > 1
                    edges += self.route.homeward(key, users, groups, world, finished=finished)
                else:
                    finished = len(np.unique(ranks % groups.query)) == 1
                    edges += self.route.through_keepers(key, users, groups, finished=finished)
                if groups.query > 1 and owner in users:
                    rows, last = users[owner].rows, users[owner].last
                    edges.append(Edge(last, owner, owner, key, rows, partial=True, exact=True))
        return [e for e in edges if rank is None or rank in (e.source, e.target)]

    def _fetched(self, uses: Uses, rank: int | None) -> Iterator[tuple[Key, dict[int, Use]]]:
        """What travels out, and to whom."""
        groups = self.groups
        if not groups.keep:
            yield from ((Key(*key), users) for key, users in uses.items())
        elif not self.fetched_before:
            yield from ((Key(*key), users) for key, users in self._with_own_context(uses, rank).items())
        else:
            yield from ((Key(*key, Payload.GRADIENTS), u) for key, u in uses.items() if key[0] is Side.QUERY)
            yield from self._from_keepers(uses)

    def _with_own_context(self, uses: Uses, rank: int | None) -> Uses:
        """With all rows of its own context slice for each rank, whatever it computes: it keeps them."""
        groups, wider = self.groups, {key: dict(users) for key, users in uses.items()}
        contexts = range(self.layout.world // groups.query) if rank is None else [groups.context(rank)]
        for context in contexts:
            for owner in groups.members(context):
                whole = Use(Rows.all(self.layout.lengths[owner]), 0)
                for group, user in enumerate(groups.members(context)):
                    for side in Side:
                        wider.setdefault((side, owner, groups.part(side, group)), {})[user] = whole
        return wider

    def _from_keepers(self, uses: Uses) -> Iterator[tuple[Key, dict[int, Use]]]:
        """What a forward kept, to ranks of the same head group that need it; rows of the whole context slice."""
        groups = self.groups
        rows: dict[Key, dict[int, list[Rows]]] = defaultdict(lambda: defaultdict(list))
        slices: dict[int, Slice] = {}
        for (side, owner, part), users in uses.items():
            context = groups.context(owner)
            for user, use in users.items():
                keeper = groups.keeper(user % groups.query, context)
                if keeper != user:
                    if context not in slices:
                        slices[context] = Slice(self.layout, groups.members(context))
                    placed = slices[context].place(owner, use.rows)
                    rows[Key(side, keeper, part, Payload.INPUTS)][user].append(placed)
        for key, wanted in rows.items():
            yield key, {user: Use(Rows.union(many), 0) for user, many in wanted.items()}

    def _ranks(self, side: Side, owner: int, part: int) -> np.ndarray:
        """The ranks that would compute cells of this key if all were seen."""
        ranks = np.arange(self.layout.world)
        pairs = (np.full_like(ranks, owner), ranks) if side is Side.QUERY else (ranks, np.full_like(ranks, owner))
        groups = [g for g in range(self.groups.query) if self.groups.part(side, g) == part]
        return np.unique([self.cube(*pairs, g) for g in groups])


Uses = dict[tuple[Side, int, int], dict[int, Use]]  # side, owner, part of the heads: by rank


@dataclass(frozen=True, eq=False)
class Cells:
    """int64 [N] each: query owner, key owner, head group, who computes it and at which step; and a tile of it [N, 6],
    in :class:`~burst_attention.plan.tile.Tile`'s order."""

    i: np.ndarray
    j: np.ndarray
    group: np.ndarray
    rank: np.ndarray
    step: np.ndarray
    tiles: np.ndarray

    def owners(self, side: Side) -> np.ndarray:
        return self.i if side is Side.QUERY else self.j

    def areas(self, world: int) -> list[int]:
        """How many (query, key) of one head group each rank computes."""
        q0, q1, k0, k1, lo, hi = self.tiles.T
        areas = np.zeros(world, np.int64)
        np.add.at(areas, self.rank, band_area(q1 - q0, k1 - k0, lo, hi))
        return [int(area) for area in areas]

    def at(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(step, query owner, key owner, group) of what ``rank`` computes, each once, in this order."""
        first = self.first
        table = np.stack([self.step[first], self.i[first], self.j[first], self.group[first]], 1)
        return sorted(set(map(tuple, table[self.rank[first] == rank].tolist())))

    @cached_property
    def first(self) -> np.ndarray:
        """Where another cell begins."""
        fields = (self.i, self.j, self.group)
        return np.flatnonzero(np.r_[bool(len(self.i)), np.logical_or.reduce([x[1:] != x[:-1] for x in fields])])

    @cached_property
    def by_pair(self) -> dict[tuple[int, int], np.ndarray]:
        """The tiles of each pair, of heads that are not cut."""
        ends = [*self.first[1:].tolist(), len(self.i)]
        first = self.first
        named = zip(self.i[first].tolist(), self.j[first].tolist(), first.tolist(), ends, strict=True)
        return {(i, j): self.tiles[begin:end] for i, j, begin, end in named}


def _uses(cells: Cells, groups: Groups, world: int) -> Uses:
    """Who needs which rows of whom, and until which step. Complete for the ranks whose cells are all there."""
    uses: Uses = {}
    for side, column in ((Side.QUERY, 0), (Side.KEY, 2)):
        parts = groups.count(side)
        code = (cells.owners(side) * parts + groups.part(side, cells.group)) * world + cells.rank
        rows = Union.of(code, cells.tiles[:, column], cells.tiles[:, column + 1])
        last, first = np.zeros(len(rows.keys), np.int64), cells.first
        np.maximum.at(last, np.searchsorted(rows.keys, code[first]), cells.step[first])
        for (key, needed), step in zip(rows.sets(), last.tolist(), strict=True):
            rest, rank = divmod(key, world)
            uses.setdefault((side, *divmod(rest, parts)), {})[rank] = Use(needed, step)
    return uses
