"""Propagate NaN and infinity in inputs to NaN in exactly the rows that see them.

Some kernels multiply masked values by 0, and 0 * NaN is NaN. Others drop a NaN when they look for a maximum. So a call
with non-finite inputs is computed without them, and its results are then marked with NaN according to the mask. Finite
calls pay only for the check: a sum over each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..plan.tile import Tiles
from .contract import BackwardInputs

RunForward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
RunBackward = Callable[[BackwardInputs], tuple[Tensor, Tensor, Tensor]]


def suspected(*tensors: Tensor) -> bool:
    """May one of them hold a NaN or an infinity? True also of finite numbers whose sum overflows.

    Of tensors on the CPU; of others it says False, for the host would have to wait for the answer.
    """
    # A sum of fp16 numbers is all too soon more than fp16 holds; the other dtypes reach as far as their sums.
    return any(
        x.is_cpu and not math.isfinite(x.sum(dtype=torch.float32 if x.dtype == torch.float16 else None))
        for x in tensors
    )


def contained_forward(run: RunForward, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``run(q, k, v)``: lse NaN in rows of such a query or that see such a key, out also of such a value.

    Other rows are as if what they don't see were 0.
    """
    if not suspected(q, k, v):
        return run(q, k, v)
    (q, bad_q), (k, bad_k), (v, bad_v) = (_cleaned(x) for x in (q, k, v))
    out, lse = run(q, k, v)
    lost = (bad_q & (lse != -math.inf)) | rows_that_see(bad_k, tiles, like=bad_q)
    out = out.masked_fill((lost | rows_that_see(bad_v, tiles, like=bad_q)).unsqueeze(-1), math.nan)
    return out, lse.masked_fill(lost, math.nan)


def contained_backward(run: RunBackward, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of ``run(inputs)``, NaN where rows with a NaN have a share in them.

    A row whose probabilities or dO are lost has its part in dq, dk and dv; one that only D is lost of, as it is if a
    value is NaN, not in dv.
    """
    # A row that no tile covers has lse -inf, and exp(-inf - -inf) is NaN; any finite lse gives it gradient 0.
    lse, delta, tiles = inputs.lse.masked_fill(inputs.lse == -math.inf, 0.0), inputs.delta, inputs.tiles
    tensors = (inputs.dout, inputs.q, inputs.k, inputs.v)
    if not suspected(*tensors, lse, delta):
        return run(replace(inputs, lse=lse))
    (dout, bad_dout), (q, bad_q), (k, bad_k), (v, bad_v) = (_cleaned(x) for x in tensors)
    lost = bad_dout | bad_q | ~lse.isfinite() | rows_that_see(bad_k, tiles, like=bad_q)
    no_delta = lost | ~delta.isfinite() | rows_that_see(bad_v, tiles, like=bad_q)
    dout, q = (x.masked_fill(lost.unsqueeze(-1), 0.0) for x in (dout, q))
    lse, delta = lse.masked_fill(lost, 0.0), delta.masked_fill(no_delta, 0.0)
    dq, dk, dv = run(replace(inputs, dout=dout, q=q, k=k, v=v, lse=lse, delta=delta))
    everything = torch.ones_like(bad_k)
    dq = dq.masked_fill((no_delta & rows_that_see(everything, tiles, like=bad_q)).unsqueeze(-1), math.nan)
    dk = dk.masked_fill(keys_seen_by(no_delta, tiles, like=bad_k).unsqueeze(-1), math.nan)
    dv = dv.masked_fill(keys_seen_by(lost, tiles, like=bad_k).unsqueeze(-1), math.nan)
    return dq, dk, dv


def rows_that_see(keys: Tensor, tiles: Tiles, *, like: Tensor) -> Tensor:
    """bool [B, Hq, Sq] as ``like``: which rows see one of the ``keys``, bool [B, Hkv, Sk]."""
    keys, reached = keys.repeat_interleave(like.shape[1] // keys.shape[1], 1), torch.zeros_like(like)
    if keys.any():
        for tile in tiles:
            rows = torch.arange(tile.rows, device=keys.device)
            hit = _any_within(keys[:, :, tile.k_start : tile.k_stop], rows - tile.hi, rows - tile.lo)
            reached[:, :, tile.q_start : tile.q_stop] |= hit
    return reached


def keys_seen_by(rows: Tensor, tiles: Tiles, *, like: Tensor) -> Tensor:
    """bool [B, Hkv, Sk] as ``like``: which keys one of the ``rows``, bool [B, Hq, Sq], sees."""
    rows, reached = rows.unflatten(1, (like.shape[1], -1)).any(2), torch.zeros_like(like)
    if rows.any():
        for tile in tiles:
            columns = torch.arange(tile.columns, device=rows.device)
            hit = _any_within(rows[:, :, tile.q_start : tile.q_stop], columns + tile.lo, columns + tile.hi)
            reached[:, :, tile.k_start : tile.k_stop] |= hit
    return reached


def _any_within(flags: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """[B, H, len(first)]: is one of ``flags[first : last + 1]`` set? Both ends may lie outside."""
    length = flags.shape[2]
    counts = torch.nn.functional.pad(flags.cumsum(2), (1, 0))
    return counts[:, :, (last + 1).clamp(0, length)] > counts[:, :, first.clamp(0, length)]


def _cleaned(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` with 0 in all of the rows [B, H, S] that hold a NaN or an infinity, and which these are."""
    bad = ~x.isfinite().all(-1)
    return x.masked_fill(bad.unsqueeze(-1), 0.0), bad
