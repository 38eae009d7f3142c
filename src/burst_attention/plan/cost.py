"""Message bytes, summed over a program's own edges, so that predictions equal what runs."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from .groups import Groups
from .route import Edge
from .rows import Direction, Payload, Side

POSITION = 8  # bytes of a key's position, which travels with an indexer's keys and with chosen ones


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


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """Attention to the keys that an indexer chooses, and the choice before it. Keys circulate in both.

    Attributes:
        q_heads, kv_heads, head_dim, v_head_dim: of the attention; of latents, one key-value head.
        inside: values are the first numbers of their keys.
        count: keys of a query, at most.
        index_heads, index_dim: of the indexer; 0 heads: the layer takes the choice of a layer before.
        block: keys of a block, if blocks of keys are chosen, one choice for each key-value head; else 0.
        wide: the indexer's keys are sent in fp32 at least.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    count: int
    inside: bool = False
    index_heads: int = 0
    index_dim: int = 0
    block: int = 0
    wide: bool = False

    @property
    def chooses(self) -> bool:
        """Whether the layer has an indexer."""
        return self.index_heads > 0

    def attention(self, like: Shape) -> Shape:
        """Return the shape of the attention, with the batch and the bytes per element of ``like``."""
        sizes = {name: getattr(self, name) for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")}
        return replace(like, **sizes, inside=self.inside, beside=POSITION)

    def choice(self, like: Shape) -> Shape:
        """Return the shape of the choice, likewise: a forward in which the indexer's keys circulate."""
        return replace(
            like,
            q_heads=self.index_heads,
            kv_heads=1,
            head_dim=self.index_dim,
            v_head_dim=0,
            io=max(like.io, 4) if self.wide else like.io,
            beside=POSITION,
        )


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
