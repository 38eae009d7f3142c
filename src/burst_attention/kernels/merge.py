"""Joining partial results by online softmax (arXiv 2403.09347, equation 4; Milakov & Gimelshein, arXiv 1805.02867)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def blank_output(q: Tensor, v: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The identity of :func:`merge_`: out 0 [B, Hq, rows, Dv] and lse -inf [B, Hq, rows]."""
    batch, heads = q.shape[:2]
    return q.new_zeros(batch, heads, rows, v.shape[-1], dtype=dtype), q.new_full(
        (batch, heads, rows), -math.inf, dtype=dtype
    )


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Fold (part_out, part_lse) into (out, lse) in place.

    l = logaddexp(l1, l2); out = out1 e^(l1 - l) + out2 e^(l2 - l), a side with lse -inf counting nothing. The weights
    sum to one, so one interpolation does it. fp32, or fp64 for fp64.
    """
    total = torch.logaddexp(lse, part_lse)
    weight = torch.exp(part_lse - total).masked_fill_(part_lse == -math.inf, 0.0)  # -inf - -inf would be NaN
    out.lerp_(part_out.to(out.dtype), weight.to(out.dtype).unsqueeze(-1))
    lse.copy_(total)
