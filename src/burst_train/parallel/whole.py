"""Attention over a whole sequence on one device by PyTorch's own kernel, the reference for all strategies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_attention.attention.call import signless
from burst_attention.attention.plan import Plan
from burst_attention.plan.mask import Mask

WINDOW_ROWS = 1024


def whole_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor:
    """Compute ``scaled_dot_product_attention`` for each document: q [B, Hq, S, D], k and v [B, Hkv, S, D].

    ValueError: ``plan`` has several ranks, or a mask of blocks.
    """
    if plan.world > 1:
        raise ValueError(f"plan shards the sequence over {plan.world} ranks; whole_attention needs a plan of one rank")
    if plan.mask.block is not None:
        raise ValueError(f"mask={plan.mask!r}: whole_attention supports no blocks; use burst_attention")
    if scale is not None:
        q, scale = signless(q, scale)
    parts = []
    for rows, columns, mask in _calls(plan.mask, plan.seqlen):
        parts.append(
            scaled_dot_product_attention(
                q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                attn_mask=None if mask is None else mask.to(q.device),
                is_causal=mask is None and plan.mask.causal,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _calls(mask: Mask, seqlen: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the calls that cover the mask: (rows, columns, bool [rows, columns] or None for ``is_causal``)."""
    for start, stop in itertools.pairwise(mask.cu_seqlens or (0, seqlen)):
        window = mask.window
        if window is None or window >= stop - start:
            whole = slice(start, stop)
            if stop > start or not seqlen:  # without tokens, one empty call so that the result has gradients
                yield whole, whole, torch.from_numpy(mask.dense(seqlen)) if mask.prefix else None
            continue
        for top in range(start, stop, WINDOW_ROWS):  # one mask of all rows would need memory quadratic in the length
            bottom, left = min(top + WINDOW_ROWS, stop), max(top - window + 1, start)
            distance = torch.arange(top, bottom).unsqueeze(1) - torch.arange(left, bottom)
            yield slice(top, bottom), slice(left, bottom), (distance >= 0) & (distance < window)
