"""Build a rank's program from the cells that it computes: buffers, visits, and the order of exchanges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np

from .demand import Cells, PassSpec
from .program import Drop, Message, Move, Op, Place, Post, Program, Visit, Wait
from .route import Edge, Key
from .rows import Direction, Payload, Rows, Side
from .slices import Slice
from .tile import Tiles, segment_tiles

Moment = tuple[int, int, int]  # step, then 0, 0: its wait; 0, 1: after the wait; 1, n: its visits; 2, 0: after them


class Builder:
    """Places the rows of ``rank`` in buffers for one pass, and builds the rank's program, of :mod:`.program`'s types.

    Attributes:
        work: the pass: which rank computes which cells, and the edges that send their rows (:mod:`.demand`).
        slices: the shards that share a buffer, by side, sequence group and part of the heads.
        held: the rows of each buffer of shards.
        sums: the rows of each buffer of results.
        kept: the buffers that the forward caches for the backward.
    """

    def __init__(self, work: PassSpec, rank: int) -> None:
        self.work, self.rank, self.groups, self.world = work, rank, work.groups, work.layout.world
        self.all_cells: Cells = work.cells(rank)
        self.cells = self.all_cells.at(rank)
        self.edges: list[Edge] = sorted(work.edges(self.all_cells, rank), key=_global_order)
        chunks = self.groups.chunk_count
        self.slices = {
            key: Slice(work.layouts[key[0]], owners, chunks=chunks) for key, owners in self._owners().items()
        }
        own = self.groups.context(rank)
        self.kept = {
            side: (side, self.world + own, self.groups.part(side, rank % self.groups.query))
            for side in (Side if self.groups.keep else ())
        }
        self._placed: dict[Edge, Rows] = {}
        arriving = [edge for edge in self.edges if edge.target == rank and not edge.partial]
        leaving = [edge for edge in self.edges if edge.source == rank and edge.partial]
        kept = {place: Rows.all(self._slice(place).length) for place in self.kept.values()}
        self.held, self.sums = self._buffers(Side, arriving) | kept, self._buffers(work.direction.returns, leaving)
        if self.groups.results and work.direction is Direction.FORWARD:  # they are cached under the same numbers
            self.sums[self.kept[Side.QUERY]] = kept[self.kept[Side.QUERY]]

    def program(self) -> Program:
        """Order the rank's operations and return its program."""
        ops = _with_drops(self._order([*self._visits()]), self.rank, self.world)
        several = {place: rows for place, rows in self.held.items() if place[1] >= self.world}
        return Program(self.rank, self.groups, tuple(ops), several, self.sums, self.kept)

    def _owners(self) -> dict[tuple[Side, int, int], list[int]]:
        """Return the owners whose shards share a buffer, by side, sequence group and part of the heads."""
        owners: dict[tuple[Side, int, int], set[int]] = defaultdict(set)
        group = self.cells[:, 3]
        for side, column in ((Side.QUERY, 1), (Side.KEY, 2)):
            code = self.work.owner(self.cells[:, column]) * self.groups.count(side) + self.groups.part(side, group)
            for owner, part in (divmod(one, self.groups.count(side)) for one in np.unique(code).tolist()):
                owners[side, self.groups.beside(owner), part].add(owner)
        if self.groups.keep or self.groups.chunks:  # all members, because a cached message may carry any of their rows
            for side in Side if self.groups.keep else ():
                owners[side, self.groups.context(self.rank), self.groups.part(side, self.rank % self.groups.query)]
            for key in (edge.key for edge in self.edges if self.groups.chunks):  # forwarded data comes in chunks
                owners[key.side, self.groups.context(key.owner), key.part]
            return {key: [*self.groups.members(key[1])] for key in owners}
        return {key: sorted(these) for key, these in owners.items()}

    def _place(self, key: Key) -> Place:
        """Return the buffer in which this rank uses a key's tensors."""
        context = self.groups.beside(key.owner)
        beside = self.slices.get((key.side, context, key.part))
        alone = beside is None or (len(beside.owners) == 1 and self.groups.chunk_count == 1)
        alone |= beside is not None and key.owner not in beside.owners  # this rank forwards it, and computes others
        return key.side, key.owner if alone else self.world + context, key.part

    def _rows(self, edge: Edge) -> Rows:
        """Return an edge's rows, numbered as in the buffer where this rank uses them."""
        if edge not in self._placed:
            place = self._place(edge.key)
            alone = place[1] < self.world or edge.key.payload is Payload.INPUTS
            self._placed[edge] = edge.rows if alone else self._slice(place).place(edge.key.owner, edge.rows)
        return self._placed[edge]

    def _slice(self, place: Place) -> Slice:
        side, which, part = place
        return self.slices[side, which - self.world if which >= self.world else self.groups.beside(which), part]

    def _buffers(self, sides: Iterable[Side], edges: list[Edge]) -> dict[Place, Rows]:
        """Return the rows of each buffer: this rank's own on these sides, and those that these edges carry."""
        own = {side: Rows.all(layout.lengths[self.rank]) for side, layout in self.work.layouts.items()}
        buffers = {(side, self.rank, part): own[side] for side in sides for part in range(self.groups.count(side))}
        carried: dict[Place, list[Rows]] = defaultdict(list)
        for edge in edges:
            carried[self._place(edge.key)].append(self._rows(edge))
        for place, many in carried.items():
            if place not in buffers:
                buffers[place] = many[0] if len(many) == 1 else Rows.union(many)
        return buffers

    def _message(self, edge: Edge, *, sent: bool) -> Message:
        """Return an edge as this rank sees it."""
        place, packed = self._place(edge.key), self.sums if edge.partial else self.held
        ends = sent != edge.partial  # a shard leaves, or results arrive
        if ends and (edge.key.owner == self.rank or place[1] < self.world) and edge.key.payload is not Payload.INPUTS:
            place = edge.key.side, edge.key.owner, edge.key.part
            return Message(edge, place, edge.rows.within(packed[place]))
        if place[1] < self.world:
            return Message(edge, place, None)
        return Message(edge, place, self._rows(edge).within(packed[place]))

    def _moves(self) -> Iterator[Move]:
        """Yield the copies of this rank's rows into its sequence group's buffer, and of its results out of it."""
        for edge in self.edges:
            if edge.source == edge.target and self._place(edge.key)[1] >= self.world:
                yield Move(self._message(edge, sent=True), self._message(edge, sent=False))

    def _order(self, visits: list[Visit]) -> list[Op]:
        """Put visits, exchanges, waits and copies in order.

        An exchange is posted once its data is ready and the visits of the exchange ``in_flight`` before are done.
        It then runs during the next visits, and the following exchange may already be posted. Under a causal mask some
        ranks send more in a step than others, which so need not wait for them.
        """
        timeline: list[tuple[Moment, Op]] = []
        ready: dict[tuple[Key, bool], Moment] = {}  # when a shard arrived, or a sum (True) got its latest part
        for n, visit in enumerate(sorted(visits, key=lambda v: v.step)):
            timeline.append(((visit.step, 1, n), visit))
            for side in visit.into:
                for chunk in visit.chunks[side]:
                    ready[self.work.key(side, chunk, visit.places[side][2]), True] = (visit.step, 2, 0)
        posted: Moment = (-1, 0, 0)
        wired = [edge for edge in self.edges if edge.source != edge.target]  # sorted by step
        by_step = {step: [*edges] for step, edges in groupby(wired, key=lambda edge: edge.step)}
        steps, most = [*by_step], self.groups.in_flight
        for n, (step, now) in enumerate(by_step.items()):
            sends = tuple(self._message(e, sent=True) for e in now if e.source == self.rank)
            receives = tuple(self._message(e, sent=False) for e in now if e.target == self.rank)
            carried = [ready.get((m.edge.key, m.edge.partial), posted) for m in sends]
            room = (steps[n - most], 2, 0) if n >= most else posted
            posted = max(posted, room, *carried)
            timeline.append((posted, Post(step, sends, receives)))
            timeline.append(((step, 0, 0), Wait(step)))
            for m in receives:
                key = m.edge.key, m.edge.partial
                ready[key] = max(ready.get(key, posted), (step, 0, 1))
        timeline += [((m.source.edge.step, 2 * m.source.edge.partial, 0), m) for m in self._moves()]
        timeline.sort(key=lambda entry: entry[0])
        return [op for _, op in timeline]

    def _visits(self) -> Iterator[Visit]:
        rectangles = self._rectangles()
        tiles = self._tiles(rectangles)
        # One visit for all that a step completes between two buffers, because visits cost.
        for these in _positions((r.step, *r.places.values()) for r in rectangles).values():
            step, places = rectangles[these[0]].step, rectangles[these[0]].places
            chunks = {side: tuple(dict.fromkeys(chain(*(rectangles[n].chunks[side] for n in these)))) for side in Side}
            table = np.concatenate([tiles[n].table for n in these])
            joined = Tiles(table[np.lexsort([table[:, 2], table[:, 0]])] if len(these) > 1 else table)
            rows = {Side.QUERY: joined.q_rows, Side.KEY: joined.k_rows}
            into = {side: rows[side].within(self.sums[places[side]]) for side in self.work.direction.returns}
            held = {side: rows[side].within(self.held[places[side]]) for side in Side}
            yield Visit(step, places, chunks, joined.packed(rows[Side.QUERY], rows[Side.KEY]), held, into)

    def _rectangles(self) -> list[Rectangle]:
        """Return the rectangles of cells that each step completes: new queries meet all keys, others new keys."""
        keys_of: dict[tuple[Any, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        contexts = self.groups.beside(self.work.owner(self.cells[:, 1:3])).tolist()
        for (step, i, j, group, new), between in zip(self.cells.tolist(), contexts, strict=True):
            keys_of[step, *between, group, new][i].append(j)
        rectangles = []
        for (step, *_, group, _), keys in keys_of.items():
            for k_chunks, q_chunks in self.products(keys, group):
                chunks = {Side.QUERY: q_chunks, Side.KEY: k_chunks}
                parts = {side: self.groups.part(side, group) for side in Side}
                places = {side: self._place(self.work.key(side, chunks[side][0], parts[side])) for side in Side}
                rectangles.append(Rectangle(step, places, chunks))
        return rectangles

    def products(self, keys: dict[int, list[int]], group: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield (keys, queries) whose products cover these cells of one step; other cells in them see nothing.

        If this rank computes every product of these queries and keys, one product suffices. All their visible cells
        belong to this step, because either all the queries arrive at it, or all the keys.
        """
        queries, all_keys = tuple(keys), tuple(sorted({*chain(*keys.values())}))
        i, j = (self.work.owner(np.array(chunks)) for chunks in (queries, all_keys))
        if self.groups.joins and (self.work.cube(i[:, None] + 0 * j, 0 * i[:, None] + j, group) == self.rank).all():
            yield all_keys, queries
            return
        queries_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for query, mine in keys.items():
            queries_of[tuple(mine)].append(query)
        yield from ((some, tuple(them)) for some, them in queries_of.items())

    def _tiles(self, rectangles: list[Rectangle]) -> list[Tiles]:
        """Return the tiles of each rectangle; one call finds those of all that share queries, or keys."""
        if not self.groups.joins:  # a rectangle is a pair
            pairs = ((r.chunks[Side.QUERY][0], r.chunks[Side.KEY][0]) for r in rectangles)
            return [Tiles(self.all_cells.by_pair[pair]) for pair in pairs]
        by_side = {side: _positions((r.places[side], r.chunks[side]) for r in rectangles) for side in Side}
        shared = min(Side, key=lambda side: len(by_side[side]))
        tiles: dict[int, Tiles] = {}
        for these in by_side[shared].values():
            segments = {}
            for side in Side:
                some = [rectangles[n] for n in (these[:1] if side is shared else these)]
                tables = [self._slice(each.places[side]).segments(each.chunks[side]) for each in some]
                segments[side] = np.concatenate(tables)
                segments[side][:, 0] = np.repeat(these[: len(tables)], [len(table) for table in tables])
            pieces = segment_tiles(segments[Side.QUERY], segments[Side.KEY], self.work.regions)
            tiles |= {(j if shared is Side.QUERY else i): x for (i, j), x in pieces.items()}
        return [tiles[n] for n in range(len(rectangles))]


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Cells of one head group that a step completes: each of these query chunks with each of these key chunks."""

    step: int
    places: dict[Side, Place]
    chunks: dict[Side, tuple[int, ...]]


def _positions(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the indices at which each value occurs."""
    at = defaultdict(list)
    for n, value in enumerate(values):
        at[value].append(n)
    return at


def _global_order(edge: Edge) -> tuple[Any, ...]:
    """Sort key of edges; all ranks post in this order, so messages between two ranks match."""
    key = edge.key
    return (
        edge.step,
        edge.partial,
        edge.key.side.value,
        edge.key.owner,
        edge.source,
        key.part,
        key.payload.value,
        key.turn,
    )


def _with_drops(ops: list[Op], rank: int, world: int) -> list[Op]:
    """Add a Drop after the last use of each foreign shard, and of each sequence group's shards and results."""
    last: dict[tuple[Place, bool], int] = {}
    arriving: dict[int, list[Message]] = {}
    for n, op in enumerate(ops):
        messages: list[Message] = []
        match op:
            case Visit():
                last.update({(place, False): n for place in op.places.values()})
            case Move():
                messages = [op.source, op.target]
            case Post():
                messages, arriving[op.step] = [*op.sends], [*op.receives]
            case Wait():
                messages = arriving[op.step]
        last.update({(m.place, m.edge.partial): n for m in messages})
    drops = defaultdict(list)
    for (place, partial), n in last.items():
        if place[1] >= world if partial else place[1] != rank:
            drops[n].append(Drop(place, partial))
    return [entry for n, op in enumerate(ops) for entry in (op, *drops[n])]
