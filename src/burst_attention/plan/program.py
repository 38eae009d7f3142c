"""What a rank's program is made of: its visits and the messages that it sends and receives, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .groups import Groups
from .route import Edge
from .rows import Rows, Side, Where
from .tile import Tiles

# A buffer: of a side, one part of its heads, and the shard of one owner, or, beyond the ranks' numbers, several shards
# of one context slice.
Place = tuple[Side, int, int]


@dataclass(frozen=True, eq=False)
class Visit:
    """Compute what a step completes of one head group here: cells between shards of two buffers, all of each pair's.

    ``held`` says where the rows lie in what is held, ``into`` where results go.
    """

    step: int
    places: Mapping[Side, Place]
    chunks: Mapping[Side, tuple[int, ...]]
    tiles: Tiles  # over buffers that hold just the rows that these cells touch
    held: Mapping[Side, Where]
    into: Mapping[Side, Where]


@dataclass(frozen=True, eq=False)
class Message:
    """An edge as one of its ends sees it: where its rows lie in that end's buffer (None: they are all of it)."""

    edge: Edge
    place: Place
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
class Move:
    """A local copy: this rank's rows into its sequence group's buffer, or its results out of it."""

    source: Message
    target: Message


@dataclass(frozen=True, eq=False)
class Drop:
    """Forget a foreign shard or a slice, or (``partial``) results that were sent: nothing below needs them."""

    place: Place
    partial: bool = False


Op = Visit | Post | Wait | Move | Drop


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's operations for one pass.

    Attributes:
        held_rows: the rows of each buffer that several messages fill.
        sum_rows: the accumulated rows, per buffer; :meth:`home` names the buffers of this rank's results.
        kept: the buffers of this rank's sequence group that the forward caches for the backward.
    """

    rank: int
    groups: Groups
    ops: tuple[Op, ...]
    held_rows: Mapping[Place, Rows]
    sum_rows: Mapping[Place, Rows]
    kept: Mapping[Side, Place]

    @property
    def edges(self) -> list[Edge]:
        """The edges that start or end here."""
        return [m.edge for op in self.ops if isinstance(op, Post) for m in (*op.sends, *op.receives)]

    def home(self, side: Side) -> list[Place]:
        """Where this rank's own results of a side come together, part by part of the heads."""
        return [(side, self.rank, part) for part in range(self.groups.count(side))]
