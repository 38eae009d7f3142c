"""Time one causal attention over W ranks, forward and backward, with one feature removed at a time.

First the ranks and links are measured, and ours is planned for them. Each variant removes one feature of that plan. The
paper's strategy (zigzag, whole heads) follows in the same way.

The variants take turns, round by round, on the same ranks and cores, with one thread per rank. Before that, each
one's out, dq, dk and dv are compared with fp64 at a length where fp64 fits. A variant whose error exceeds 3 times
that of torch's own kernel in the same dtype is printed as WRONG, without a time. The limit is 6 times for io-dtype
accumulation, whose error is the point. Peak memory is each rank's peak resident memory in one call, minus the memory
before its inputs were made. Separate processes measure it, in which glibc returns freed memory at once. The last
column gives the (query, key) pairs that ranks compute in the forward and the backward; with more ranks than cores the
wall time does not show how evenly they are shared.

    burst bench ablation [--world 4] [--seq-len 8192] [--heads 8] [--head-dim 32] [--rounds 5] [--json FILE]"""

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
from .variants import VARIANTS, Ablation

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
    variants: Sequence[Ablation] = VARIANTS,
    timeout: float = 1800.0,
) -> list[dict[str, Any]]:
    """Check every variant, and measure the correct ones; return a dict for each, in the same order.

    Args:
        world: Number of ranks.
        workload: Sizes of the call.
        rounds: Timed rounds, at least 1.
        entries: Entries for :class:`burst_attention.testing.WorkerPool`, which say where ranks are checked, counted and
            timed; None for plain processes. Memory is always measured in plain processes, because it doesn't depend on
            the links.
        calibrate: First measure ranks and links, and let our variants plan with these rates.
        link: Rate of each node's link in bits per second, as set for ``entries``; None for no limit.
        check_len: Most tokens of the comparison with fp64, which needs memory for 10 matrices of that size squared.
        variants: The variants; the others are compared with the first.
        timeout: Seconds that one call may take.

    Returns:
        Dicts with these keys; those after ``correct`` are empty for wrong variants:

        - ``name``, ``differs``;
        - ``errors``, ``bounds``: relative L2 error against fp64 and its limit by tensor, over all ranks, at
          ``check_len`` tokens;
        - ``correct``: whether all errors are within their limits;
        - ``seconds``: the slowest rank's seconds in each round;
        - ``ratios``: time divided by the first variant's, by round (above 1: the first is faster);
        - ``bytes_forward``, ``bytes_backward``: bytes that each rank's transport sent;
        - ``scores_forward``, ``scores_backward``: (query, key) pairs of one head that each rank computes;
        - ``peak_forward``, ``peak``: each rank's peak memory in bytes by the end of the forward and of the backward,
          including q, k, v, out, dout, dq, dk and dv.

    Raises:
        ValueError: ``rounds`` is below 1.
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


def scores(variant: Ablation, workload: Workload) -> list[int]:
    """Run on a rank: return its (query, key) pairs of one head in [forward, backward].

    If the rank computes only a part of the heads, the pairs are scaled by that part.
    """
    plan = ready(variant, workload).call.plan
    assert plan is not None
    chosen = variant.candidate(plan, workload)
    programs = [plan.schedule.program(chosen.circulate, direction, chosen.groups) for direction in Direction]
    areas = [sum(op.tiles.area for op in program.ops if isinstance(op, Visit)) for program in programs]
    return [area // chosen.groups.query for area in areas]


def tables(rows: list[dict[str, Any]], title: str, check_title: str) -> list[Table]:
    """Return two tables: the costs, and the errors against fp64."""
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


def main(arguments: list[str]) -> None:
    a = asked(TimedArguments(world=4, head_dim=32, rounds=5), __doc__, "burst bench ablation", arguments)
    rows = compare(a.world, a.workload, a.rounds, calibrate=True)
    exactness = f"relative L2 error against fp64, S={min(a.seq_len, CHECK_LEN)}"
    for table in tables(rows, f"{a.title}, {a.world} ranks x 1 thread", exactness):
        Console(width=max(Console().width, 140)).print(table)
    a.write(rows=rows)
