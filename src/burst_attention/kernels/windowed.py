"""Stock flash kernels that take a window of keys for each query: a launch for each tile, whatever its band.

They count the window from the bottom right corner of rows x columns: row i sees keys i + d - left to i + d + right,
d = columns - rows. A tile's lo <= i - j <= hi is left = hi + d and right = -lo - d, neither of them negative: every row
and every column of a tile sees something.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import accumulation_dtype
from .merge import blank_output, merge_
from .surrogate import appended_columns, surrogate_output
from .widths import check_width, same_width

WIDEST = 256
MULTIPLE = 8  # of head dims: 16 bytes
HALVES = (torch.bfloat16, torch.float16)


class Window(NamedTuple):
    """Keys before and after a query's own that it sees; None for no limit."""

    left: int | None
    right: int | None


def window_of(tile: Tile) -> Window:
    """A tile's band, as these kernels count it."""
    d = tile.columns - tile.rows
    return Window(tile.hi + d if tile.bounded_below else None, -tile.lo - d if tile.bounded_above else None)


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

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        self.ops.check(device, dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        value_dim = v.shape[-1]
        check_width(self.name, max(q.shape[-1], value_dim), WIDEST)
        q, k, v = same_width(q, k, v, multiple=MULTIPLE)
        if len(tiles) == 1 and _covers(next(iter(tiles)), q, k):
            out, lse = self._run_forward(next(iter(tiles)), q, k, v, scale)
            return out[..., :value_dim], lse
        out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
        for tile in tiles:
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
        dims = q.shape[-1], k.shape[-1], v.shape[-1]
        out = surrogate_output(dout, delta)
        if out is None:
            dout, out = appended_columns(dout, delta)
        q, k, v, dout, out = same_width(q, k, v, dout, out, multiple=MULTIPLE)
        check_width(self.name, q.shape[-1], WIDEST)
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # of rows that no tile covers: no launch reads them
        grads = [torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in (q, k, v)]
        for tile in tiles:
            rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
            queries, keys, values = _tokens_first(q, rows), _tokens_first(k, columns), _tokens_first(v, columns)
            dout_rows, out_rows = _tokens_first(dout, rows), _tokens_first(out, rows)
            row_lse = lse[:, :, rows].contiguous()
            parts = self.ops.backward(dout_rows, queries, keys, values, out_rows, row_lse, window_of(tile), scale)
            for grad, part, where in zip(grads, parts, (rows, columns, columns), strict=True):
                grad[:, :, where] += part.transpose(1, 2)
        dq, dk, dv = (grad[..., :dim] for grad, dim in zip(grads, dims, strict=True))
        return dq, dk, dv

    def _run_forward(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        queries, keys, values = _tokens_first(q, rows), _tokens_first(k, columns), _tokens_first(v, columns)
        out, lse = self.ops.forward(queries, keys, values, window_of(tile), scale)
        expected = (q.shape[0], q.shape[1], tile.rows)
        if tuple(lse.shape) != expected or lse.dtype != torch.float32:
            raise RuntimeError(
                f"kernel={self.name!r} gave an lse of shape {list(lse.shape)} in {lse.dtype}, not {list(expected)} in "
                "torch.float32: this version of it is not known here; choose another kernel"
            )
        return out.transpose(1, 2), lse


def check_gpu(name: str, device: torch.device, dtype: torch.dtype, capabilities: range) -> None:
    """Raise ValueError unless it is a GPU whose compute capability (major) is among these, and halves."""
    if device.type != "cuda":
        raise ValueError(f"kernel={name!r} runs on cuda, the tensors are on {device}; use kernel='aten'")
    major = torch.cuda.get_device_capability(device)[0]
    if major not in capabilities:
        raise ValueError(
            f"kernel={name!r} is for compute capability {capabilities.start}.x to {capabilities.stop - 1}.x, {device} "
            f"has {major}.x; use kernel='triton'"
        )
    if dtype not in HALVES:
        raise ValueError(f"kernel={name!r} does not take {dtype}; use kernel='triton' or 'reference'")


def _covers(tile: Tile, q: Tensor, k: Tensor) -> bool:
    return tile[:4] == (0, q.shape[2], 0, k.shape[2])


def _tokens_first(x: Tensor, where: slice) -> Tensor:
    """[B, H, S, D] -> [B, rows, H, D], the last dim dense."""
    return x[:, :, where].transpose(1, 2)
