"""A rank's program: its visits and the messages it sends and receives, in the order in which it executes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .assignment import Assignment
from .layout import Layout
from .route import Edge, Route, Use
from .rows import Direction, Rows, Side, Where
from .tile import Tiles

Pairs = Mapping[tuple[int, int], Tiles]
Key = tuple[Side, int]  # a side, and the rank that owns the shard


@dataclass(frozen=True, eq=False)
class Visit:
    """Compute one pair here. ``held`` says where its rows lie in the shards held, ``into`` where its results go."""

    step: int
    query_owner: int
    key_owner: int
    tiles: Tiles  # over buffers that hold just the rows that this pair touches
    held: Mapping[Side, Where]
    into: Mapping[Side, Where]

    def owner(self, side: Side) -> int:
        return self.query_owner if side is Side.QUERY else self.key_owner


@dataclass(frozen=True, eq=False)
class Message:
    """An edge as one of its ends sees it: ``where`` its rows lie in that end's buffer (None: they are all of it)."""

    edge: Edge
    where: Where | None


@dataclass(frozen=True, eq=False)
class Post:
    """Start the exchange of a step; it goes on while what follows is computed."""

    step: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True, eq=False)
class Wait:
    """Finish the exchange of a step, then combine the partial results that it brought, in the order posted."""

    step: int


@dataclass(frozen=True, eq=False)
class Drop:
    """Forget a foreign shard: nothing below needs it."""

    key: Key


Op = Visit | Post | Wait | Drop
Moment = tuple[int, int, int]  # in a step: 0, 0 its wait; 0, 1 after that; 1, n its visits; 2, 0 after those

IN_FLIGHT = 2  # exchanges under way at once, at most; fewer where a shard is passed on


@dataclass(frozen=True, eq=False)
class Program:
    """What one rank does for one pass.

    Attributes:
        sum_rows: the rows that it accumulates, per side and owner.
    """

    rank: int
    ops: tuple[Op, ...]
    sum_rows: Mapping[Key, Rows]

    @property
    def edges(self) -> list[Edge]:
        """The edges that start or end here."""
        return [m.edge for op in self.ops if isinstance(op, Post) for m in (*op.sends, *op.receives)]


@dataclass(frozen=True, eq=False)
class _Uses:
    """Per (side, owner): which rank uses which rows until when. Complete for what ``rank`` takes part in."""

    steps: dict[tuple[int, int], int] = field(default_factory=dict)
    ranks: dict[tuple[int, int], int] = field(default_factory=dict)
    by_key: dict[Key, dict[int, Use]] = field(default_factory=dict)


def touched_pairs(assignment: Assignment, route: Route, rank: int, world: int) -> np.ndarray:
    """int [N, 2]: the pairs whose tiles ``rank`` must know: what it owns or computes; on a path, all that passes by."""
    i, j = np.indices((world, world))
    mine = (assignment(i, j) == rank) | (i == rank) | (j == rank)
    return np.argwhere(mine if (route.out, route.home) == ("star", "star") else np.ones_like(mine))


def find_uses(pairs: Pairs, assignment: Assignment, world: int) -> _Uses:
    """Who computes each pair, at which step (when the later of its two sides arrives), and so who needs which rows."""
    uses = _Uses()
    needs: dict[Key, dict[int, list[tuple[Rows, int]]]] = defaultdict(lambda: defaultdict(list))
    for (i, j), tiles in pairs.items():
        rank = int(assignment(np.array(i), np.array(j)))
        step = max((rank - i) % world, (rank - j) % world)
        uses.ranks[i, j], uses.steps[i, j] = rank, step
        needs[Side.QUERY, i][rank].append((tiles.q_rows, step))
        needs[Side.KEY, j][rank].append((tiles.k_rows, step))
    for key, users in needs.items():
        uses.by_key[key] = {
            rank: Use(Rows.union(rows for rows, _ in visits), max(step for _, step in visits))
            for rank, visits in users.items()
        }
    return uses


def all_edges(pairs: Pairs, assignment: Assignment, route: Route, direction: Direction, layout: Layout) -> list[Edge]:
    """Every edge that these pairs ask for; of all pairs, every edge of the pass."""
    return _edges(find_uses(pairs, assignment, layout.world), route, direction, layout.world)


def _edges(uses: _Uses, route: Route, direction: Direction, world: int) -> list[Edge]:
    edges: list[Edge] = []
    for (side, owner), users in uses.by_key.items():
        edges += route.outward(side, owner, users, world)
        if side in direction.returns:
            edges += route.homeward(side, owner, users, world)
    return edges


def build_program(
    pairs: Pairs, assignment: Assignment, route: Route, direction: Direction, layout: Layout, rank: int
) -> Program:
    """The program of ``rank`` for one pass.

    Args:
        pairs: tiles of (at least) :func:`touched_pairs`; pairs without a tile are absent.
    """
    uses = find_uses(pairs, assignment, layout.world)
    edges = [e for e in _edges(uses, route, direction, layout.world) if rank in (e.source, e.target)]
    edges.sort(key=lambda e: (e.step, e.partial, e.side.value, e.owner, e.source))
    own = Rows.all(layout.lengths[rank])
    held: dict[Key, Rows] = {(side, rank): own for side in Side}
    sums: dict[Key, Rows] = {(side, rank): own for side in direction.returns}
    for edge in edges:
        if edge.partial and edge.source == rank:
            sums[edge.side, edge.owner] = edge.rows
        elif not edge.partial and edge.target == rank:
            held[edge.side, edge.owner] = edge.rows
    visits = [
        _visit(pair, pairs[pair], uses.steps[pair], held, sums) for pair in sorted(pairs) if uses.ranks[pair] == rank
    ]
    ops = _order(visits, edges, held, sums, rank)
    return Program(rank, tuple(_with_drops(ops, rank)), sums)


def _visit(pair: tuple[int, int], tiles: Tiles, step: int, held: Mapping[Key, Rows], sums: Mapping[Key, Rows]) -> Visit:
    rows = {Side.QUERY: tiles.q_rows, Side.KEY: tiles.k_rows}
    owners = {Side.QUERY: pair[0], Side.KEY: pair[1]}
    return Visit(
        step,
        *pair,
        tiles.packed(rows[Side.QUERY], rows[Side.KEY]),
        {side: rows[side].within(held[side, owners[side]]) for side in Side},
        {side: rows[side].within(sums[side, owners[side]]) for side in Side if (side, owners[side]) in sums},
    )


def _order(
    visits: list[Visit], edges: list[Edge], held: Mapping[Key, Rows], sums: Mapping[Key, Rows], rank: int
) -> list[Op]:
    """Each exchange is posted once what it carries is here and visits of :data:`IN_FLIGHT` exchanges before are done.

    So it is on the wire while visits are computed, and the next is on its heels: under a causal mask some ranks send
    more in a step than others, who need not wait for them.
    """
    timeline: list[tuple[Moment, Op]] = []
    ready: dict[tuple[Key, bool], Moment] = {}  # a shard came, or a sum (True) got its last part so far
    for n, visit in enumerate(sorted(visits, key=lambda v: v.step)):
        timeline.append(((visit.step, 1, n), visit))
        for side in visit.into:
            ready[(side, visit.owner(side)), True] = (visit.step, 2, 0)
    posted: Moment = (-1, 0, 0)
    steps = sorted({edge.step for edge in edges})
    for n, step in enumerate(steps):
        now = [edge for edge in edges if edge.step == step]
        sends = tuple(_message(e, held if not e.partial else None) for e in now if e.source == rank)
        receives = tuple(_message(e, sums if e.partial else None) for e in now if e.target == rank)
        carried = [ready.get(((e.side, e.owner), e.partial), posted) for e in now if e.source == rank]
        room = (steps[n - IN_FLIGHT], 2, 0) if n >= IN_FLIGHT else posted
        posted = max(posted, room, *carried)
        timeline.append((posted, Post(step, sends, receives)))
        timeline.append(((step, 0, 0), Wait(step)))
        for e in (e for e in now if e.target == rank):
            key = (e.side, e.owner), e.partial
            ready[key] = max(ready.get(key, posted), (step, 0, 1))
    timeline.sort(key=lambda entry: entry[0])
    return [op for _, op in timeline]


def _message(edge: Edge, packed: Mapping[Key, Rows] | None) -> Message:
    return Message(edge, None if packed is None else edge.rows.within(packed[edge.side, edge.owner]))


def _with_drops(ops: list[Op], rank: int) -> list[Op]:
    """Add a Drop after the last use of each foreign shard."""
    last: dict[Key, int] = {}
    for n, op in enumerate(ops):
        used: list[Key] = []
        if isinstance(op, Visit):
            used = [(side, op.owner(side)) for side in Side]
        elif isinstance(op, Post):
            used = [(m.edge.side, m.edge.owner) for m in op.sends if not m.edge.partial]
        elif isinstance(op, Wait):
            arrived = next(p for p in ops if isinstance(p, Post) and p.step == op.step)
            used = [(m.edge.side, m.edge.owner) for m in arrived.receives if not m.edge.partial]
        last.update({key: n for key in used if key[1] != rank})
    drops = defaultdict(list)
    for key, n in last.items():
        drops[n].append(Drop(key))
    return [entry for n, op in enumerate(ops) for entry in (op, *drops[n])]
