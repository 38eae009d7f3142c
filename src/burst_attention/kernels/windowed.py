"""Stock flash kernels with a window of keys per query: one launch per tile, for any band.

The kernels align the window to the bottom right corner of rows x columns: row i sees keys i + d - left to
i + d + right, with d = columns - rows. A tile's band lo <= i - j <= hi becomes left = hi + d and right = -lo - d.
Neither is negative, because every row and every column of a tile sees something. FlashAttention 2 reinterprets some
limits, so some tall tiles (more rows than columns) need a second launch:

- A limit of at least the number of keys counts as unlimited. A tall tile's right limit can be that large without
  covering all keys. Its rows that see the last key get a separate launch.
- An unlimited right side with a limited left side becomes a right limit equal to the number of keys. That is too small
  for the first rows of a tall tile. These rows see all keys and get a separate launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import WIDEST, no_dropout
from .stock import Ops, Stock, StockInputs

_aten = torch.ops.aten


class Window(NamedTuple):
    """Number of visible keys before and after a query's own position; None for no limit."""

    left: int | None
    right: int | None


def window_of(tile: Tile) -> Window:
    """Convert a tile's band to the kernels' window."""
    d = tile.columns - tile.rows
    return Window(tile.hi + d if tile.bounded_below else None, -tile.lo - d if tile.bounded_above else None)


def launches_of(tiles: Tiles) -> Iterator[Tile]:
    """Yield the tiles. Tall ones are cut into parts whose windows mean the same to every package."""
    for tile in tiles:
        right = window_of(tile).right
        sees_the_last_key = tile.columns - 1 + tile.lo if right is not None and right >= tile.columns else 0
        for part in _split_before(tile, sees_the_last_key):
            tall = part.rows > part.columns + 1 and part.bounded_below and not part.bounded_above
            yield from _split_before(part, part.hi + 1 if tall else 0)


def _split_before(tile: Tile, row: int) -> Iterator[Tile]:
    """Cut a tile before ``row``; yield the non-empty parts."""
    for rows in ((0, row), (row, tile.rows)):
        part = tile.part(rows, (0, tile.columns)) if rows[1] > rows[0] else None
        if part is not None:
            yield part


@dataclass(frozen=True)
class Windowed(Stock[Tile]):
    """Kernel over ops for [B, S, H, D] and a :class:`Window`. A tile's results are rounded, then summed in fp32."""

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return False

    def launches(self, tiles: Tiles) -> Iterable[Tile]:
        return launches_of(tiles)

    def capped(self, softcap: float) -> Windowed:
        return replace(self, ops=self.ops.capped(softcap))

    def run_backward(self, launch: Tile, x: StockInputs, scale: float) -> list[Tensor]:
        rows, columns = slice(launch.q_start, launch.q_stop), slice(launch.k_start, launch.k_stop)
        sides = (rows, rows, columns, columns, rows)
        dout, q, k, v, out = (_tokens_first(each, where) for each, where in zip(x[:5], sides, strict=True))
        lse, delta = x.lse[:, :, rows].contiguous(), None if x.delta is None else x.delta[:, :, rows].contiguous()
        grads = self.ops.backward(StockInputs(dout, q, k, v, out, lse, delta), window_of(launch), scale)
        return [grad.transpose(1, 2) for grad in grads]

    def run_forward(self, launch: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one launch; raise RuntimeError if the lse has another shape or dtype."""
        rows, columns = slice(launch.q_start, launch.q_stop), slice(launch.k_start, launch.k_stop)
        queries, keys, values = _tokens_first(q, rows), _tokens_first(k, columns), _tokens_first(v, columns)
        out, lse = self.ops.forward(queries, keys, values, window_of(launch), scale)
        expected = (q.shape[0], q.shape[1], launch.rows)
        if lse is None or tuple(lse.shape) != expected or lse.dtype != torch.float32:
            what = "no lse" if lse is None else f"an lse of shape {list(lse.shape)} in {lse.dtype}"
            raise RuntimeError(
                f"kernel={self.name!r} gave {what}, not {list(expected)} in torch.float32; its package's version "
                "is not supported; choose another kernel"
            )
        return out.transpose(1, 2), lse


def _tokens_first(x: Tensor, where: slice) -> Tensor:
    """Return the selected rows as [B, rows, H, D], with a dense last dim."""
    return x[:, :, where].transpose(1, 2)


@dataclass(frozen=True)
class CudaFlash(Ops):
    """Torch's FlashAttention-2. Its dQ has no fixed order unless ``torch.use_deterministic_algorithms(True)``."""

    name = "aten-flash"
    widest = WIDEST

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Window, scale: float) -> tuple[Tensor, Tensor]:
        lengths = (None, None, q.shape[1], k.shape[1])
        out, lse, *_ = _aten._flash_attention_forward(q, k, v, *lengths, 0.0, False, False, scale=scale, **_sides(seen))
        return out, lse

    def backward(self, x: StockInputs, seen: Window, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        lengths = (None, None, x.q.shape[1], x.k.shape[1])
        dq, dk, dv = _aten._flash_attention_backward(
            *x[:6], *lengths, 0.0, False, *no_dropout(x.q), scale=scale, **_sides(seen)
        )
        return dq, dk, dv


def _sides(window: Window) -> dict[str, int]:
    left, right = (-1 if side is None else side for side in window)
    return {"window_size_left": left, "window_size_right": right}
