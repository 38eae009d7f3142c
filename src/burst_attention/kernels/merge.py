"""Merge partial results: sums and online softmax (arXiv 2403.09347, equation 4; arXiv 1805.02867)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .precision import converted

# The most bytes of a temporary copy, on CPUs and on GPUs: smaller blocks cost operators, larger ones memory.
BLOCK_BYTES = (1 << 22, 1 << 28)


def head_blocks(x: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Yield slices of the heads of ``x`` [B, H, rows, D], so that a copy of one in ``dtype`` takes little memory."""
    heads, size = x.shape[1], x.numel() * dtype.itemsize
    most = max(1, heads * BLOCK_BYTES[x.is_cuda] // max(1, size))
    for first in range(0, heads, most):
        yield slice(first, min(first + most, heads))


def _blocks_to_widen(x: Tensor, dtype: torch.dtype) -> Iterable[slice]:
    return [slice(None)] if x.dtype == dtype else head_blocks(x, dtype)


def blank_output(q: Tensor, v: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the identity of :func:`merge_`: out 0 [B, Hq, rows, Dv] and lse -inf [B, Hq, rows]."""
    batch, heads = q.shape[:2]
    return q.new_zeros(batch, heads, rows, v.shape[-1], dtype=dtype), q.new_full(
        (batch, heads, rows), -math.inf, dtype=dtype
    )


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Fold (part_out, part_lse) into (out, lse) in place, in the accumulation dtype.

    l = logaddexp(l1, l2); out = out1 e^(l1 - l) + out2 e^(l2 - l). A side with lse -inf has weight 0.
    """
    total = torch.logaddexp(lse, part_lse)
    weight = torch.exp(part_lse - total).masked_fill_(torch.isneginf(part_lse), 0.0)  # -inf - -inf would be NaN
    weight = converted(weight, out.dtype).unsqueeze(-1)
    for heads in _blocks_to_widen(part_out, out.dtype):
        out[:, heads].lerp_(converted(part_out[:, heads], out.dtype), weight[:, heads])
    lse.copy_(total)


def store_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Do what :func:`merge_` does if (out, lse) is blank."""
    out.copy_(part_out)
    lse.copy_(part_lse)


def add_(total: Tensor, part: Tensor) -> None:
    """Add ``part`` [B, H, rows, D] to ``total`` in place."""
    if part.is_cuda:  # which widens as it reads
        total.add_(part)
        return
    for heads in _blocks_to_widen(part, total.dtype):
        total[:, heads].add_(converted(part[:, heads], total.dtype))  # += would also copy the sum to itself


def row_dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rowsum(a * b) [B, H, rows] of two tensors [B, H, rows, D], computed in ``dtype``."""
    wide = b.dtype if b.is_cuda else dtype  # a GPU widens as it reads
    pairs = ((converted(a[:, at], dtype), converted(b[:, at], wide)) for at in head_blocks(a, dtype))
    parts = [(x * y).sum(-1) for x, y in pairs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
