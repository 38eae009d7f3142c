"""Message bytes, summed over a program's own edges, so that predictions equal what runs."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from .groups import Groups
from .route import Edge
from .rows import Direction, Payload, Side


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of an attention call, which gives the bytes per row of a shard.

    ``io``, ``partial`` and ``accumulate`` are bytes per element of inputs, of partial results on the wire, and of sums.
    ``inside``: values are the first numbers of their keys, and don't travel. ``beside``: bytes that travel with a row
    of keys, whatever the batch.
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    io: int
    partial: int
    accumulate: int
    inside: bool = False
    beside: int = 0

    @property
    def key_width(self) -> int:
        """Numbers of a row of keys and values, of one head, or of its gradients."""
        return self.head_dim + (0 if self.inside else self.v_head_dim)

    def edge_bytes(self, edge: Edge, direction: Direction, groups: Groups) -> int:
        """Return the bytes of an edge, as the sweep sends it."""
        wide = self.accumulate if edge.exact else self.io if edge.finished else self.partial
        side, payload = edge.key.side, edge.key.payload
        row = self.side_bytes(side, direction, wide=wide if edge.partial else None, payload=payload)
        return edge.rows.count * row // groups.count(side)

    def side_bytes(
        self, side: Side, direction: Direction, *, wide: int | None = None, payload: Payload = Payload.ALL
    ) -> int:
        """Return the bytes of one row of a side's shard, or of its results in elements of ``wide`` bytes."""
        if side is Side.KEY:  # k and v, or dK and dV
            row = self.batch * self.kv_heads * self.key_width
            return row * self.io + self.beside if wide is None else row * wide
        if direction is Direction.FORWARD:  # q, or (out, lse)
            elements = self.head_dim * self.io if wide is None else self.v_head_dim * wide + self.accumulate
        elif wide is not None:  # dQ
            elements = self.head_dim * wide
        else:  # q, and dO, (lse, D)
            inputs, output, stats = self.head_dim * self.io, self.v_head_dim * self.io, 2 * self.accumulate
            elements = {
                Payload.ALL: inputs + output + stats,
                Payload.INPUTS: inputs,
                Payload.GRADIENTS: output + stats,
                Payload.OUTPUT_GRADIENT: output,
            }[payload]
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
        """Bytes sent in forward and backward."""
        return self.forward_sent + self.backward_sent

    @property
    def received(self) -> int:
        """Bytes received in forward and backward."""
        return self.forward_received + self.backward_received

    def __add__(self, other: Traffic) -> Traffic:
        """Return the bytes of both."""
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, calls: int) -> Traffic:
        """Return the bytes of several such calls."""
        return Traffic(*(calls * count for count in astuple(self)))
