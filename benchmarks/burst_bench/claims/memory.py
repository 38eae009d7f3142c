"""Peak memory of the attention per rank, forward and backward, against world size: it falls as 1 / world.

Measured in each rank as the peak of its resident memory during the call above that before its inputs were made, so
inputs, outputs and gradients are in it; beside it, what those alone take, and what the plan foretells. glibc is told to
give freed tensors back at once, so that the peak is of live ones.

    python benchmarks/memory.py [--seq-len 32768] [--worlds 1 2 4]
"""

from __future__ import annotations

import argparse

import torch
from burst_bench.memory import give_back, peak_during, resident
from rich.console import Console
from rich.table import Table

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.attention.plan import shape_of
from burst_attention.plan.estimate import peak_memory
from burst_attention.plan.schedule import make_schedule
from burst_attention.testing import WorkerPool


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


def foretold(world: int, seqlen: int, heads: int, dim: int, dtype: torch.dtype) -> int:
    """The same peak by the plan."""
    schedule = make_schedule(seqlen, mask=Mask(), layout="zigzag", route="direct", rank=0, world=world)
    shape = shape_of(dtype, batch=1, q_heads=heads, kv_heads=heads, head_dim=dim)
    return peak_memory(schedule, shape, schedule.choose_travels(shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernel", default="auto")
    a = parser.parse_args()
    title = f"causal zigzag, {a.dtype}, S={a.seq_len}, H={a.heads}, D={a.head_dim}"
    columns = ("world", "peak per rank, MiB", "foretold", "x world / that of world 1", "in and out alone, MiB")
    table = Table(*columns, title=title)
    first = 0.0
    for world in a.worlds:
        with WorkerPool(world, timeout=1800) as pool:
            arguments = (a.seq_len, a.heads, a.head_dim, getattr(torch, a.dtype), a.kernel)
            figures = pool.run(measure, *arguments, timeout=3600)
        peak = max(peak for peak, _ in figures)
        first = first or peak * world
        sizes = [peak, foretold(world, *arguments[:4]), max(n for _, n in figures)]
        peak_told, plan_told, alone = (f"{size / 2**20:.0f}" for size in sizes)
        table.add_row(str(world), peak_told, plan_told, f"{peak * world / first:.2f}", alone)
    Console().print(table)


if __name__ == "__main__":
    main()
