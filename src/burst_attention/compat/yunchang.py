"""yunchang's LongContextAttention, computed by :func:`burst_attention.burst_attention`.

One difference: pass the group to the module and drop ``set_seq_parallel_pg``, whose Ulysses degree becomes the keyword
``ulysses_degree``. The degree only describes which rank holds which tokens; the planner chooses the communication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .call import Options, attend

LAYOUTS = {"basic": "contiguous", "zigzag": "zigzag", "strip": "striped"}


class LongContextAttention(torch.nn.Module):
    """Attention over shards [B, S_local, heads, head dim] of one sequence.

    Args:
        ring_impl_type: the layout: ``basic`` (consecutive parts, in rank order), ``zigzag`` or ``strip``.
        ulysses_degree: the ``sp_ulysses_degree`` of ``set_seq_parallel_pg``; any for ``basic``, else 1.
        group: the ranks that share a sequence; None for all.

    ``scatter_idx``, ``gather_idx``, ``use_pack_qkv``, ``use_sync`` and ``attn_type`` control yunchang's implementation
    and are ignored.

    Raises:
        ValueError: no layout of this library matches yunchang's shards.
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: Any = None,
        *,
        ulysses_degree: int,
        group: Any = None,
    ) -> None:
        super().__init__()
        if ring_impl_type not in LAYOUTS:
            raise ValueError(f"ring_impl_type={ring_impl_type!r} is unknown; choose one of {', '.join(LAYOUTS)}")
        if ring_impl_type != "basic" and ulysses_degree != 1:
            raise ValueError(
                f"ulysses_degree={ulysses_degree} is not supported with ring_impl_type={ring_impl_type}; pass "
                "ulysses_degree=1 and shard the sequence accordingly"
            )
        self.layout, self.group = LAYOUTS[ring_impl_type], group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """Return out [B, S_local, heads, head dim]. Every rank of the group must call it.

        ``return_attn_probs`` is ignored.

        Raises:
            TypeError, ValueError: an argument is invalid on some rank. Every rank raises the same class.
        """
        named = {"group": self.group, "softcap": softcap}
        options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, **named)
        return attend("LongContextAttention", self.layout, (query, key, value), options)
