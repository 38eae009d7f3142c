"""Which rank forwards which shard to whom, and through whom partial results return.

For each owner and side a route gives an out-tree from the owner and an in-tree to it, as edges. An edge carries the
rows that the ranks behind it need, and the step of its exchange. A rank waits for step t of the exchange before the
visits of step t. A rank at distance d from an owner receives that owner's shard at step d in every route. The distance
is counted around the ring, except for routes by nodes. So one step of a direct route is a permutation of the ranks, and
one step of a relay moves along the ring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .groups import Groups, Ranks
from .rows import Payload, Rows, Side


class Key(NamedTuple):
    """A message's content: one side's tensors of an owner's shard (or one chunk of it), for one part of the heads.

    For cached tensors (:attr:`Payload.INPUTS`) ``owner`` is the rank that caches them, for its sequence group.
    """

    side: Side
    owner: int
    part: int = 0
    payload: Payload = Payload.ALL
    turn: int = 0


@dataclass(frozen=True, eq=False)
class Edge:
    """One message: ``rows`` of ``key``'s shard from ``source`` to ``target``, or partial results for them."""

    step: int
    source: int
    target: int
    key: Key
    rows: Rows
    partial: bool = False
    exact: bool = False  # partials in the accumulation dtype; others are rounded once, to the wire's dtype
    finished: bool = False  # nothing will be added to them: they are rounded to the inputs' dtype


@dataclass(frozen=True)
class Use:
    """What one rank needs of one owner's shard: the rows, and the last step at which it visits them."""

    rows: Rows
    last: int


@dataclass(frozen=True)
class Route:
    """How shards go out and partial results come home: by one of :data:`ROUTES`.

    ``direct``: between owner and user. ``ring-attention``: along the ring of ranks, partial results in the accumulation
    dtype. ``nodes``: to another node once, and there to the ranks that need it; home in reverse.

    The paper's BurstAttention sends dQ around the ring; here dQ goes directly home, so that each partial is rounded
    once for any world size. The ring needs whole heads: it would run through ranks that compute other heads.
    """

    name: str
    nodes: tuple[int, ...] = ()  # each rank's node; empty: each rank is a separate node

    @property
    def direct(self) -> bool:
        """Whether each message depends on its two ends alone."""
        return self.name == "direct"

    @property
    def ring(self) -> bool:
        """Whether messages follow the ring of ranks, and partial results stay in the accumulation dtype."""
        return self.name == "ring-attention"

    def outward(
        self, key: Key, uses: Mapping[int, Use], groups: Groups, world: int, rank: int | None = None
    ) -> Iterator[Edge]:
        """Yield the edges by which ``key``'s tensors reach their users; along a path, only those of ``rank``."""
        away = self._by_distance(key, uses, groups, world)
        if not self.ring:
            for members in self._by_node(away, key.owner):
                (first, gate), *rest = members
                yield Edge(first, key.owner, gate, key, Rows.union(uses[rank].rows for _, rank in members))
                for distance, rank in rest:  # it reached the gate at an earlier step
                    yield Edge(distance, gate, rank, key, uses[rank].rows)
            return
        far = max((distance for distance, _ in away), default=0)
        for hop in _hops(key.owner, rank, world, range(far, 0, -1)):
            beyond = Rows.union(uses[user].rows for distance, user in away if distance >= hop)
            yield Edge(hop, (key.owner + hop - 1) % world, (key.owner + hop) % world, key, beyond)

    def homeward(
        self,
        key: Key,
        uses: Mapping[int, Use],
        groups: Groups,
        world: int,
        *,
        finished: bool,
        rank: int | None = None,
    ) -> Iterator[Edge]:
        """Yield the edges by which partial results return to ``key``'s owner; along a path, only those of ``rank``.

        A partial computed at step v is sent in exchange v + ``groups.in_flight``, the first one posted after it exists.
        A rank on a path receives (step t), then adds its own partial, then sends (step t + 1 or later).
        ``finished``: a single rank computes the whole result.
        """
        away, later = self._by_distance(key, uses, groups, world), groups.in_flight
        if not self.ring:
            for members in self._by_node(away, key.owner):
                users = {rank: uses[rank] for _, rank in sorted(members, key=lambda pair: (uses[pair[1]].last, pair))}
                yield from _through([*users][-1], key, users, later, exact=True, finished=finished)
            return
        first = min((distance for distance, _ in away), default=world)
        # Hops follow one another from the first user on. None starts before its rank and those behind it are done.
        done = sorted((distance, uses[user].last + 1 - distance) for distance, user in away)
        for hop in (hop - 1 for hop in _hops(key.owner, rank, world, range(first + 1, world + 1))):
            behind = max(ready for distance, ready in done if distance <= hop)
            so_far = Rows.union(uses[user].rows for distance, user in away if distance <= hop)
            step = hop + 1 + max(-first, behind)
            ends = (key.owner + hop) % world, (key.owner + hop + 1) % world
            yield Edge(step, *ends, key, so_far, True, True)

    @property
    def by_nodes(self) -> bool:
        """Whether messages depend on which ranks share a node."""
        return self.name == "nodes"

    @cached_property
    def description(self) -> str:
        """The name, with a digest if nodes matter; equal on two ranks iff messages take the same paths."""
        if not (self.by_nodes and self.nodes):
            return self.name
        numbers: dict[int, int] = {}  # nodes may be numbered differently
        places = [numbers.setdefault(node, len(numbers)) for node in self.nodes]
        digest = hashlib.blake2b(repr(places).encode(), digest_size=8).hexdigest()
        return f"{self.name} ({len(numbers)}, digest {digest})"

    def node(self, rank: int) -> int:
        """Return the node of a rank; each rank is a separate node if messages don't depend on nodes."""
        return self.nodes[rank] if self.nodes and self.by_nodes else rank

    def mates(self, rank: int) -> list[int]:
        """Return the ranks of a rank's node, including itself; the rank forwards only messages from or for them."""
        return [other for other in range(len(self.nodes)) if self.node(other) == self.node(rank)] or [rank]

    @cached_property
    def node_size(self) -> int:
        """Ranks per node if messages go by nodes, and all nodes are equally large runs of neighbours; otherwise 1."""
        size = self.nodes.count(self.nodes[0]) if self.nodes and self.by_nodes else 1
        alike = [self.nodes[n : n + size] for n in range(0, len(self.nodes), size)]
        return size if all(len(each) == size and len(set(each)) == 1 for each in alike) else 1

    def distance(self, groups: Groups, source: Ranks, rank: Ranks, world: int, *, turn: Ranks | int = 0) -> Ranks:
        """Return the step at which data from ``source`` reaches ``rank``; by nodes if sequence groups divide them."""
        inside = self.node_size // groups.query if self.node_size % groups.query == 0 else 1
        return groups.distance(source, rank, world, contexts=inside, turn=turn)

    def _by_distance(self, key: Key, uses: Mapping[int, Use], groups: Groups, world: int) -> list[tuple[int, int]]:
        owner, turn = key.owner, key.turn
        return sorted((self.distance(groups, owner, rank, world, turn=turn), rank) for rank in uses if rank != owner)

    def _by_node(self, away: list[tuple[int, int]], owner: int) -> list[list[tuple[int, int]]]:
        """Group (distance, rank) pairs that share one message from or to ``owner``, in order of distance."""
        together: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
        for distance, rank in away:
            node = self.node(rank)
            together.setdefault((node, rank if node == self.node(owner) else None), []).append((distance, rank))
        return list(together.values())

    def through_cache_owners(
        self, key: Key, uses: Mapping[int, Use], groups: Groups, *, finished: bool
    ) -> Iterator[Edge]:
        """Yield the edges of :meth:`homeward` if heads are split.

        Partials first go to the rank with the same heads in the owner's sequence group. It adds them before it rounds.
        ``finished``: only one such rank has results for ``key``.
        """
        by_keeper: dict[int, dict[int, Use]] = {}
        for _, rank in sorted((use.last, rank) for rank, use in uses.items()):
            cache_owner = groups.cache_owner(rank % groups.query, groups.context(key.owner))
            by_keeper.setdefault(cache_owner, {})[rank] = uses[rank]
        for cache_owner, users in by_keeper.items():
            yield from _through(cache_owner, key, users, groups.in_flight, exact=False, finished=finished)


def _through(
    relay: int, key: Key, users: Mapping[int, Use], later: int, *, exact: bool, finished: bool
) -> Iterator[Edge]:
    """Yield the edges that bring partials to ``relay``, ``later`` steps after their last use, and from it home."""
    for rank, use in users.items():
        if rank != relay:
            yield Edge(use.last + later, rank, relay, key, use.rows, True, exact)
    if relay != key.owner:
        step = max(use.last + later - (rank == relay) for rank, use in users.items())
        rows = Rows.union(use.rows for use in users.values())
        yield Edge(step + 1, relay, key.owner, key, rows, True, False, finished)


def _hops(owner: int, rank: int | None, world: int, hops: range) -> Iterator[int]:
    """Return the ``hops`` around the ring from ``owner`` that end or begin at ``rank``; all of them if None."""
    if rank is None:
        return iter(hops)
    into = (rank - owner) % world
    return (hop for hop in sorted({into or world, into + 1}, key=lambda hop: hop * hops.step) if hop in hops)


ROUTES = {name: Route(name) for name in ("direct", "ring-attention", "nodes")}
