"""Torch's fused attention kernels, tile by tile: flash on the CPU, cuDNN and memory-efficient on GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.tile import Tiles
from .aten_ops import AtenOps, MaskAndScale
from .contract import band_seen
from .pieces import Piece, split_into_pieces
from .precision import accumulation_dtype, converted
from .stock import Stock


@dataclass(frozen=True)
class Aten(Stock[Piece]):
    """Kernel over one of torch's fused attentions, which support full, causal (top-left) and additive masks.

    By default, each piece of a tile is computed and rounded in the io dtype; with ``upcast``, in fp32.
    """

    ops: AtenOps
    upcast: bool = False

    @property
    def name(self) -> str:
        return f"{self.ops.name}-fp32" if self.upcast else self.ops.name

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return self.upcast or dtype == accumulation_dtype(dtype)

    def launches(self, tiles: Tiles) -> Iterable[Piece]:
        return split_into_pieces(tiles)

    def leaves_rows_blind(self, launch: Piece) -> bool:
        return bool(launch.masked)

    def computed(self, x: Tensor, *, backward: bool) -> Tensor:
        if self.upcast:
            return converted(x, accumulation_dtype(x.dtype))
        return converted(x, self.ops.backward_dtype(x.dtype)) if backward else x

    def run_forward(self, launch: Piece, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q = _slice(q, launch.q_start, launch.q_stop, launch.reverse)
        k, v = (_slice(x, launch.k_start, launch.k_stop, launch.reverse) for x in (k, v))
        mask = _additive_mask(launch, q)
        out, lse = self.ops.forward(q, k, v, MaskAndScale(mask, launch.causal, scale))
        if mask is not None:  # for a row that sees nothing, kernels return different values
            blind = (mask == -math.inf).all(-1)
            out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -math.inf)
        return (out.flip(2), lse.flip(2)) if launch.reverse else (out, lse)

    def run_backward(
        self, launch: Piece, inputs: tuple[Tensor, ...], lse: Tensor, scale: float, *, delta: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        dout, q, k, v, out = inputs
        dout, q, out, lse = (_slice(x, launch.q_start, launch.q_stop, launch.reverse) for x in (dout, q, out, lse))
        k, v = (_slice(x, launch.k_start, launch.k_stop, launch.reverse) for x in (k, v))
        mask = _additive_mask(launch, q)
        grads = self.ops.backward(dout, q, k, v, out, lse, MaskAndScale(mask, launch.causal, scale))
        return tuple(x.flip(2) for x in grads) if launch.reverse else grads


def _slice(x: Tensor, start: int, stop: int, reverse: bool) -> Tensor:
    return x[:, :, start:stop].flip(2) if reverse else x[:, :, start:stop]


def _additive_mask(piece: Piece, like: Tensor) -> Tensor | None:
    """Return [1, 1, rows, columns] of 0 and -inf in the inputs' dtype. The kernel silently misreads other dtypes."""
    if not piece.masked:
        return None
    rows, columns = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
    mask = torch.full((rows, columns), -math.inf, dtype=like.dtype, device=like.device)
    for tile in piece.masked:
        seen = band_seen(tile, mask.device)
        top, left = tile.q_start - piece.q_start, tile.k_start - piece.k_start
        mask[top : top + tile.rows, left : left + tile.columns].masked_fill_(seen, 0.0)
    return mask[None, None]
