"""Attention of queries that every rank has, over keys that are dealt over the ranks: decoding.

    each rank:  o_r, l_r = attention(Q, K_r, V_r)    over its own keys, one launch for all heads
    exchange:   each rank sends (o_r, l_r) to all others; the size depends on the queries alone
    each rank:  (O, L) = merge of all (o_r, l_r) in the order of ranks, so all ranks get equal bits

The bytes that a rank sends are ``(W - 1) B Hq Sq (Dv + 1)`` numbers in fp32 (fp64 for fp64), for any number of keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.transport import Transport
from ..kernels import choose
from ..kernels.contract import Kernel, accumulation_dtype, blank_output, converted, merge_
from ..kernels.stock import Stock
from ..plan.tile import Tiles
from .passes import with_sinks


@dataclass(frozen=True, eq=False)
class Seen:
    """Keys of this rank that some rows of a batch see; ``tiles`` count queries from 0, keys from ``keys.start``."""

    rows: slice
    keys: slice
    tiles: Tiles
    whole: bool = False  # whether every query sees every key


def attend_dealt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Sequence[Seen],
    transport: Transport,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    label: str = "decoding",
) -> Tensor:
    """Compute exact attention of the same queries on every rank, over the keys of all ranks. Every rank must call it.

    q [B, Hq, Sq, D] is equal on all ranks; k, v [B, Hkv, S_own, ...] are this rank's, ``seen`` in the order of keys.
    Returns [B, Hq, Sq, Dv] in q's dtype, with equal bits on all ranks; 0 for a query that sees no key. The ranks don't
    compare their arguments: the caller agrees on a whole step of the model before.
    """
    try:  # not by a context manager: this runs in each layer for each token
        dims, device = (q.shape[3], v.shape[3]), q.device
        kernel = choose("auto", device=device, dtype=q.dtype, head_dims=dims, softcap=softcap)
        scale = 1 / math.sqrt(dims[0]) if scale is None else float(scale)
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                out, lse = _partial(q, k, v, seen, kernel, scale)
        else:
            out, lse = _partial(q, k, v, seen, kernel, scale)
    except BaseException as error:
        transport.health.fail(label, error)
        raise
    if transport.world > 1:
        out, lse = _merged(torch.cat([out, lse.unsqueeze(-1)], -1), transport, label)
    if sinks is not None:
        out, _ = with_sinks(out, lse, sinks)
    return out if out.dtype == q.dtype else out.to(q.dtype)


def dealt_bytes(*, world: int, batch: int, queries: int, q_heads: int, v_head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that a rank sends in one call of :func:`attend_dealt`."""
    return (world - 1) * batch * q_heads * queries * (v_head_dim + 1) * accumulation_dtype(dtype).itemsize


def _partial(
    q: Tensor, k: Tensor, v: Tensor, seen: Sequence[Seen], kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor]:
    """Return this rank's (out, lse)."""
    dtype = accumulation_dtype(q.dtype)
    if len(seen) == 1 and seen[0].rows == slice(0, q.shape[0]):
        only = seen[0]
        if only.keys != slice(0, k.shape[2]):
            k, v = k[:, :, only.keys], v[:, :, only.keys]
        if only.whole and isinstance(kernel, Stock):
            out, lse = kernel.forward_whole(q, k, v, scale)
        else:
            out, lse = kernel.forward(q, k, v, only.tiles, scale)
        return converted(out, dtype), lse
    out, lse = blank_output(q, v, q.shape[2], dtype)
    for part in seen:
        keys, values = (x[part.rows, :, part.keys] for x in (k, v))
        part_out, part_lse = kernel.forward(q[part.rows], keys, values, part.tiles, scale)
        merge_(out[part.rows], lse[part.rows], part_out, part_lse)
    return out, lse


def _merged(own: Tensor, transport: Transport, label: str) -> tuple[Tensor, Tensor]:
    """Exchange the parts of all ranks; return their merged (out, lse)."""
    parts = transport.all_to_all([own] * transport.world, [len(own)] * transport.world, label=label)
    out, lse = parts[0][..., :-1].clone(), parts[0][..., -1].clone()
    for part in parts[1:]:
        merge_(out, lse, part[..., :-1], part[..., -1])
    return out, lse
