"""Contain non-finite values (NaN, inf): only rows that see one get NaN.

Some kernels multiply masked entries by 0, and 0 * NaN is NaN. Others drop a NaN when they compute a maximum. We
therefore replace rows that have non-finite values by 0, run the kernel, and set NaN in the results according to the
bands. Calls with only finite values pay for the test, one sum per tensor.
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
    """Return whether a CPU tensor may contain NaN or inf. True also if a sum of finite numbers overflows.

    Tensors on other devices are not tested, because the host would have to wait for the result.
    """
    # Sums of fp16 numbers overflow easily, so sum them in fp32.
    return any(
        x.is_cpu and not math.isfinite(x.sum(dtype=torch.float32 if x.dtype == torch.float16 else None))
        for x in tensors
    )


def contained_forward(run: RunForward, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of ``run(q, k, v)``, with NaN in the rows that non-finite inputs affect.

    lse is NaN in rows whose query is non-finite or that see a non-finite key. out is NaN in these rows and in rows that
    see a non-finite value. Other rows are not affected.
    """
    if not suspected(q, k, v):
        return run(q, k, v)
    (q, bad_q), (k, bad_k), (v, bad_v) = (_cleaned(x) for x in (q, k, v))
    out, lse = run(q, k, v)
    lost = (bad_q & (lse != -math.inf)) | rows_that_see(bad_k, tiles, like=bad_q)
    out = out.masked_fill((lost | rows_that_see(bad_v, tiles, like=bad_q)).unsqueeze(-1), math.nan)
    return out, lse.masked_fill(lost, math.nan)


def contained_backward(run: RunBackward, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of ``run(inputs)``, with NaN where non-finite rows contribute.

    A row with non-finite probabilities or dO affects dq, dk and dv. A row where only D is non-finite, for example
    because a value is NaN, affects dq and dk.
    """
    # A row without a tile has lse -inf, and exp(-inf - -inf) is NaN. Any finite lse gives gradient 0.
    lse, tiles = inputs.lse.masked_fill(inputs.lse == -math.inf, 0.0), inputs.tiles
    tensors = (inputs.dout, inputs.q, inputs.k, inputs.v)
    # Some row sees each key here, and the forward set out to NaN in rows that see non-finite numbers.
    results = tensors if inputs.out is None else (inputs.dout, inputs.out)
    if not suspected(*results, lse, *([] if inputs.delta is None else [inputs.delta])):
        return run(replace(inputs, lse=lse))
    delta = inputs.row_delta()
    (dout, bad_dout), (q, bad_q), (k, bad_k), (v, bad_v) = (_cleaned(x) for x in tensors)
    lost = bad_dout | bad_q | ~lse.isfinite() | rows_that_see(bad_k, tiles, like=bad_q)
    no_delta = lost | ~delta.isfinite() | rows_that_see(bad_v, tiles, like=bad_q)
    dout, q = (x.masked_fill(lost.unsqueeze(-1), 0.0) for x in (dout, q))
    lse, delta = lse.masked_fill(lost, 0.0), delta.masked_fill(no_delta, 0.0)
    dq, dk, dv = run(replace(inputs, dout=dout, q=q, k=k, v=v, lse=lse, delta=delta, out=None))
    everything = torch.ones_like(bad_k)
    dq = dq.masked_fill((no_delta & rows_that_see(everything, tiles, like=bad_q)).unsqueeze(-1), math.nan)
    dk = dk.masked_fill(keys_seen_by(no_delta, tiles, like=bad_k).unsqueeze(-1), math.nan)
    dv = dv.masked_fill(keys_seen_by(lost, tiles, like=bad_k).unsqueeze(-1), math.nan)
    return dq, dk, dv


def rows_that_see(keys: Tensor, tiles: Tiles, *, like: Tensor) -> Tensor:
    """Return which rows, bool [B, Hq, Sq] as ``like``, see one of the ``keys``, bool [B, Hkv, Sk]."""
    keys, reached = keys.repeat_interleave(like.shape[1] // keys.shape[1], 1), torch.zeros_like(like)
    if keys.any():
        for tile in tiles:
            rows = torch.arange(tile.rows, device=keys.device)
            hit = _any_within(keys[:, :, tile.k_start : tile.k_stop], rows - tile.hi, rows - tile.lo)
            reached[:, :, tile.q_start : tile.q_stop] |= hit
    return reached


def keys_seen_by(rows: Tensor, tiles: Tiles, *, like: Tensor) -> Tensor:
    """Return which keys, bool [B, Hkv, Sk] as ``like``, are seen by one of the ``rows``, bool [B, Hq, Sq]."""
    rows, reached = rows.unflatten(1, (like.shape[1], -1)).any(2), torch.zeros_like(like)
    if rows.any():
        for tile in tiles:
            columns = torch.arange(tile.columns, device=rows.device)
            hit = _any_within(rows[:, :, tile.q_start : tile.q_stop], columns + tile.lo, columns + tile.hi)
            reached[:, :, tile.k_start : tile.k_stop] |= hit
    return reached


def _any_within(flags: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return [B, H, len(first)]: whether one of ``flags[first : last + 1]`` is set. Ends may be out of range."""
    length = flags.shape[2]
    counts = torch.nn.functional.pad(flags.cumsum(2), (1, 0))
    return counts[:, :, (last + 1).clamp(0, length)] > counts[:, :, first.clamp(0, length)]


def _cleaned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` with its non-finite rows set to 0, and a bool [B, H, S] that marks these rows."""
    bad = ~x.isfinite().all(-1)
    return x.masked_fill(bad.unsqueeze(-1), 0.0), bad
