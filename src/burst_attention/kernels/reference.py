"""The eager reference kernel, which specifies the results: any device and dtype, summed in fp32 (fp64 for fp64)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import BackwardInputs, Kernel, accumulation_dtype, band_seen, blank_output, merge_

BLOCK = 512  # rows and columns of a block: its scores fit a core's cache


@dataclass(frozen=True)
class Reference(Kernel):
    """Kernel that materializes the probabilities of each tile, or of blocks; scores are capped at ``softcap``."""

    softcap: float | None = None
    block: int | None = None

    @property
    def name(self) -> str:
        return "reference" if self.block is None else "blockwise"

    def capped(self, softcap: float) -> Reference:
        return replace(self, softcap=softcap)

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return True

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        """Accept everything."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
        for tile in self._parts(tiles):
            queries, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
            scores, _ = _scores(q[:, :, queries], k[:, :, keys], tile, scale, self.softcap)
            tile_lse = torch.logsumexp(scores, -1)
            part = torch.softmax(scores, -1) @ _grouped(v[:, :, keys])
            merge_(out[:, :, queries], lse[:, :, queries], part.flatten(1, 2), tile_lse.flatten(1, 2))
        return out, lse

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
        wide = accumulation_dtype(q.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
        heads = (k.shape[1], q.shape[1] // k.shape[1])
        of_rows = (inputs.lse, inputs.row_delta(), inputs.dout)
        for tile in self._parts(inputs.tiles):
            queries, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
            lse, delta, d = (x[:, :, queries].to(wide).unflatten(1, heads) for x in of_rows)
            scores, slope = _scores(q[:, :, queries], k[:, :, keys], tile, scale, self.softcap)
            p = torch.exp(scores - lse.unsqueeze(-1))
            ds = p * (d @ _grouped(v[:, :, keys]).mT - delta.unsqueeze(-1)) * scale * slope
            dq[:, :, queries] += (ds @ _grouped(k[:, :, keys])).flatten(1, 2)
            dk[:, :, keys] += (ds.mT @ q[:, :, queries].to(wide).unflatten(1, heads)).sum(2)
            dv[:, :, keys] += (p.mT @ d).sum(2)
        return dq, dk, dv

    def _parts(self, tiles: Tiles) -> Iterator[Tile]:
        """Yield the tiles, cut into blocks."""
        if self.block is None:
            yield from tiles
            return
        for tile in tiles:
            for row, column in product(range(0, tile.rows, self.block), range(0, tile.columns, self.block)):
                rows = row, min(row + self.block, tile.rows)
                columns = column, min(column + self.block, tile.columns)
                if (part := tile.part(rows, columns)) is not None:
                    yield part


def _grouped(x: Tensor) -> Tensor:
    """Convert to [B, Hkv, 1, S, D] in the accumulation dtype, to broadcast over a group's query heads."""
    return x.to(accumulation_dtype(x.dtype)).unsqueeze(2)


def _scores(q: Tensor, k: Tensor, tile: Tile, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """Return scale q k' [B, Hkv, Hq / Hkv, rows, columns], capped, with -inf outside the band; and the cap's slope."""
    groups = q.to(accumulation_dtype(q.dtype)).unflatten(1, (k.shape[1], -1))
    scores = groups @ _grouped(k).mT * scale
    slope: Tensor | float = 1.0
    if softcap is not None:
        part = torch.tanh_(scores.div_(softcap))
        scores, slope = part * softcap, 1 - part.square()
    if not tile.full:
        scores.masked_fill_(~band_seen(tile, q.device), -math.inf)
    return scores, slope
