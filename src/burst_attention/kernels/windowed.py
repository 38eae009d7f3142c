"""Stock flash kernels with a sliding window: one launch per tile, for any band.

They count the window from the bottom right corner of rows x columns: row i sees keys i + d - left to i + d + right,
with d = columns - rows. A tile's lo <= i - j <= hi becomes left = hi + d and right = -lo - d. Neither is negative,
because every row and column of a tile sees something. Tall tiles need two launches, because of FlashAttention 2:

- It treats a limit of at least the number of keys as no limit. A tall tile's right limit can be that large although
  some rows see fewer keys, so the rows that see up to the last key get a separate launch.
- With a left limit and no right limit, it limits the right to the number of keys. That is too few for the first rows of
  a tall tile. They see all keys, and get a separate launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .stock import Stock

MULTIPLE = 8  # of head dims: 16 bytes


class Window(NamedTuple):
    """Keys before and after a query's own that it sees; None for no limit."""

    left: int | None
    right: int | None


def window_of(tile: Tile) -> Window:
    """A tile's band, as these kernels count it."""
    d = tile.columns - tile.rows
    return Window(tile.hi + d if tile.bounded_below else None, -tile.lo - d if tile.bounded_above else None)


def launches_of(tiles: Tiles) -> Iterator[Tile]:
    """The tiles, tall ones in parts whose windows mean the same to every package."""
    for tile in tiles:
        right = window_of(tile).right
        sees_the_last_key = tile.columns - 1 + tile.lo if right is not None and right >= tile.columns else 0
        for part in _cut(tile, sees_the_last_key):
            tall = part.rows > part.columns + 1 and part.bounded_below and not part.bounded_above
            yield from _cut(part, part.hi + 1 if tall else 0)


def _cut(tile: Tile, row: int) -> Iterator[Tile]:
    """Its rows before ``row``, and the others."""
    for rows in ((0, row), (row, tile.rows)):
        part = tile.part(rows, (0, tile.columns)) if rows[1] > rows[0] else None
        if part is not None:
            yield part


class WindowedOps(Protocol):
    """A package's two functions, over [B, S, H, D] of one width; lse is [B, Hq, Sq] in fp32."""

    @property
    def name(self) -> str: ...

    @property
    def widest(self) -> int:
        """Head dim."""
        ...

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ValueError for what it can't do."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> tuple[Tensor, Tensor]:
        """(out [B, Sq, Hq, D], lse)."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: Window, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        ...


@dataclass(frozen=True)
class Windowed(Stock[Tile]):
    """Kernel over ``ops``. Every tile's results are rounded to the io dtype, then merged or added in fp32."""

    ops: WindowedOps

    @property
    def name(self) -> str:
        return self.ops.name

    @property
    def multiple(self) -> int:
        return MULTIPLE

    @property
    def widest(self) -> int:
        return self.ops.widest

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return False

    def check_place(self, device: torch.device, dtype: torch.dtype) -> None:
        self.ops.check(device, dtype)

    def launches(self, tiles: Tiles) -> Iterable[Tile]:
        return launches_of(tiles)

    def run_backward(self, launch: Tile, inputs: tuple[Tensor, ...], lse: Tensor, scale: float) -> list[Tensor]:
        rows, columns = slice(launch.q_start, launch.q_stop), slice(launch.k_start, launch.k_stop)
        sides = (rows, rows, columns, columns, rows)
        dout, q, k, v, out = (_tokens_first(x, where) for x, where in zip(inputs, sides, strict=True))
        grads = self.ops.backward(dout, q, k, v, out, lse[:, :, rows].contiguous(), window_of(launch), scale)
        return [x.transpose(1, 2) for x in grads]

    def run_forward(self, launch: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        rows, columns = slice(launch.q_start, launch.q_stop), slice(launch.k_start, launch.k_stop)
        queries, keys, values = _tokens_first(q, rows), _tokens_first(k, columns), _tokens_first(v, columns)
        out, lse = self.ops.forward(queries, keys, values, window_of(launch), scale)
        expected = (q.shape[0], q.shape[1], launch.rows)
        if lse is None or tuple(lse.shape) != expected or lse.dtype != torch.float32:
            given = "no lse" if lse is None else f"an lse of shape {list(lse.shape)} in {lse.dtype}"
            raise RuntimeError(
                f"kernel={self.name!r} gave {given}, not {list(expected)} in torch.float32: this version of it is not "
                "known here; choose another kernel"
            )
        return out.transpose(1, 2), lse


def _tokens_first(x: Tensor, where: slice) -> Tensor:
    """[B, H, S, D] -> [B, rows, H, D], the last dim dense."""
    return x[:, :, where].transpose(1, 2)
