"""A kernel against the reference, on the device at hand: before ``auto`` takes it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import Kernel
from .merge import row_dot
from .reference import Reference

# A causal triangle, a window, a full rectangle; odd sizes, rows that no tile covers.
TILES = Tiles(
    np.array([Tile(0, 65, 0, 65, 0, 64), Tile(65, 162, 40, 137, 0, 30), Tile(162, 190, 10, 150, -139, 27)], np.int64)
)
ROWS, COLUMNS = 193, 151
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # relative L2


def proven(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    """Raise ArithmeticError unless a small forward and backward of ``kernel`` come out right."""
    make = torch.Generator().manual_seed(0)
    shapes = ((4, ROWS, head_dims[0]), (2, COLUMNS, head_dims[0]), (2, COLUMNS, head_dims[1]), (4, ROWS, head_dims[1]))
    # As models have them, [B, S, H, D] in memory.
    q, k, v, dout = (
        torch.randn(1, rows, heads, dim, generator=make).to(device, dtype).transpose(1, 2)
        for heads, rows, dim in shapes
    )
    scale, judge = head_dims[0] ** -0.5, Reference()
    out, lse = judge.forward(q, k, v, TILES, scale)
    delta = row_dot(dout, out, torch.float32)
    expected = (out, lse, *judge.backward(dout, q, k, v, lse, delta, TILES, scale))
    lse, delta = torch.stack((lse, delta), -1).unbind(-1)  # strided, as the sweep gives them
    actual = (*kernel.forward(q, k, v, TILES, scale), *kernel.backward(dout, q, k, v, lse, delta, TILES, scale))
    for name, mine, right in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        error = _distance(mine, right)
        if not error <= BOUNDS[dtype]:
            raise ArithmeticError(
                f"its {name} is wrong on this device: relative L2 {error:.1e} from the reference, {BOUNDS[dtype]:.0e} "
                "allowed"
            )


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Relative L2; infinities must stand in the same places."""
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(actual), finite):
        return float("inf")
    actual, expected = (x.double().masked_fill(~finite, 0.0) for x in (actual, expected))
    return ((actual - expected).norm() / expected.norm()).item()
