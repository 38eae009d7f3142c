"""Torch's fused attention kernels, piece by piece: flash on the CPU, cuDNN and memory-efficient on GPUs.

Tiles are cut into shapes that they support: full, top-left causal and small masked rectangles. A window costs about
what it covers, and thousands of tiny documents need few launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan.tile import Tile, Tiles
from .contract import DTYPES, WIDEST, accumulation_dtype, band_seen, converted, no_dropout
from .stock import Ops, Piece, Stock, StockInputs, cudnn_gives_nan

SMALL = 256  # up to this many rows and columns, a masked rectangle is cheaper than several launches


def split_into_pieces(tiles: Tiles) -> Iterator[Piece]:
    """Cut tiles into disjoint pieces that cover them."""
    small: list[Tile] = []
    if len(tiles) == 1 and _one_sided(only := next(iter(tiles))):
        yield from _cut_band(only)
        return
    for tile in tiles:
        if small and not _fits((*small, tile)):
            yield from _gathered(small)
            small = []
        if _fits((tile,)):
            small.append(tile)
        else:
            yield from _cut_band(tile)
    yield from _gathered(small)


def _hull(tiles: tuple[Tile, ...]) -> tuple[int, int, int, int]:
    starts = min(t.q_start for t in tiles), min(t.k_start for t in tiles)
    stops = max(t.q_stop for t in tiles), max(t.k_stop for t in tiles)
    return starts[0], stops[0], starts[1], stops[1]


def _fits(tiles: tuple[Tile, ...]) -> bool:
    q_start, q_stop, k_start, k_stop = _hull(tiles)
    return q_stop - q_start <= SMALL and k_stop - k_start <= SMALL


def _gathered(small: list[Tile]) -> Iterator[Piece]:
    if len(small) == 1 and _one_sided(small[0]):
        yield from _cut_band(small[0])
    elif small:
        yield _masked(*small)


def _cut_band(tile: Tile) -> Iterator[Piece]:
    corners = (tile.q_start, tile.q_stop, tile.k_start, tile.k_stop)
    if tile.full:
        yield Piece(*corners)
    elif not tile.bounded_below:
        # Every row sees the first -lo columns. The causal triangle starts after them.
        edge = tile.k_start - tile.lo
        if edge > tile.k_start:
            yield Piece(tile.q_start, tile.q_stop, tile.k_start, edge)
        yield Piece(tile.q_start, tile.q_stop, edge, tile.k_stop, causal=True)
    elif not tile.bounded_above:
        # The mirror image: every row sees the last columns, and the triangle ends before them.
        edge = tile.k_stop - (tile.hi - (tile.rows - tile.columns))
        if edge < tile.k_stop:
            yield Piece(tile.q_start, tile.q_stop, edge, tile.k_stop)
        yield Piece(tile.q_start, tile.q_stop, tile.k_start, edge, causal=True, reverse=True)
    else:
        yield from _cut_window(tile)


def _cut_window(tile: Tile) -> Iterator[Piece]:
    """Cut a band limited on both sides into row blocks: masked rectangles or, for wide bands, two triangles each."""
    width = tile.hi - tile.lo + 1
    height = width if width >= SMALL else SMALL // 2
    for top in range(0, tile.rows, height):
        rows = (top, min(top + height, tile.rows))
        edge = min(max(0, top - tile.lo + 1), tile.columns)  # first column that the block's first row does not see
        halves = [(0, edge), (edge, tile.columns)] if width >= SMALL else [(0, tile.columns)]
        for columns in halves:
            part = tile.part(rows, columns)
            if part is not None:
                yield from _cut_band(part) if _one_sided(part) else [_masked(part)]


def _one_sided(tile: Tile) -> bool:
    return not (tile.bounded_below and tile.bounded_above)


def _masked(*tiles: Tile) -> Piece:
    return Piece(*_hull(tiles), masked=tiles)


@dataclass(frozen=True)
class Aten(Stock[Piece]):
    """Kernel over a fused attention of torch. Pieces are computed in the io dtype, or with ``upcast`` in fp32."""

    upcast: bool = False

    @property
    def name(self) -> str:
        return f"{self.ops.name}-fp32" if self.upcast else self.ops.name

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return self.upcast or dtype == accumulation_dtype(dtype)

    def launches(self, tiles: Tiles) -> Iterable[Piece]:
        return split_into_pieces(tiles)

    def forward_whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if self.upcast or q.shape[3] % self.ops.multiple or q.shape[3] != v.shape[3]:
            return super().forward_whole(q, k, v, scale)
        return self.ops.forward(q, k, v, Seen(None, False), scale)  # each layer calls it for each token

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
        out, lse = self.ops.forward(q, k, v, Seen(mask, launch.causal), scale)
        if mask is not None:  # for a row that sees nothing, kernels return different values
            blind = (mask == -math.inf).all(-1)
            out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -math.inf)
        return (out.flip(2), lse.flip(2)) if launch.reverse else (out, lse)

    def run_backward(self, launch: Piece, x: StockInputs, scale: float) -> tuple[Tensor, ...]:
        rows = (_slice(each, launch.q_start, launch.q_stop, launch.reverse) for each in (x.dout, x.q, x.out, x.lse))
        k, v = (_slice(each, launch.k_start, launch.k_stop, launch.reverse) for each in (x.k, x.v))
        dout, q, out, lse = rows
        mask = _additive_mask(launch, q)
        grads = self.ops.backward(StockInputs(dout, q, k, v, out, lse), Seen(mask, launch.causal), scale)
        return tuple(grad.flip(2) for grad in grads) if launch.reverse else grads


def _slice(x: Tensor, start: int, stop: int, reverse: bool) -> Tensor:
    x = x if stop - start == x.shape[2] else x[:, :, start:stop]
    return x.flip(2) if reverse else x


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


_aten = torch.ops.aten


class Seen(NamedTuple):
    """Everything is visible, unless ``causal`` (top left) or ``mask`` [1, 1, rows, columns] (added) is set."""

    mask: Tensor | None
    causal: bool


def has_bf16_products() -> bool:
    """Return whether torch multiplies bf16 matrices on this CPU by oneDNN; otherwise plain loops do in a backward."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class CpuFlash(Ops):
    """``_scaled_dot_product_flash_attention_for_cpu`` (FlashAttention-2's algorithm, arXiv 2307.08691)."""

    name = "aten"
    multiple = 1

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu":
            raise ValueError(f"kernel='aten' runs on cpu, the tensors are on {device}; use kernel='aten-flash'")
        if dtype not in DTYPES:
            raise ValueError(f"kernel='aten' does not take {dtype}; use one of {', '.join(map(str, DTYPES))}")

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Avoid half precision where its products are slow: fp16 everywhere, bf16 without AVX-512."""
        slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bf16_products())
        return torch.float32 if slow else dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(  # torch.ops looks its overloads up in Python
            q, k, v, 0.0, seen.causal, attn_mask=seen.mask, scale=scale
        )
        return out, lse

    def backward(self, x: StockInputs, seen: Seen, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *x[:6], 0.0, seen.causal, attn_mask=seen.mask, scale=scale
        )
        return dq, dk, dv


@dataclass(frozen=True)
class Cudnn(Ops):
    """``_scaled_dot_product_cudnn_attention``: its lse is [B, H, Sq, 1].

    It needs dO and out in the same memory order. :class:`Efficient` computes the launches that it does wrong.
    """

    name = "aten-cudnn"
    widest = 128

    def takes(self, q: Tensor, k: Tensor) -> bool:
        """Return whether cuDNN computes this launch, as a forward and as a backward."""
        return not cudnn_gives_nan(q.shape[2], k.shape[2], torch.backends.cudnn.version())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        if not self.takes(q, k):
            return Efficient().forward(q, k, v, seen, scale)
        k, v = (_repeated(x, q) for x in (k, v))
        mask = _aligned(seen.mask, q, heads=1)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, mask, True, 0.0, seen.causal, False, scale=scale
        )
        return out, lse.squeeze(-1) if lse.ndim == 4 else lse

    def backward(self, x: StockInputs, seen: Seen, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = x.q, x.k, x.v
        if not self.takes(q, k):
            return Efficient().backward(x, seen, scale)
        heads, mask = k.shape[1], _aligned(seen.mask, q, heads=1)
        dout, out, lse = x.dout.contiguous(), x.out.contiguous(), x.lse.contiguous().unsqueeze(-1)
        inputs = (dout, q, _repeated(k, q), _repeated(v, q), out, lse)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            *inputs, *no_dropout(q), mask, *lengths, 0.0, seen.causal, scale=scale
        )
        return dq, _summed(dk, heads), _summed(dv, heads)


@dataclass(frozen=True)
class Efficient(Ops):
    """``_scaled_dot_product_efficient_attention``: pads the lse's rows to a multiple of 32. Supports fp32 too.

    Its backward assumes that ``out`` is [B, S, H, D] in memory and ignores its strides.
    """

    name = "aten-efficient"
    widest = WIDEST

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        super().check(device, torch.float16 if dtype == torch.float32 else dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (_repeated(x, q) for x in (k, v))
        mask = _aligned(seen.mask, q, heads=q.shape[1])
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, seen.causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    def backward(self, x: StockInputs, seen: Seen, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, heads, mask = x.q, x.k.shape[1], _aligned(seen.mask, x.q, heads=x.q.shape[1])
        padded = pad(x.lse, (0, -x.lse.shape[-1] % 32), value=math.inf).contiguous()  # lse inf gives P = 0 there
        out = x.out.transpose(1, 2).contiguous().transpose(1, 2)
        tail = (*no_dropout(q), 0.0, [True, True, True, False], seen.causal)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            x.dout, q, _repeated(x.k, q), _repeated(x.v, q), mask, out, padded, *tail, scale=scale
        )
        return dq, _summed(dk, heads), _summed(dv, heads)


def _aligned(mask: Tensor | None, q: Tensor, *, heads: int) -> Tensor | None:
    """Return the mask as [B, heads, rows, columns] with rows aligned to 16 bytes, as GPU kernels require."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    return pad(mask, (0, -columns % 8))[..., :columns].expand(q.shape[0], heads, -1, -1)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key-value heads to the number of query heads."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Reduce the gradient of :func:`_repeated` to ``heads`` key-value heads, summed in fp32."""
    return gradient if gradient.shape[1] == heads else gradient.float().unflatten(1, (heads, -1)).sum(2)
