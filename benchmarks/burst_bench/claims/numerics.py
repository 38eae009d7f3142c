"""Error against fp64 by kernel and world size: it must not grow with the world.

Relative L2 over the whole sequence, all ranks together; the first row of each dtype is PyTorch's own kernel on one
device. docs/numerics.md says what the bounds are.

    python benchmarks/numerics.py [--seq-len 1024] [--worlds 1 2 4 8] [--dtypes bfloat16 float32]
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from burst_attention import Mask
from burst_attention.testing import Case, WorkerPool

from ..harness.numerics import relative_errors, stock_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--travels", nargs="+", default=["query", "key-value"])
    parser.add_argument("--mask", choices=["causal", "full"], default="causal")
    a = parser.parse_args()
    base = {"seqlen": a.seq_len, "mask": Mask(causal=a.mask == "causal"), "q_heads": 8, "kv_heads": 8}
    shape = base | {"head_dim": 64, "dlse": False}
    console = Console()
    pools = {world: WorkerPool(world) for world in a.worlds}
    for dtype in a.dtypes:
        table = Table("kernel", "travels", "world", "out", "dq", "dk", "dv", title=f"{dtype}, {a.mask}, S={a.seq_len}")
        case = Case(**shape, dtype=getattr(torch, dtype))
        table.add_row("torch, one device", "", "1", *(f"{x:.2e}" for x in stock_errors(case).values()))
        for kernel in ("reference", "aten", "aten-fp32"):
            for travels in a.travels:
                for world, pool in pools.items():
                    case = Case(**shape, dtype=getattr(torch, dtype), kernel=kernel, travels=travels)
                    errors = pool.run(relative_errors, case)[0]
                    table.add_row(kernel, travels, str(world), *(f"{x:.2e}" for x in errors.values()))
        console.print(table)
    for pool in pools.values():
        pool.close()
