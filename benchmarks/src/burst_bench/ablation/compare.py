"""One causal attention, forward and backward, over W ranks: ours as it is planned for the ranks and links at hand,
which are measured first, and each time one thing about it undone; then the paper's, whole heads and zigzag, likewise.

The variants take turns, round by round, on the same ranks and cores, 1 thread a rank. Before that each one's out, dq,
dk, dv are compared with fp64 at a length where that fits. What errs more than 3 times as much as torch's own kernel in
the same dtype is shown as WRONG, without a time; io-dtype accumulation, whose error is the point, may err 6 times as
much. Peak memory is of each rank's resident memory in one call above that before its inputs were made; it is measured
in processes of its own, in which glibc gives freed tensors back at once. The last column is of the (query, key) pairs
in the forward and in the backward: with more ranks than cores the wall time does not show how they are shared out.

    python benchmarks/ablation.py [--world 4] [--seq-len 8192] [--heads 8] [--head-dim 32] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from burst_attention.plan.program import Visit
from burst_attention.plan.rows import Direction
from burst_attention.testing import WorkerPool

from ..arguments import TimedArguments, asked
from ..harness.calibration import calibrated, limited
from ..harness.calls import NAMES, contest, memory_peaks, ready
from ..harness.workload import Workload
from ..tables import terminal
from ..texts import spread
from .variants import VARIANTS, Variant

COUNTED = ("bytes_forward", "bytes_backward", "scores_forward", "scores_backward")
PEAKS = ("peak_forward", "peak")
CHECK_LEN = 2048


def compare(
    world: int,
    workload: Workload,
    rounds: int,
    *,
    entries: Sequence[Callable[[], str]] | None = None,
    calibrate: bool = False,
    link: float | None = None,
    check_len: int = CHECK_LEN,
    variants: Sequence[Variant] = VARIANTS,
    timeout: float = 1800.0,
) -> list[dict[str, Any]]:
    """Check every variant; count, time and watch the memory of those that are right; a dict for each, in their order.

    Args:
        rounds: timed ones, at least 1.
        entries: for :class:`burst_attention.testing.WorkerPool`: where the ranks run that are checked, counted and
            timed; None for plain processes. Memory is always measured in plain ones: it doesn't depend on the links.
        calibrate: first measure ranks and links, for ours to plan by; ``link``: the limit of each node's, in bits per
            second, as ``entries`` have it; None for none.
        check_len: tokens of the comparison with fp64, at most; it takes memory for 10 squares of them.
        variants: the first is what the others are compared with.
        timeout: seconds that one call may take.

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
    check = workload.at(min(workload.seq_len, check_len))
    with WorkerPool(world, timeout=timeout, entries=entries) as pool:
        if calibrate:
            rates = limited(calibrated(pool), link)
            variants = [replace(variant, rates=rates) for variant in variants]
        outcomes = contest(pool, variants, workload, rounds, check=check, timeout=timeout)
        right = [own.variant for own in outcomes if own.correct]
        work = {variant.name: pool.run(scores, variant, workload) for variant in right}
    with WorkerPool(world, timeout=timeout) as pool:
        peaks = {variant.name: pool.run(memory_peaks, variant, workload, timeout=timeout) for variant in right}
    rows = []
    for own in outcomes:
        name = own.variant.name
        row = {
            "name": name,
            "differs": own.variant.differs or f"as planned: {own.detail}",
            "errors": own.errors,
            "bounds": own.bounds,
        }
        row |= {"correct": own.correct, "seconds": own.seconds, "ratios": own.ratios}
        for keys, by_rank in ((COUNTED[2:], work), (PEAKS, peaks)):
            own.counts |= {key: [each[n] for each in by_rank.get(name, ())] for n, key in enumerate(keys)}
        rows.append(row | {key: own.counts.get(key, []) for key in (*COUNTED, *PEAKS)})
    return rows


def scores(variant: Variant, workload: Workload) -> list[int]:
    """On a rank: the (query, key) pairs that it computes in the forward and in the backward, of one head; of a part
    of the heads as much less."""
    plan = ready(variant, workload).call.plan
    assert plan is not None
    chosen = variant.candidate(plan, workload)
    programs = [plan.schedule.program(chosen.travels, direction, chosen.groups) for direction in Direction]
    areas = [sum(op.tiles.area for op in program.ops if isinstance(op, Visit)) for program in programs]
    return [area // chosen.groups.query for area in areas]


def tables(rows: list[dict[str, Any]], title: str, check_title: str) -> list[Table]:
    """What it costs, and how far it is from fp64."""
    costs = terminal(({"": row["name"]} | _figures(row) for row in rows), title=title)
    return [costs, terminal(map(_exactness, rows), title=check_title)]


def _exactness(row: dict[str, Any]) -> dict[str, str]:
    errors = {name: f"{row['errors'][name]:.2e}" for name in NAMES}
    wrong = {name: f"[red]{text}[/]" for name, text in errors.items() if not row["errors"][name] <= row["bounds"][name]}
    bounds = f"{min(row['bounds'].values()):.0e} to {max(row['bounds'].values()):.0e}"
    return {"": row["name"], "differs from ours by": row["differs"], **errors, **wrong, "bounds": bounds}


def _figures(row: dict[str, Any]) -> dict[str, str]:
    if not row["correct"]:
        return {"seconds, median (range)": "[red]WRONG[/]"}
    sent = [sum(both) / 1e6 for both in zip(row["bytes_forward"], row["bytes_backward"], strict=True)]
    shares = (max(row[key]) / statistics.fmean(row[key]) for key in ("scores_forward", "scores_backward"))
    return {
        "seconds, median (range)": spread(row["seconds"], ".3f"),
        "/ ours, by round": spread(row["ratios"], ".3f"),
        "MB sent\na rank": f"{statistics.fmean(sent):.2f}",
        "busiest\nrank": f"{max(sent):.2f}",
        "peak MiB,\nforward": f"{max(row['peak_forward']) / 2**20:.1f}",
        "peak MiB": f"{max(row['peak']) / 2**20:.1f}",
        "work, busiest\n/ mean rank": " and ".join(f"{share:.2f}" for share in shares),
    }


def main() -> None:
    a = asked(TimedArguments(world=4, head_dim=32, rounds=5), __doc__)
    rows = compare(a.world, a.workload, a.rounds, calibrate=True)
    exactness = f"relative L2 error against fp64, S={min(a.seq_len, CHECK_LEN)}"
    for table in tables(rows, f"{a.title}, {a.world} ranks x 1 thread", exactness):
        Console(width=max(Console().width, 140)).print(table)
    a.write("ablation", rows=rows)
