"""Peak memory of the attention per rank, forward and backward, against world size: it falls as 1 / world.

Measured in each rank as the peak of its resident memory during the call above that before its inputs were made, so
inputs, outputs and gradients are in it; beside it, what those alone take, and what the plan predicts. glibc is told to
give freed tensors back at once, so that the peak is of live ones.

    python benchmarks/memory.py [--seq-len 32768] [--worlds 1 2 4] [--json docs/results/memory-by-world.json]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.attention.footprint import peak_memory
from burst_attention.attention.plan import shape_of
from burst_attention.plan.schedule import make_schedule
from burst_attention.testing import WorkerPool

from ..arguments import CallArguments, asked
from ..harness.memory import give_back, peak_during, resident


def measure(seqlen: int, heads: int, dim: int, dtype: torch.dtype, kernel: str) -> tuple[int, int]:
    """(peak above the start, bytes of q, k, v, out, dout, dq, dk, dv) on this rank, in the second of two calls."""
    plan = make_plan(seqlen)

    def call() -> int:
        inputs = [torch.randn(1, heads, plan.length, dim, dtype=dtype, requires_grad=True) for _ in range(3)]
        dout = torch.randn(1, heads, plan.length, dim, dtype=dtype)
        burst_attention(*inputs, plan, kernel=kernel).backward(dout)
        return 8 * dout.nbytes

    for _ in range(2):  # the first call also leaves what libraries allocate for good
        give_back()
        before = resident()
        size, peak = peak_during(call)
    return peak - before, size


def predicted(world: int, seqlen: int, heads: int, dim: int, dtype: torch.dtype) -> int:
    """The same peak by the plan."""
    schedule = make_schedule(seqlen, mask=Mask(), layout="zigzag", route="direct", rank=0, world=world)
    shape = shape_of(dtype, batch=1, q_heads=heads, kv_heads=heads, head_dim=dim)
    return peak_memory(schedule, shape, dtype, schedule.choose_travels(shape))


@dataclass(frozen=True, kw_only=True)
class Arguments(CallArguments):
    worlds: tuple[int, ...] = (1, 2, 4)
    kernel: str = "auto"


def main() -> None:
    a = asked(Arguments(seq_len=32768, head_dim=64), __doc__)
    sizes = (a.seq_len, a.heads, a.head_dim, a.torch_dtype)
    rows = []
    for world in a.worlds:
        with WorkerPool(world, timeout=1800) as pool:
            by_rank = pool.run(measure, *sizes, a.kernel, timeout=3600)
        peak, alone = (max(each) for each in zip(*by_rank, strict=True))
        rows.append({"world": world, "peak": peak, "predicted": predicted(world, *sizes), "alone": alone})
    columns = ("world", "peak per rank, MiB", "predicted", "in and out alone, MiB", "x world / that of the first")
    table = Table(*columns, title=f"{a.title}, zigzag")
    first = rows[0]["peak"] * rows[0]["world"]
    for row in rows:
        mebibytes = (f"{row[name] / 2**20:.0f}" for name in ("peak", "predicted", "alone"))
        table.add_row(str(row["world"]), *mebibytes, f"{row['peak'] * row['world'] / first:.2f}")
    Console().print(table)
    a.write("memory", rows=rows)
