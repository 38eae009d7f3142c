"""Kernels against the fp64 reference, tile by tile: on the CPU, in the interpreter and on a GPU alike."""

import numpy as np
import torch

from burst_attention.kernels.contract import BackwardInputs, Kernel, finite_lse
from burst_attention.kernels.reference import Reference
from burst_attention.plan.tile import Tiles
from burst_attention.testing.check import relative_l2

Table = list[tuple[int, int, int, int, int, int]]

BANDS: dict[str, Table] = {
    "full": [(0, 50, 0, 70, -69, 49)],
    "causal": [(0, 50, 0, 50, 0, 49)],
    "tall causal": [(0, 70, 0, 50, 0, 69)],
    "very tall causal": [(0, 200, 0, 50, 0, 199)],
    "window": [(0, 70, 0, 70, 0, 12)],
    "above": [(0, 33, 0, 50, -49, -4)],
    "both": [(0, 61, 0, 61, -7, 3)],
    "thin": [(0, 40, 0, 40, 0, 0)],
    "tall, limited below": [(0, 90, 0, 50, -49, 40)],
    "tall, as many keys after as there are": [(0, 100, 0, 50, 0, 99)],
    "corner": [(10, 43, 5, 38, 0, 32)],
    "several": [(0, 20, 0, 20, 0, 19), (20, 50, 0, 30, -29, 29), (20, 50, 40, 70, 0, 29)],
    "documents": [(n, n + 5, n, n + 5, 0, 4) for n in range(0, 70, 5)],
}
# With pieces of more than one block to each side.
LARGE: dict[str, Table] = {
    "large window": [(0, 600, 0, 600, 0, 299)],
    "large band": [(0, 600, 0, 700, -350, 299)],
    "large window, blocks a row short": [(0, 511, 0, 511, 0, 255)],
    "large, tall, limited below": [(0, 900, 0, 500, -499, 410)],
}
# Relative L2. What a kernel rounds itself to io dtype may err by three times that.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def inputs(rows, columns, dim, value_dim, dtype=torch.float32, *, heads=(4, 2), batch=2, device="cpu"):
    """q, k, v, dout: [B, S, H, D] in memory, as models have it."""
    make = torch.Generator().manual_seed(0)
    shapes = (
        (heads[0], rows, dim),
        (heads[1], columns, dim),
        (heads[1], columns, value_dim),
        (heads[0], rows, value_dim),
    )
    return [torch.randn(batch, n, h, d, generator=make).to(device, dtype).transpose(1, 2) for h, n, d in shapes]


def compare(
    kernel: Kernel,
    table: Table,
    dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    dlse: bool = False,
    heads_first: bool = False,
    softcap: float | None = None,
    **options: object,
) -> None:
    """Forward and backward of ``table``; with ``dlse`` of the lse alone: then no column of dO can carry its D.

    ``softcap``: of the kernel. ``heads_first``: [B, H, S, D] in memory, as shards that came over a wire are.
    """
    tiles = Tiles(np.array(table, np.int64))
    rows, columns = int(tiles.table[:, 1].max()) + 3, int(tiles.table[:, 3].max()) + 5  # some rows see nothing
    q, k, v, dout = inputs(rows, columns, dim, value_dim, dtype, **options)  # type: ignore[arg-type]
    if heads_first:
        q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
    dout = dout * float(not dlse)
    judge, scale = Reference(softcap), 0.7 / dim**0.5
    out, lse = judge.forward(q.double(), k.double(), v.double(), tiles, scale)
    delta = (out * dout.double()).sum(-1) - float(dlse)
    wide, seen = (x.double() for x in (dout, q, k, v)), finite_lse(lse)
    right = (out, lse, *judge.backward(BackwardInputs(*wide, seen, delta, tiles, scale)))
    stats = torch.stack((seen, delta), -1).float().unbind(-1)  # strided, as the sweep gives them
    mine = (
        *kernel.forward(q, k, v, tiles, scale),
        *kernel.backward(BackwardInputs(dout, q, k, v, *stats, tiles, scale, of_lse=dlse)),
    )
    # A gradient can be 0 by cancellation (one key has all the weight). Measure its error relative to the terms.
    floor = 0.05 * (q if dlse else dout).double().norm().item()
    bound = BOUNDS[dtype] * (1 if kernel.exact_partials(dtype) else 3)
    for name, actual, expected in zip(("out", "lse", "dq", "dk", "dv"), mine, right, strict=True):
        assert not kernel.exact_partials(dtype) or actual.dtype == torch.float32, name
        assert relative_l2(actual, expected, floor=floor) < bound, name
    blind = ~torch.tensor([any(a <= row < b for a, b, *_ in table) for row in range(rows)])
    assert (mine[0][:, :, blind] == 0).all()
    assert (mine[1][:, :, blind] == -torch.inf).all()
    assert (mine[2][:, :, blind] == 0).all()
