"""Error against fp64 by kernel and world size: it must not grow with the world.

Relative L2 over the whole sequence, all ranks together; the first row of each dtype is PyTorch's own kernel on one
device. docs/numerics.md says what the bounds are.

    python benchmarks/numerics.py [--seq-len 1024] [--worlds 1 2 4 8] [--dtypes bfloat16 float32]
"""

from __future__ import annotations

from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from burst_attention import Mask
from burst_attention.testing import Case, WorkerPool

from ..harness.numerics import relative_errors, stock_errors


def run(
    *,
    seq_len: int = 1024,
    worlds: tuple[int, ...] = (1, 2, 4, 8),
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
    travels: tuple[str, ...] = ("query", "key-value"),
    mask: Literal["causal", "full"] = "causal",
) -> None:
    """Compute and print."""
    base = {"seqlen": seq_len, "mask": Mask(causal=mask == "causal"), "q_heads": 8, "kv_heads": 8}
    shape = base | {"head_dim": 64, "dlse": False}
    console = Console()
    pools = {world: WorkerPool(world) for world in worlds}
    for dtype in dtypes:
        table = Table("kernel", "travels", "world", "out", "dq", "dk", "dv", title=f"{dtype}, {mask}, S={seq_len}")
        case = Case(**shape, dtype=getattr(torch, dtype))
        table.add_row("torch, one device", "", "1", *(f"{x:.2e}" for x in stock_errors(case).values()))
        for kernel in ("reference", "aten", "aten-fp32"):
            for side in travels:
                for world, pool in pools.items():
                    case = Case(**shape, dtype=getattr(torch, dtype), kernel=kernel, travels=side)
                    errors = pool.run(relative_errors, case)[0]
                    table.add_row(kernel, side, str(world), *(f"{x:.2e}" for x in errors.values()))
        console.print(table)
    for pool in pools.values():
        pool.close()


def main() -> None:
    tyro.cli(run, description=__doc__)
