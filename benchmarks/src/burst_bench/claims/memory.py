"""Peak memory of the attention per rank, by number of ranks.

The call is a forward and a backward. Its memory falls as 1 / ranks. Each rank's figure is its peak resident memory
during the call minus the memory before its inputs were made. So it includes inputs, outputs and gradients. The next
columns give the size of those alone, and the plan's prediction. glibc is set to return freed memory at once, so that
the peak counts live tensors.

    burst bench memory [--seq-len 32768] [--worlds 1 2 4] [--json FILE]"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from burst_attention import Mask
from burst_attention.attention import peak_bytes
from burst_attention.attention.hardware import shape_of
from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.plan.rows import Direction
from burst_attention.plan.strategy import Strategy
from burst_attention.planner.planner import Planner
from burst_train.forecast.footprint import walked

from ..arguments import CallArguments, asked
from ..harness.calls import Ours, memory_peaks
from ..harness.workload import Workload
from ..pool import WorkerPool


def predicted(world: int, workload: Workload) -> int:
    """Return the peak that the plan predicts, in bytes per rank."""
    planner, strategy = Planner(), Strategy(layout="zigzag", route="direct", ulysses_degree=1)
    schedule = planner.choose(workload.seq_len, mask=Mask(), strategy=strategy, rank=0, world=world)
    sizes = {"q_heads": workload.heads, "kv_heads": workload.kv_heads, "head_dim": workload.head_dim}
    shape = shape_of(workload.torch_dtype, batch=1, **sizes)
    dtype, chosen = workload.torch_dtype, planner.decide(schedule, shape)
    ranks = (replace(schedule, rank=rank) for rank in walked(world))
    return max(peak_bytes(each, shape, dtype, chosen, direction) for each in ranks for direction in Direction)


PEAK, PREDICTED, ALONE = "peak per rank, MiB", "predicted", "in and out alone, MiB"
SHARE = "x world / that of the first"
LEGEND = {
    "world": "number of ranks",
    PEAK: "the highest rank's, in a forward and backward of attention",
    PREDICTED: "the same, as the plan predicts it",
    ALONE: "q, k, v, out and their gradients",
    SHARE: "all ranks' peak together, divided by that of the first row",
}


@dataclass(frozen=True, kw_only=True)
class MemoryArguments(CallArguments):
    worlds: tuple[int, ...] = (1, 2, 4)
    kernel: str = "auto"


def main(arguments: list[str]) -> None:
    a = asked(MemoryArguments(seq_len=32768, head_dim=64), __doc__, "burst bench memory", arguments)
    token = 8 * a.heads * a.head_dim * a.workload.torch_dtype.itemsize  # q, k, v, out, dout, dq, dk and dv
    rows = []
    for world in a.worlds:
        with WorkerPool(world, timeout=1800) as pool:
            by_rank = pool.run(memory_peaks, Ours(kernel=a.kernel), a.workload, timeout=3600)
        figures = {"peak": max(peak for _, peak in by_rank), "predicted": predicted(world, a.workload)}
        rows.append({"world": world, **figures, "alone": token * math.ceil(a.seq_len / world)})
    first = rows[0]["peak"] * rows[0]["world"]
    named = {"peak": PEAK, "predicted": PREDICTED, "alone": ALONE}
    lines = (
        {"world": str(row["world"])}
        | {text: f"{row[name] / 2**20:.0f}" for name, text in named.items()}
        | {SHARE: f"{row['peak'] * row['world'] / first:.2f}"}
        for row in rows
    )
    print_table(console_of_tables(), lines, title=f"{a.title}, zigzag", legend=LEGEND)
    a.write(rows=rows)
