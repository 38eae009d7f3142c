"""Torch's own flash kernels, tile by tile: the CPU's, and on a GPU cuDNN's and the memory-efficient ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..plan.tile import Tiles
from .aten_ops import AtenOps, Form
from .contract import accumulation_dtype, band_seen
from .merge import blank_output, merge_
from .pieces import Piece, cut
from .surrogate import Gradients, Share, shares
from .widths import check_width, same_width


@dataclass(frozen=True)
class Aten:
    """Kernel over one of torch's fused attentions, which offer full, causal (top-left) and additive masks.

    Plain, each piece of a tile is computed and rounded in the io dtype; with ``upcast`` in fp32.
    """

    ops: AtenOps
    upcast: bool = False

    @property
    def name(self) -> str:
        return f"{self.ops.name}-fp32" if self.upcast else self.ops.name

    continues: ClassVar[bool] = False

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return self.upcast or dtype == accumulation_dtype(dtype)

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        self.ops.check(device, dtype)
        check_width(self.name, max(head_dims), self.ops.widest)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        pieces = list(cut(tiles))
        value_dim = v.shape[-1]
        q, k, v = same_width(*(self._computed(x, q.dtype) for x in (q, k, v)), multiple=self.ops.multiple)
        if len(pieces) == 1 and _covers(pieces[0], q, k) and not pieces[0].masked:
            out, lse = self._run_forward(pieces[0], q, k, v, scale)
            return out[..., :value_dim], lse
        out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
        for piece in pieces:
            rows = slice(piece.q_start, piece.q_stop)
            merge_(out[:, :, rows], lse[:, :, rows], *self._run_forward(piece, q, k, v, scale))
        return out[..., :value_dim], lse

    def extend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, out: Tensor, lse: Tensor) -> None:
        raise NotImplementedError("merge what forward gives")

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        tiles: Tiles,
        scale: float,
        *,
        final: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        pieces = list(cut(tiles))
        dout, q, k, v = (self._computed(x, q.dtype, half=self.ops.half_backward) for x in (dout, q, k, v))
        # A row that no tile covers has lse -inf, and exp(-inf - -inf) is NaN; any finite lse gives it gradient 0.
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        calls = shares(dout, delta, widest=self.ops.widest)
        if len(calls) == len(pieces) == 1 and _covers(pieces[0], q, k):
            grads = self._run_backward(pieces[0], self._padded(calls[0], q, k, v), lse, scale)
            dq, dk, dv = (grad[..., : x.shape[-1]] for grad, x in zip(grads, (q, k, v), strict=True))
            return dq, dk, dv
        sums = Gradients(q, k, v)
        for share in calls:
            inputs = self._padded(share, q, k, v)
            for piece in pieces:
                rows, columns = slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop)
                sums.add(self._run_backward(piece, inputs, lse, scale), rows, columns, share)
        return sums.dq, sums.dk, sums.dv

    def _padded(self, share: Share, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """dout, q, k, v, out."""
        values = v if share.values else torch.zeros_like(v)
        return same_width(share.dout, q, k, values, share.out, multiple=self.ops.multiple)

    def _computed(self, x: Tensor, dtype: torch.dtype, half: torch.dtype | None = None) -> Tensor:
        if self.upcast:
            return x.to(accumulation_dtype(dtype))
        return x.to(half) if half is not None and dtype == torch.float16 else x

    def _run_forward(self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q = _slice(q, piece.q_start, piece.q_stop, piece.reverse)
        k, v = (_slice(x, piece.k_start, piece.k_stop, piece.reverse) for x in (k, v))
        mask = _additive_mask(piece, q)
        out, lse = self.ops.forward(q, k, v, Form(mask, piece.causal, scale))
        if mask is not None:  # what a row that sees nothing here gets differs from kernel to kernel
            blind = (mask == -math.inf).all(-1)
            out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -math.inf)
        return (out.flip(2), lse.flip(2)) if piece.reverse else (out, lse)

    def _run_backward(self, piece: Piece, inputs: tuple[Tensor, ...], lse: Tensor, scale: float) -> tuple[Tensor, ...]:
        dout, q, k, v, out = inputs
        dout, q, out, lse = (_slice(x, piece.q_start, piece.q_stop, piece.reverse) for x in (dout, q, out, lse))
        k, v = (_slice(x, piece.k_start, piece.k_stop, piece.reverse) for x in (k, v))
        mask = _additive_mask(piece, q)
        grads = self.ops.backward(dout, q, k, v, out, lse, Form(mask, piece.causal, scale))
        return tuple(x.flip(2) for x in grads) if piece.reverse else grads


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
