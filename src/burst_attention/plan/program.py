"""Parts of a rank's program: its visits, and the messages that it sends and receives, in order.

``plan/build.py`` makes the program and decides the order of its operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .groups import Groups
from .route import Edge
from .rows import Rows, Side, Where
from .tile import Tiles

# Names a buffer by side, owner and part of the heads. Numbers from the world size on stand for a sequence group, whose
# shards lie in one buffer.
Place = tuple[Side, int, int]


@dataclass(frozen=True, eq=False)
class Visit:
    """Compute the cells of one head group, between two buffers, that a step completes: all tiles of their pairs."""

    step: int
    places: Mapping[Side, Place]
    chunks: Mapping[Side, tuple[int, ...]]
    tiles: Tiles  # indices count only the rows that these cells touch
    held: Mapping[Side, Where]  # the rows' places in the held buffers
    into: Mapping[Side, Where]  # the results' places


@dataclass(frozen=True, eq=False)
class Message:
    """An edge at one of its ends, with its rows' places in that end's buffer. None: they fill the buffer."""

    edge: Edge
    place: Place
    where: Where | None


@dataclass(frozen=True, eq=False)
class Post:
    """Start the exchange of a step, which continues during the next visits."""

    step: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True, eq=False)
class Wait:
    """Finish the exchange of a step, then combine the partial results that arrived, in the order posted."""

    step: int


@dataclass(frozen=True, eq=False)
class Move:
    """A local copy: this rank's rows into its sequence group's buffer, or its results out of it."""

    source: Message
    target: Message


@dataclass(frozen=True, eq=False)
class Drop:
    """Free a buffer that no later operation needs: a foreign shard, or a sequence group's shards."""

    place: Place
    partial: bool = False  # the buffer holds results that were sent


Op = Visit | Post | Wait | Move | Drop


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's operations for one pass."""

    rank: int
    groups: Groups
    ops: tuple[Op, ...]
    held_rows: Mapping[Place, Rows]  # of each buffer that several messages fill
    sum_rows: Mapping[Place, Rows]  # accumulated rows; :attr:`home` names the buffers of this rank's results
    kept: Mapping[Side, Place]  # buffers of this rank's sequence group that the forward caches for the backward

    @property
    def edges(self) -> list[Edge]:
        """Edges that start or end at this rank."""
        return [m.edge for op in self.ops if isinstance(op, Post) for m in (*op.sends, *op.receives)]

    @cached_property
    def home(self) -> Mapping[Side, list[Place]]:
        """The buffers of this rank's results, by side: one for each part of the heads."""
        return {side: [(side, self.rank, part) for part in range(self.groups.count(side))] for side in Side}
