"""Attention of queries that every rank has, over keys that are dealt over the ranks: decoding.

    each rank:  o_r, l_r = attention(Q, K_r, V_r)    over its own keys, one launch for all heads
    exchange:   each rank sends (o_r, l_r) to all others; the size depends on the queries alone
    each rank:  (O, L) = merge of all (o_r, l_r) in the order of ranks, so all ranks get equal bits

The bytes that a rank sends are ``(W - 1) B Hq Sq (Dv + 1)`` numbers in fp32 (fp64 for fp64), for any number of keys.

Where an indexer chooses keys, ranks first exchange their best candidates: ``(W - 1) B Sq count`` numbers of 8 bytes
(for blocks of keys, for each head). All ranks then make the same choice. Each attends to the chosen keys that it holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..comm.transport import Transport
from ..kernels import choose, chosen
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


def rows_held(indices: Tensor, places: Tensor) -> Tensor:
    """Return which keys of this rank each query chose: int64 [B, C, Sq, count], -1 for none; C is 1 or Hkv.

    Args:
        indices: [B, Sq, count] or [B, Hkv, Sq, count], positions, negative for none.
        places: int64 [S_own], of this rank's keys, ascending.
    """
    wanted = (indices.unsqueeze(1) if indices.dim() == 3 else indices).long()
    if not len(places):
        return torch.full_like(wanted, -1)
    at = torch.searchsorted(places, wanted).clamp_(max=len(places) - 1)
    return at.masked_fill_(places[at] != wanted, -1)


def choose_dealt(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    places: Tensor,
    seen: Sequence[Seen],
    transport: Transport,
    *,
    count: int,
    scale: float = 1.0,
    size: int = 0,
    local: int = 0,
    first: int = 0,
    label: str = "choosing",
) -> Tensor:
    """Choose each query's best keys among those of all ranks. Every rank must call it.

    Args:
        q: [B, H, Sq, D], an indexer's queries of positions from ``first`` on, equal on all ranks; ``weights`` [B, H,
            Sq], too, or None to choose blocks of ``size`` keys, the last ``local`` ones always.
        k: [B, 1, S_own, D], keys of this rank, at positions ``places``, int64 [S_own]; ``seen`` in the order of keys.

    Returns:
        What :func:`.chosen.choose_keys` returns, or :func:`.chosen.choose_blocks`, equal on all ranks.
    """
    sizes = (q.shape[0], 1 if weights is not None else q.shape[1], q.shape[2], count)
    parts = [q.new_empty(sizes, dtype=torch.int64) for _ in range(transport.world)]
    expected = transport.expect(parts, label=label)
    try:
        asked, found = torch.arange(first, first + q.shape[2]), parts[transport.rank].fill_(chosen.NONE)
        for part in seen:
            queries, keys, at = q[part.rows], k[part.rows, :, part.keys], places[part.keys]
            if weights is None:
                each = chosen.choose_blocks(queries, keys, asked.to(q.device), at, part.tiles, count, size, local)
            else:
                pick = chosen.choose_of_one if q.shape[2] == 1 else chosen.choose
                each = pick(queries, keys, weights[part.rows].float(), at, part.tiles, count, scale)
            chosen.join_(found[part.rows], each, distinct=not size)
    except BaseException as error:
        transport.health.fail(label, error)
        raise
    if transport.world > 1:
        transport.gather(expected, found)
        found = parts[0].clone()
        for each in parts[1:]:
            chosen.join_(found, each, distinct=not size)
    positions = chosen.positions_of(found)
    return chosen.keys_of(positions, size) if size else positions[:, 0]


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
    among: Tensor | None = None,
    up: Tensor | None = None,
    label: str = "decoding",
) -> Tensor:
    """Compute exact attention of the same queries on every rank, over the keys of all ranks. Every rank must call it.

    q [B, Hq, Sq, D] is equal on all ranks; k, v [B, Hkv, S_own, ...] are this rank's, ``seen`` in the order of keys.
    ``among``, of :func:`rows_held`: attend to these keys alone. ``up`` [Hq, Dv, N] multiplies a rank's sum of values,
    before it is sent. Returns [B, Hq, Sq, Dv or N] in q's dtype, with equal bits on all ranks; 0 for a query that sees
    no key. The ranks don't compare their arguments: the caller agrees on a whole step of the model before.
    """
    if among is not None and softcap is not None:
        raise ValueError(f"softcap={softcap} is not supported where an indexer chooses keys; leave it out")
    sizes = (*q.shape[:3], (v if up is None else up).shape[-1] + 1)
    parts = [q.new_empty(sizes, dtype=accumulation_dtype(q.dtype)) for _ in range(transport.world)]
    expected = transport.expect(parts, label=label)
    try:  # not by a context manager: this runs in each layer for each token
        dims, device = (q.shape[3], v.shape[3]), q.device
        kernel = choose("auto", device=device, dtype=q.dtype, head_dims=dims, softcap=softcap)
        scale = 1 / math.sqrt(dims[0]) if scale is None else float(scale)
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                out, lse = _own_part(q, k, v, seen, kernel, scale, among, up)
        else:
            out, lse = _own_part(q, k, v, seen, kernel, scale, among, up)
        if transport.world > 1:
            parts[transport.rank] = torch.cat([out, lse.unsqueeze(-1)], -1)
    except BaseException as error:
        transport.health.fail(label, error)
        raise
    if transport.world > 1:
        transport.gather(expected, parts[transport.rank])
        out, lse = _merged(parts)
    if sinks is not None:
        out, _ = with_sinks(out, lse, sinks)
    return out if out.dtype == q.dtype else out.to(q.dtype)


def dealt_bytes(*, world: int, batch: int, queries: int, q_heads: int, v_head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that a rank sends in one call of :func:`attend_dealt`."""
    return (world - 1) * batch * q_heads * queries * (v_head_dim + 1) * accumulation_dtype(dtype).itemsize


def _own_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Sequence[Seen],
    kernel: Kernel,
    scale: float,
    among: Tensor | None,
    up: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return this rank's (out, lse), as it is sent."""
    if among is None:
        out, lse = _partial(q, k, v, seen, kernel, scale)
    else:
        out, lse = _partial_of_chosen(q, k, v, seen, kernel, scale, among)
    return (out if up is None else out @ up.to(out.dtype)), lse


def _partial(
    q: Tensor, k: Tensor, v: Tensor, seen: Sequence[Seen], kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor]:
    """Return this rank's (out, lse) of all keys."""
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


def _partial_of_chosen(
    q: Tensor, k: Tensor, v: Tensor, seen: Sequence[Seen], kernel: Kernel, scale: float, at: Tensor
) -> tuple[Tensor, Tensor]:
    """Return this rank's (out, lse) of chosen keys alone."""
    out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
    for part in seen:
        queries, keys, values = q[part.rows], k[part.rows, :, part.keys], v[part.rows, :, part.keys]
        own = chosen.seen_rows(at[part.rows] - part.keys.start, part.tiles)
        each = (
            _of_one_query(queries, keys, values, own, kernel, scale)
            if part.whole
            else chosen.forward(queries, keys, values, own, scale)
        )
        merge_(out[part.rows], lse[part.rows], *each)
    return out, lse


def _of_one_query(q: Tensor, k: Tensor, v: Tensor, at: Tensor, kernel: Kernel, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one query a row, [B, Hq, 1, ...], over the rows that each choice of heads takes."""
    out, lse = blank_output(q, v, 1, accumulation_dtype(q.dtype))
    for row, n in itertools.product(range(at.shape[0]), range(at.shape[1])):
        picked = at[row, n, 0]
        picked = picked[picked >= 0]
        if len(picked):
            own, theirs = (slice(n * x.shape[1] // at.shape[1], (n + 1) * x.shape[1] // at.shape[1]) for x in (q, k))
            keys, values = (x[row : row + 1, theirs].index_select(2, picked) for x in (k, v))
            tiles = Tiles(np.array([[0, 1, 0, len(picked), 1 - len(picked), 0]], np.int64))
            part_out, part_lse = kernel.forward(q[row : row + 1, own], keys, values, tiles, scale)
            out[row, own], lse[row, own] = part_out[0], part_lse[0]
    return out, lse


def _merged(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the merged (out, lse) of the parts of all ranks."""
    out, lse = parts[0][..., :-1].clone(), parts[0][..., -1].clone()
    for part in parts[1:]:
        merge_(out, lse, part[..., :-1], part[..., -1])
    return out, lse
