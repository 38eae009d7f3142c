"""Bytes: the sum over edges, so that a prediction can't drift from what runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .route import Edge
from .rows import Direction, Side


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What an attention call moves per row of a shard.

    ``io``, ``partial`` and ``accumulate`` are bytes per element of inputs, of partial results on the wire, and of sums.
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    io: int
    partial: int
    accumulate: int

    def row_bytes(self, edge: Edge, direction: Direction) -> int:
        """Bytes of one row of an edge, as the sweep sends it."""
        return self.side_bytes(edge.side, direction, partial=edge.partial, exact=edge.exact)

    def side_bytes(self, side: Side, direction: Direction, *, partial: bool, exact: bool = False) -> int:
        """Bytes of one row of a shard of ``side``, or of partial results for it."""
        wide = self.accumulate if exact else self.partial
        if side is Side.KEY:  # k and v, or dK and dV
            return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim) * (wide if partial else self.io)
        if direction is Direction.FORWARD:  # q, or (out, lse)
            elements = self.v_head_dim * wide + self.accumulate if partial else self.head_dim * self.io
        elif partial:  # dQ
            elements = self.head_dim * wide
        else:  # q, dO, (lse, D)
            elements = (self.head_dim + self.v_head_dim) * self.io + 2 * self.accumulate
        return self.batch * self.q_heads * elements


@dataclass(frozen=True)
class Traffic:
    """Payload bytes that one rank sends and receives in one attention call."""

    forward_sent: int
    forward_received: int
    backward_sent: int
    backward_received: int

    @property
    def sent(self) -> int:
        return self.forward_sent + self.backward_sent

    @property
    def received(self) -> int:
        return self.forward_received + self.backward_received


def sent_and_received(edges: Iterable[Edge], rank: int, shape: Shape, direction: Direction) -> tuple[int, int]:
    """Bytes that ``rank`` sends and receives over ``edges`` in one pass."""
    sent = received = 0
    for edge in edges:
        size = edge.rows.count * shape.row_bytes(edge, direction)
        sent += size * (edge.source == rank)
        received += size * (edge.target == rank)
    return sent, received
