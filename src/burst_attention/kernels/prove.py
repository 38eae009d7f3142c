"""A kernel against the reference, on the device at hand: before ``auto`` takes it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import BackwardInputs, Continuing, Kernel
from .merge import row_dot
from .reference import Reference

# Causal; a window over a tall and over a wide rectangle, so that it matters from which corner it is counted; full; a
# tall one that is limited to the left alone. Several blocks each, odd sizes, rows and columns that no tile covers.
TILES = Tiles(
    np.array(
        [
            Tile(0, 301, 0, 301, 0, 300),
            Tile(301, 640, 20, 221, -40, 170),
            Tile(640, 781, 5, 330, -250, 60),
            Tile(781, 850, 10, 290, -279, 68),
            Tile(850, 1031, 3, 104, -100, 90),
        ],
        np.int64,
    )
)
ROWS, COLUMNS = 1034, 337
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # relative L2


def check_against_reference(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], *, fixed_order: bool = True
) -> None:
    """Raise ArithmeticError unless small calls of ``kernel`` come out right, with ``fixed_order`` the same twice.

    fp64 on the CPU is the judge, whatever is set for products on the device.
    """
    make = torch.Generator().manual_seed(0)
    shapes = ((4, ROWS, head_dims[1]), (4, ROWS, head_dims[0]), (2, COLUMNS, head_dims[0]), (2, COLUMNS, head_dims[1]))
    # As models have them, [B, S, H, D] in memory.
    dout, q, k, v = (
        torch.randn(2, rows, heads, dim, generator=make, device="cpu").to(dtype).transpose(1, 2)
        for heads, rows, dim in shapes
    )
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        _check(kernel, device, (dout, q, k, v), 0.0, fixed_order)
        # Rows whose D comes of the lse's gradient alone: no column of dO can carry it.
        dout[:, :, 100:200] = 0
        _check(kernel, device, (dout, q, k, v), 1.0, fixed_order)


def _check(kernel: Kernel, device: torch.device, tensors: tuple[Tensor, ...], dlse: float, fixed_order: bool) -> None:
    dtype, scale, judge = tensors[0].dtype, tensors[1].shape[3] ** -0.5, Reference()
    dout, q, k, v = (x.double() for x in tensors)
    out, lse = judge.forward(q, k, v, TILES, scale)
    delta = row_dot(dout, out, torch.float64) - dlse
    expected = (out, lse, *judge.backward(BackwardInputs(dout, q, k, v, lse, delta, TILES, scale)))
    dout, q, k, v = (x.to(device) for x in tensors)
    lse, delta = torch.stack((lse, delta), -1).to(device, torch.float32).unbind(-1)  # strided, as the sweep gives them
    names = ("out", "lse", "dq", "dk", "dv")
    inputs = BackwardInputs(dout, q, k, v, lse, delta, TILES, scale)
    runs = [(*kernel.forward(q, k, v, TILES, scale), *kernel.backward(inputs)) for _ in range(2)]
    results = [*zip(names, runs[0], expected, strict=True)]
    if isinstance(kernel, Continuing):
        total = _continued(kernel, q, k, v, scale)
        results += zip(("out carried on", "lse carried on"), total, expected[:2], strict=True)
    for name, mine, right in results:
        error = _distance(mine.cpu(), right)
        if not error <= BOUNDS[dtype]:
            raise ArithmeticError(
                f"its {name} is wrong on this device: relative L2 {error:.1e} from fp64, {BOUNDS[dtype]:.0e} allowed"
            )
    for name, mine, again in zip(names, *runs, strict=True):
        if fixed_order and not torch.equal(mine, again):
            raise ArithmeticError(f"its {name} differs from run to run on this device")


def _continued(kernel: Continuing, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of the tiles by halves of their columns, one folded into the other, in the midst of larger buffers."""
    first, second = (
        Tiles(np.array([part for tile in TILES if (part := _half(tile, n)) is not None], np.int64)) for n in range(2)
    )
    out, lse = (
        torch.cat([x, x], 1)[:, x.shape[1] :] for x in (y.float() for y in kernel.forward(q, k, v, first, scale))
    )
    kernel.extend(q, k, v, second, scale, out, lse)
    return out, lse


def _half(tile: Tile, n: int) -> Tile | None:
    """Sums over its columns."""
    middle = tile.columns // 2
    return tile.part((0, tile.rows), ((0, middle), (middle, tile.columns))[n])


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Relative L2; infinities must stand in the same places."""
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(actual), finite):
        return float("inf")
    actual, expected = (x.double().masked_fill(~finite, 0.0) for x in (actual, expected))
    return ((actual - expected).norm() / expected.norm()).item()
