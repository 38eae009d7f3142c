"""Peak memory of the attention per rank, forward and backward, against world size: it falls as 1 / world.

Measured in each rank as the peak of its resident memory during the call above that before its inputs were made, so
inputs, outputs and gradients are in it; beside it, what those alone take, and what the plan predicts. glibc is told to
give freed tensors back at once, so that the peak is of live ones.

    python benchmarks/memory.py [--seq-len 32768] [--worlds 1 2 4] [--json docs/results/memory-by-world.json]
"""

from __future__ import annotations

from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.attention.plan import shape_of
from burst_attention.plan.estimate import peak_memory
from burst_attention.plan.schedule import make_schedule
from burst_attention.testing import WorkerPool

from ..harness.memory import give_back, peak_during, resident
from ..harness.origin import origin
from ..harness.results import write_json


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
    return peak_memory(schedule, shape, schedule.choose_travels(shape))


def run(
    *,
    seq_len: int = 32768,
    worlds: tuple[int, ...] = (1, 2, 4),
    heads: int = 8,
    head_dim: int = 64,
    dtype: str = "bfloat16",
    kernel: str = "auto",
    json: Path | None = None,
) -> None:
    """Measure and print; ``json``: also write the figures to this file."""
    arguments = (seq_len, heads, head_dim, getattr(torch, dtype))
    rows = []
    for world in worlds:
        with WorkerPool(world, timeout=1800) as pool:
            by_rank = pool.run(measure, *arguments, kernel, timeout=3600)
        peak, alone = (max(sizes) for sizes in zip(*by_rank, strict=True))
        rows.append({"world": world, "peak": peak, "predicted": predicted(world, *arguments), "alone": alone})
    title = f"causal zigzag, {dtype}, S={seq_len}, H={heads}, D={head_dim}"
    columns = ("world", "peak per rank, MiB", "predicted", "in and out alone, MiB", "x world / that of the first")
    table = Table(*columns, title=title)
    first = rows[0]["peak"] * rows[0]["world"]
    for row in rows:
        sizes = (f"{row[name] / 2**20:.0f}" for name in ("peak", "predicted", "alone"))
        table.add_row(str(row["world"]), *sizes, f"{row['peak'] * row['world'] / first:.2f}")
    Console().print(table)
    if json:
        command = f"python benchmarks/memory.py --seq-len {seq_len} --worlds {' '.join(map(str, worlds))}"
        size = {"seq_len": seq_len, "heads": heads, "head_dim": head_dim, "dtype": dtype}
        write_json(json, {"size": size, "rows": rows} | origin(command))


def main() -> None:
    tyro.cli(run, description=__doc__)
