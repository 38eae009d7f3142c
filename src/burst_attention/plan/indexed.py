"""The sizes of an attention to the keys that an indexer chooses, and what its kernels need to know in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .cost import Shape

POSITION = 8  # bytes of a key's position, which travels with an indexer's keys and with chosen ones
SCORE_ROWS = 128  # queries whose scores are computed together
DENSE = 32  # up to this many keys for each chosen one, products with all keys take less time than a gather


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

    @property
    def choice_bytes(self) -> int:
        """Bytes of a token's choice, as a layer of transformers keeps it for its backward."""
        return self.count * (8 * self.kv_heads if self.block else 4)  # int64 by key-value head; int32 for all

    def attention(self, like: Shape, chunks: int = 1) -> Shape:
        """Return the shape of the attention to a chunk of heads, with the batch and bytes per element of ``like``."""
        sizes = {name: getattr(self, name) for name in ("head_dim", "v_head_dim")}
        sizes |= {name: max(1, getattr(self, name) // chunks) for name in ("q_heads", "kv_heads")}
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
