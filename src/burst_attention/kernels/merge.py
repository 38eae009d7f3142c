"""Merge partial results: sums and online softmax (arXiv 2403.09347, equation 4; arXiv 1805.02867).

The functions process one head at a time. Only that head's temporary fp32 copy is in memory, not the shard's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def blank_output(q: Tensor, v: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the identity of :func:`merge_`: out 0 [B, Hq, rows, Dv] and lse -inf [B, Hq, rows]."""
    batch, heads = q.shape[:2]
    return q.new_zeros(batch, heads, rows, v.shape[-1], dtype=dtype), q.new_full(
        (batch, heads, rows), -math.inf, dtype=dtype
    )


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Fold (part_out, part_lse) into (out, lse) in place.

    l = logaddexp(l1, l2); out = out1 e^(l1 - l) + out2 e^(l2 - l). A side with lse -inf has weight 0. The weights
    sum to one, so this is one linear interpolation. In fp32, or fp64 for fp64 inputs.
    """
    total = torch.logaddexp(lse, part_lse)
    weight = torch.exp(part_lse - total).masked_fill_(part_lse == -math.inf, 0.0)  # -inf - -inf would be NaN
    weight = weight.to(out.dtype).unsqueeze(-1)
    for head in range(out.shape[1]):
        out[:, head].lerp_(part_out[:, head].to(out.dtype), weight[:, head])
    lse.copy_(total)


def store_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Do what :func:`merge_` does if (out, lse) is blank."""
    out.copy_(part_out)
    lse.copy_(part_lse)


def add_(total: Tensor, part: Tensor) -> None:
    """Add ``part`` [B, H, rows, D] to ``total`` in place."""
    for head in range(total.shape[1]):
        total[:, head] += part[:, head]


def row_dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rowsum(a * b) [B, H, rows] of two tensors [B, H, rows, D], computed in ``dtype``."""
    result = a.new_empty(a.shape[:3], dtype=dtype)
    for head in range(a.shape[1]):
        result[:, head] = (a[:, head].to(dtype) * b[:, head].to(dtype)).sum(-1)
    return result
