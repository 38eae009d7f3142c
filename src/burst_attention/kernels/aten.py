"""Torch's own CPU flash kernels, tile by tile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan.tile import Tiles
from .contract import DTYPES, accumulation_dtype, band_seen
from .merge import blank_output, merge_
from .pieces import Piece, cut
from .surrogate import appended_columns, surrogate_output

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Aten:
    """Kernel over ``_scaled_dot_product_flash_attention_for_cpu`` (FlashAttention-2's algorithm, arXiv 2307.08691).

    Plain, each piece of a tile is computed and rounded in the io dtype; with ``upcast`` in fp32.
    """

    upcast: bool = False

    @property
    def name(self) -> str:
        return "aten-fp32" if self.upcast else "aten"

    continues: ClassVar[bool] = False

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return self.upcast or dtype == accumulation_dtype(dtype)

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu":
            raise ValueError(f"kernel={self.name!r} runs on cpu, the tensors are on {device}; use kernel='reference'")
        if dtype not in DTYPES:
            raise ValueError(f"kernel={self.name!r} does not take {dtype}; use one of {', '.join(map(str, DTYPES))}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        pieces = list(cut(tiles))
        value_dim = v.shape[-1]
        q, k, v = _same_width(*(self._computed(x, q.dtype) for x in (q, k, v)))
        if len(pieces) == 1 and _covers(pieces[0], q, k) and not pieces[0].masked:
            out, lse = _run_forward(pieces[0], q, k, v, scale)
            return out[..., :value_dim], lse
        out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
        for piece in pieces:
            rows = slice(piece.q_start, piece.q_stop)
            merge_(out[:, :, rows], lse[:, :, rows], *_run_forward(piece, q, k, v, scale))
        return out[..., :value_dim], lse

    def extend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, out: Tensor, lse: Tensor) -> None:
        raise NotImplementedError("merge what forward gives")

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        pieces = list(cut(tiles))
        dims = q.shape[-1], k.shape[-1], v.shape[-1]
        # The fp16 backward is an order of magnitude slower than the fp32 one.
        dout, q, k, v = (self._computed(x, q.dtype, half=torch.float32) for x in (dout, q, k, v))
        out = surrogate_output(dout, delta)
        if out is None:
            dout, out = appended_columns(dout, delta)
        q, k, v, dout, out = _same_width(q, k, v, dout, out)
        # A row that no tile covers has lse -inf, and exp(-inf - -inf) is NaN; any finite lse gives it gradient 0.
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        inputs = (dout, q, k, v, out, lse)
        if len(pieces) == 1 and _covers(pieces[0], q, k):
            grads = _run_backward(pieces[0], *inputs, scale)
        else:
            wide = accumulation_dtype(q.dtype)
            grads = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
            for piece in pieces:
                rows, columns = slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop)
                parts = _run_backward(piece, *inputs, scale)
                for grad, part, where in zip(grads, parts, (rows, columns, columns), strict=True):
                    grad[:, :, where] += part
        dq, dk, dv = (grad[..., :dim] for grad, dim in zip(grads, dims, strict=True))
        return dq, dk, dv

    def _computed(self, x: Tensor, dtype: torch.dtype, half: torch.dtype | None = None) -> Tensor:
        if self.upcast:
            return x.to(accumulation_dtype(dtype))
        return x.to(half) if half is not None and dtype == torch.float16 else x


def _same_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Zero-pad the last dims to one width: the kernel wants D == Dv, and zeros change neither scores nor outputs."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors)


def _covers(piece: Piece, q: Tensor, k: Tensor) -> bool:
    return (piece.q_start, piece.q_stop, piece.k_start, piece.k_stop) == (0, q.shape[2], 0, k.shape[2])


def _slice(x: Tensor, start: int, stop: int, reverse: bool) -> Tensor:
    return x[:, :, start:stop].flip(2) if reverse else x[:, :, start:stop]


def _additive_mask(piece: Piece, like: Tensor) -> Tensor | None:
    """[1, 1, rows, columns] of 0 and -inf in the inputs' dtype: the kernel misreads any other without a word."""
    if not piece.masked:
        return None
    rows, columns = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
    mask = torch.full((rows, columns), -math.inf, dtype=like.dtype, device=like.device)
    for tile in piece.masked:
        seen = band_seen(tile, mask.device)
        top, left = tile.q_start - piece.q_start, tile.k_start - piece.k_start
        mask[top : top + tile.rows, left : left + tile.columns].masked_fill_(seen, 0.0)
    return mask[None, None]


def _run_forward(piece: Piece, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q = _slice(q, piece.q_start, piece.q_stop, piece.reverse)
    k, v = (_slice(x, piece.k_start, piece.k_stop, piece.reverse) for x in (k, v))
    mask = _additive_mask(piece, q)
    out, lse = _forward(q, k, v, 0.0, piece.causal, attn_mask=mask, scale=scale)
    if mask is not None:  # the kernel gives a row that sees nothing here lse 0
        lse = lse.masked_fill((mask == -math.inf).all(-1), -math.inf)
    return (out.flip(2), lse.flip(2)) if piece.reverse else (out, lse)


def _run_backward(
    piece: Piece, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    dout, q, out, lse = (_slice(x, piece.q_start, piece.q_stop, piece.reverse) for x in (dout, q, out, lse))
    k, v = (_slice(x, piece.k_start, piece.k_stop, piece.reverse) for x in (k, v))
    mask = _additive_mask(piece, q)
    grads = _backward(dout, q, k, v, out, lse, 0.0, piece.causal, attn_mask=mask, scale=scale)
    return tuple(x.flip(2) for x in grads) if piece.reverse else grads
