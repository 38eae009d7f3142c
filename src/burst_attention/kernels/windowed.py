"""Stock flash kernels that take a window of keys for each query: a launch for each tile, whatever its band.

They count the window from the bottom right corner of rows x columns: row i sees keys i + d - left to i + d + right,
d = columns - rows. A tile's lo <= i - j <= hi is left = hi + d and right = -lo - d, neither of them negative: every row
and every column of a tile sees something. FlashAttention 2 takes a side of as many keys as there are for no limit; a
tall tile's right may be that without seeing all, so its rows that see to the last key get a launch of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import accumulation_dtype
from .merge import blank_output, merge_
from .surrogate import Gradients, shares
from .widths import WIDEST, check_width, same_width

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
    """The tiles, those apart whose last rows see to the last key under a limit as large as all keys."""
    for tile in tiles:
        right = window_of(tile).right
        top = tile.columns - 1 + tile.lo if right is not None and right >= tile.columns else 0
        whole = (0, tile.columns)
        for rows in ((0, top), (top, tile.rows)):
            part = tile.part(rows, whole) if rows[1] > rows[0] else None
            if part is not None:
                yield part


class WindowedOps(Protocol):
    """A package's two functions, over [B, S, H, D] of one width; lse is [B, Hq, Sq] in fp32."""

    @property
    def name(self) -> str: ...

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
class Windowed:
    """Kernel over ``ops``. Every tile's results are rounded to the io dtype, then merged or added in fp32."""

    ops: WindowedOps

    @property
    def name(self) -> str:
        return self.ops.name

    continues: ClassVar[bool] = False

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return False

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        self.ops.check(device, dtype)
        check_width(self.name, max(head_dims), WIDEST)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        value_dim = v.shape[-1]
        q, k, v = same_width(q, k, v, multiple=MULTIPLE)
        launches = list(launches_of(tiles))
        if len(launches) == 1 and _covers(launches[0], q, k):
            out, lse = self._run_forward(launches[0], q, k, v, scale)
            return out[..., :value_dim], lse
        out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
        for tile in launches:
            rows = slice(tile.q_start, tile.q_stop)
            merge_(out[:, :, rows], lse[:, :, rows], *self._run_forward(tile, q, k, v, scale))
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
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # of rows that no tile covers: no launch reads them
        sums, launches = Gradients(q, k, v), list(launches_of(tiles))
        for share in shares(dout, delta, widest=WIDEST):
            values = v if share.values else torch.zeros_like(v)
            inputs = same_width(share.dout, q, k, values, share.out, multiple=MULTIPLE)
            for tile in launches:
                parts = self._run_backward(tile, inputs, lse, scale)
                sums.add(parts, slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop), share)
        return sums.dq, sums.dk, sums.dv

    def _run_backward(self, tile: Tile, inputs: tuple[Tensor, ...], lse: Tensor, scale: float) -> list[Tensor]:
        rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        sides = (rows, rows, columns, columns, rows)
        dout, q, k, v, out = (_tokens_first(x, where) for x, where in zip(inputs, sides, strict=True))
        grads = self.ops.backward(dout, q, k, v, out, lse[:, :, rows].contiguous(), window_of(tile), scale)
        return [x.transpose(1, 2) for x in grads]

    def _run_forward(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        queries, keys, values = _tokens_first(q, rows), _tokens_first(k, columns), _tokens_first(v, columns)
        out, lse = self.ops.forward(queries, keys, values, window_of(tile), scale)
        expected = (q.shape[0], q.shape[1], tile.rows)
        if lse is None or tuple(lse.shape) != expected or lse.dtype != torch.float32:
            told = "no lse" if lse is None else f"an lse of shape {list(lse.shape)} in {lse.dtype}"
            raise RuntimeError(
                f"kernel={self.name!r} gave {told}, not {list(expected)} in torch.float32: this version of it is not "
                "known here; choose another kernel"
            )
        return out.transpose(1, 2), lse


def _covers(tile: Tile, q: Tensor, k: Tensor) -> bool:
    return tile[:4] == (0, q.shape[2], 0, k.shape[2])


def _tokens_first(x: Tensor, where: slice) -> Tensor:
    """[B, H, S, D] -> [B, rows, H, D], the last dim dense."""
    return x[:, :, where].transpose(1, 2)
