"""One causal attention, forward and backward, over W ranks: ours, and each time one thing about it undone.

The variants take turns, round by round, on the same ranks and cores, 1 thread a rank. Before that each one's out, dq,
dk, dv are compared with fp64 at a length where that fits. What errs more than 3 times as much as torch's own kernel in
the same dtype is shown as WRONG, without a time; io-dtype accumulation, whose error is the point, may err 6 times as
much. Peak memory is of each rank's resident memory in one call above that before its inputs were made; it is measured
in processes of its own, in which glibc gives freed tensors back at once. The last column is of the (query, key) pairs
in the forward and in the backward: with more ranks than cores the wall time does not show how they are shared out.

    python benchmarks/ablation.py [--world 4] [--seq-len 8192] [--heads 8] [--head-dim 32] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from burst_attention import Plan
from burst_attention.plan.program import Visit
from burst_attention.plan.rows import Direction
from burst_attention.testing import Case, WorkerPool, attend
from burst_attention.testing.check import relative_l2
from burst_attention.testing.oracle import torch_attention

from ..arguments import TimedArguments, asked
from ..harness.measure import rotated
from ..harness.memory import give_back, peak_during, resident
from ..texts import spread
from .variants import VARIANTS, Variant

NAMES = ("out", "dq", "dk", "dv")
COUNTED = ("bytes_forward", "bytes_backward", "scores_forward", "scores_backward")
PEAKS = ("peak_forward", "peak")
CHECK_LEN = 2048
Shape = tuple[int, int, int, torch.dtype]  # tokens, heads, head dim, dtype


def compare(
    world: int,
    *,
    seq_len: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    rounds: int,
    entries: Sequence[Callable[[], str]] | None = None,
    check_len: int = CHECK_LEN,
    variants: Sequence[Variant] = VARIANTS,
    timeout: float = 1800.0,
) -> list[dict[str, Any]]:
    """Check every variant; count, time and watch the memory of those that are right; a dict for each, in their order.

    Args:
        rounds: timed ones, at least 1.
        entries: for :class:`burst_attention.testing.WorkerPool`: where the ranks run that are checked, counted and
            timed; None for plain processes. Memory is always measured in plain ones: it doesn't depend on the links.
        check_len: tokens of the comparison with fp64, at most; it takes memory for 10 squares of them.
        variants: the first is what the others are compared with.
        timeout: seconds that all rounds together may take.

    Returns:
        ``name``, ``differs``; ``errors`` and ``bounds``: relative L2 against fp64 by tensor, over all ranks, at
        ``check_len`` tokens; ``correct``. Empty where not correct: ``seconds``: of each round, the slowest rank's;
        ``ratios``: by round, to the first variant's (above 1: that is faster); ``bytes_forward``,
        ``bytes_backward``: sent by each rank, as its transport counted; ``scores_forward``, ``scores_backward``:
        (query, key) pairs that each rank computes, of one head; ``peak_forward``, ``peak``: bytes of memory of each
        rank, by the end of the forward and of the backward, q, k, v, out, dout, dq, dk and dv included.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    case = Case(seqlen=min(seq_len, check_len), q_heads=heads, kv_heads=heads, head_dim=head_dim, dtype=dtype)
    expected, stock = reference(case)
    shape = (seq_len, heads, head_dim, dtype)
    options = {} if entries is None else {"entries": entries}
    with WorkerPool(world, timeout=timeout, **options) as pool:
        squares = pool.run(checked, variants, case, expected, timeout=timeout)
        rows = [_row(variant, [s[n] for s in squares], expected, stock) for n, variant in enumerate(variants)]
        right = [(variant, row) for variant, row in zip(variants, rows, strict=True) if row["correct"]]
        chosen = [variant for variant, _ in right]
        times = pool.run(timed, chosen, shape, rounds, timeout=timeout)
    with WorkerPool(world, timeout=timeout) as pool:
        peaks = pool.run(memory_peaks, chosen, shape, timeout=timeout)
    for n, (_, row) in enumerate(right):
        row["seconds"] = [max(ranks) for ranks in zip(*(rank[n]["seconds"] for rank in times), strict=True)]
        for key in COUNTED:
            row[key] = [rank[n][key] for rank in times]
        for key in PEAKS:
            row[key] = [rank[n][key] for rank in peaks]
        if rows[0]["correct"]:  # whose figures are filled in first
            row["ratios"] = [theirs / first for theirs, first in zip(row["seconds"], rows[0]["seconds"], strict=True)]
    return rows


def reference(case: Case) -> tuple[list[Tensor], list[float]]:
    """Global out, dq, dk, dv in fp64, and the relative L2 error of torch's own kernel in the case's dtype."""
    inputs = case.inputs()
    by_head: dict[Callable[..., Any], list[list[Tensor]]] = {attend: [], torch_attention: []}
    for head in range(case.q_heads):  # fp64 scores of one head at a time
        q, k, v, dout = (inputs[name][:, head : head + 1] for name in ("q", "k", "v", "dout"))
        for function, heads in by_head.items():
            results = dict(function(q, k, v, case.mask, dout=dout).items())
            heads.append([results[name] for name in NAMES])
    expected, plain = ([torch.cat(x, 1) for x in zip(*heads, strict=True)] for heads in by_head.values())
    return expected, [relative_l2(x, y) for x, y in zip(plain, expected, strict=True)]


def _row(variant: Variant, squares: list[list[float]], expected: list[Tensor], stock: list[float]) -> dict[str, Any]:
    """``squares``: by rank and tensor."""
    totals = [math.fsum(column) for column in zip(*squares, strict=True)]
    errors = [math.sqrt(total) / x.norm().item() for total, x in zip(totals, expected, strict=True)]
    bounds = [variant.tolerance * error for error in stock]
    return {
        "name": variant.name,
        "differs": variant.differs,
        "errors": dict(zip(NAMES, errors, strict=True)),
        "bounds": dict(zip(NAMES, bounds, strict=True)),
        "correct": all(error <= bound for error, bound in zip(errors, bounds, strict=True)),  # NaN is not
        **{key: [] for key in ("seconds", "ratios", *COUNTED, *PEAKS)},
    }


def checked(variants: Sequence[Variant], case: Case, expected: list[Tensor]) -> list[list[float]]:
    """On a rank: for each variant, ||out, dq, dk, dv - expected||² of this rank's rows."""
    squares, inputs = [], case.inputs()
    for variant in variants:
        plan = variant.plan(case.seqlen)
        out, backward = variant.begin(plan, *(plan.shard(inputs[name], 2) for name in ("q", "k", "v", "dout")))
        pairs = zip((out, *backward()), expected, strict=True)
        squares.append([(x.double() - plan.shard(y, 2)).square().sum().item() for x, y in pairs])
    return squares


def timed(variants: Sequence[Variant], shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """On a rank: for each variant, what one call sends and computes, and the seconds of each of ``rounds`` more."""
    plans = [variant.plan(shape[0]) for variant in variants]
    inputs = [_local_inputs(plan.length, shape) for plan in plans]
    figures: list[dict[str, Any]] = []
    for variant, plan, tensors in zip(variants, plans, inputs, strict=True):
        out, backward = variant.begin(plan, *tensors)
        forward = plan.transport.sent
        backward()
        programs = [plan.schedule.program(variant.travels, direction) for direction in Direction]
        scores = (sum(op.tiles.area for op in program.ops if isinstance(op, Visit)) for program in programs)
        counted = (forward, plan.transport.sent - forward, *scores)
        figures.append({**dict(zip(COUNTED, counted, strict=True)), "seconds": []})
        del out, backward
    takers = list(zip(variants, plans, inputs, figures, strict=True))
    for n in range(rounds):
        for variant, plan, tensors, own in rotated(takers, n):
            dist.barrier()
            started = time.perf_counter()
            variant.begin(plan, *tensors)[1]()
            own["seconds"].append(time.perf_counter() - started)
    return figures


def memory_peaks(variants: Sequence[Variant], shape: Shape) -> list[dict[str, int]]:
    """On a rank: for each variant, peak resident memory above the start by the end of the forward and of all."""
    by_variant = []
    for variant in variants:
        plan = variant.plan(shape[0])
        for _ in range(2):  # the first call also leaves what libraries allocate for good
            dist.barrier()
            give_back()
            before = resident()
            (tensors, out, backward), after_forward = peak_during(partial(_forward, variant, plan, shape))
            grads, after_backward = peak_during(backward)
            del tensors, out, backward, grads
        peaks = after_forward - before, max(after_forward, after_backward) - before
        by_variant.append(dict(zip(PEAKS, peaks, strict=True)))
    return by_variant


def _forward(variant: Variant, plan: Plan, shape: Shape) -> tuple[list[Tensor], Tensor, Callable[[], Any]]:
    tensors = _local_inputs(plan.length, shape)
    return tensors, *variant.begin(plan, *tensors)


def _local_inputs(length: int, shape: Shape) -> list[Tensor]:
    """q, k, v, dout [1, H, S_local, D]."""
    _, heads, head_dim, dtype = shape
    return [torch.randn(1, heads, length, head_dim, dtype=dtype) for _ in range(4)]


def tables(rows: list[dict[str, Any]], title: str, check_title: str) -> list[Table]:
    """What it costs, and how far it is from fp64."""
    headings = ["", "seconds, median (range)", "/ ours, by round", "MB sent\na rank", "busiest\nrank"]
    headings += ["peak MiB,\nforward", "peak MiB", "work, busiest\n/ mean rank"]
    costs = Table(*(Column(heading, no_wrap=True) for heading in headings), title=title)
    exactness = Table("", "differs from ours by", *NAMES, "bounds", title=check_title)
    for row in rows:
        costs.add_row(row["name"], *(_figures(row) if row["correct"] else ["[red]WRONG[/]"]))
        errors = [(row["errors"][name], row["bounds"][name]) for name in NAMES]
        cells = [f"{error:.2e}" if error <= bound else f"[red]{error:.2e}[/]" for error, bound in errors]
        bounds = [bound for _, bound in errors]
        exactness.add_row(row["name"], row["differs"], *cells, f"{min(bounds):.0e} to {max(bounds):.0e}")
    return [costs, exactness]


def _figures(row: dict[str, Any]) -> list[str]:
    sent = [sum(both) / 1e6 for both in zip(row["bytes_forward"], row["bytes_backward"], strict=True)]
    peaks = [f"{max(row[key]) / 2**20:.1f}" for key in PEAKS]
    shares = [max(row[key]) / statistics.fmean(row[key]) for key in ("scores_forward", "scores_backward")]
    return [
        spread(row["seconds"], ".3f"),
        spread(row["ratios"], ".3f"),
        f"{statistics.fmean(sent):.2f}",
        f"{max(sent):.2f}",
        *peaks,
        " and ".join(f"{share:.2f}" for share in shares),
    ]


def main() -> None:
    a = asked(TimedArguments(world=4, head_dim=32, rounds=5), __doc__)
    sizes = {"seq_len": a.seq_len, "heads": a.heads, "head_dim": a.head_dim}
    rows = compare(a.world, **sizes, dtype=a.torch_dtype, rounds=a.rounds)
    exactness = f"relative L2 error against fp64, S={min(a.seq_len, CHECK_LEN)}"
    for table in tables(rows, f"{a.title}, {a.world} ranks x 1 thread", exactness):
        Console(width=max(Console().width, 140)).print(table)
    a.write("ablation", rows=rows)
