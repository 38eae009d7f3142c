"""yunchang's LongContextAttention, computed by :func:`burst_attention.burst_attention`.

One keyword differs. The module takes its groups as arguments instead of reading them from the process, so
``ulysses_degree`` replaces ``set_seq_parallel_pg``. The planner chooses what is exchanged; the degree only says which
rank holds which tokens.
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
        ring_impl_type: who holds what: ``basic`` (consecutive parts, in rank order), ``zigzag`` or ``strip``.
        ulysses_degree: what ``set_seq_parallel_pg`` was given as ``sp_ulysses_degree``; any for ``basic``, else 1.
        group: the ranks that share a sequence; None for all.

    ``scatter_idx``, ``gather_idx``, ``use_pack_qkv``, ``use_sync`` and ``attn_type`` say how yunchang exchanges and
    computes: they are not needed.

    Raises:
        ValueError: the shards would be others than those of our layouts.
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
                f"ulysses_degree={ulysses_degree} cuts {ring_impl_type}'s shards once more, which no layout does here; "
                "cut them as for degree 1"
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
        """out [B, S_local, heads, head dim], whatever ``return_attn_probs`` says. Every rank of the group must call it.

        Raises:
            TypeError, ValueError: an argument can't be used, here or on another rank: the same class on every rank.
        """
        options = Options(
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            alibi_slopes,
            deterministic,
            group=self.group,
            softcap=softcap,
        )
        return attend("LongContextAttention", self.layout, (query, key, value), options)
