"""The eager reference kernel, which specifies the results: any device and dtype, summed in fp32 (fp64 for fp64)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import BackwardInputs, band_seen
from .merge import blank_output, merge_
from .nan_policy import contained_backward, contained_forward
from .precision import accumulation_dtype


class Reference:
    """Kernel that materializes each tile's probabilities."""

    name = "reference"

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return True

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        """Accept everything."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        return contained_forward(partial(_forward, tiles=tiles, scale=scale), q, k, v, tiles)

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        return contained_backward(_backward, inputs)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
    for tile in tiles:
        queries, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        scores = _scores(q[:, :, queries], k[:, :, keys], tile, scale)
        tile_lse = torch.logsumexp(scores, -1)
        part = torch.softmax(scores, -1) @ _grouped(v[:, :, keys])
        merge_(out[:, :, queries], lse[:, :, queries], part.flatten(1, 2), tile_lse.flatten(1, 2))
    return out, lse


def _backward(inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    for tile in inputs.tiles:
        queries, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        of_rows = (inputs.lse, inputs.delta, inputs.dout)
        lse, delta, d = (x[:, :, queries].to(wide).unflatten(1, heads) for x in of_rows)
        p = torch.exp(_scores(q[:, :, queries], k[:, :, keys], tile, scale) - lse.unsqueeze(-1))
        ds = p * (d @ _grouped(v[:, :, keys]).mT - delta.unsqueeze(-1)) * scale
        dq[:, :, queries] += (ds @ _grouped(k[:, :, keys])).flatten(1, 2)
        dk[:, :, keys] += (ds.mT @ q[:, :, queries].to(wide).unflatten(1, heads)).sum(2)
        dv[:, :, keys] += (p.mT @ d).sum(2)
    return dq, dk, dv


def _grouped(x: Tensor) -> Tensor:
    """Convert to [B, Hkv, 1, S, D] in the accumulation dtype, to broadcast over a group's query heads."""
    return x.to(accumulation_dtype(x.dtype)).unsqueeze(2)


def _scores(q: Tensor, k: Tensor, tile: Tile, scale: float) -> Tensor:
    """Return scale q k' [B, Hkv, Hq / Hkv, rows, columns], with -inf outside the band."""
    groups = q.to(accumulation_dtype(q.dtype)).unflatten(1, (k.shape[1], -1))
    scores = groups @ _grouped(k).mT * scale
    if tile.full:
        return scores
    return scores.masked_fill_(~band_seen(tile, q.device), -math.inf)
