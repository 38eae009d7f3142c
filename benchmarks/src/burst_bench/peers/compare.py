"""One causal attention, forward and backward: ours against the packages that people would use instead, in one run.

All take turns, round by round, on the same ranks and cores, 1 thread a rank, over the same flash kernels: on CPU
torch's, which flash_attn_stand_in.py gives the packages under flash_attn's names. Each result is first compared with
one device's in fp32; a variant whose result is wrong is shown with its error and without a time. Variants that have
only a forward are compared with our forward alone. ring-attention-pytorch's ring has a loop of its own for CPUs.

    python benchmarks/peers.py [--world 2] [--seq-len 8192] [--heads 8] [--head-dim 128] [--rounds 5] [--json FILE]
                               [--link 100mbit]

With --link each rank is a node of an emulated cluster, its link limited so (it needs root and iproute2). What ours plan
by is measured first.

The packages are the extra ``peers``; without them ours are shown, and what to install. With --device cuda the same file
runs one rank per GPU on NCCL and the real flash_attn; that was written but has never been run.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console

from burst_attention.testing import WorkerPool

from ..arguments import TimedArguments, asked
from ..cluster import Cluster, parse_rate
from ..harness.calibration import calibrated, limited
from ..harness.calls import Ours, Outcome, contest
from ..harness.workload import Workload
from ..tables import terminal
from ..texts import bytes_text, spread
from . import flash_attn_stand_in
from .variants import STRONGEST, VARIANTS, Theirs, package_version, refusal


def compare(
    world: int,
    workload: Workload,
    rounds: int,
    *,
    names: Sequence[str] | None = None,
    entries: Sequence[Callable[[], str]] | None = None,
    link: float | None = None,
    timeout: float = 600.0,
) -> list[dict[str, Any]]:
    """Check, count and time every variant; a dict for each, in the order of ``VARIANTS``.

    Args:
        workload: the sizes; in fp32 ring-flash-attn's gradients are wrong (its accumulators alias its buffers).
        rounds: timed ones; with 0 results are checked and bytes counted only.
        names: of the variants wanted; None for all. Ours are always among them.
        entries: for :class:`burst_attention.testing.WorkerPool`: where the ranks run; None for plain processes.
        link: the limit of each node's, in bits per second, as ``entries`` have it; None for none.
        timeout: seconds that one call may take.

    Returns:
        ``name``, ``package``, ``version``, ``passes`` (``forward`` or ``forward and backward``), ``detail``;
        ``refused``: why there is no result, or None; ``errors`` and ``bounds``: relative L2 by tensor; ``correct``;
        ``bytes``: sent by each rank in one call, as handed to the process group; ``transport_bytes``: by the plan's own
        count, without the records by which ranks agree on a call (None for others); ``seconds``: of each round, the
        slowest rank's; ``copying``: how many of them the stand-in spent on copies; ``ratios``: by round, to ours of the
        same passes (above 1: ours is faster); ``ratios_without_copies``: as if those copies cost nothing.
    """
    if world < 2:
        raise ValueError(f"world={world} must be at least 2: the packages' rings can't send to themselves")
    unknown = sorted(set(names or ()) - {v.name for v in VARIANTS})
    if unknown:
        raise ValueError(f"names has {unknown}; choose from {', '.join(v.name for v in VARIANTS)}")
    chosen = [v for v in VARIANTS if names is None or isinstance(v, Ours) or v.name in names]
    refused = {variant.name: refusal(variant, world, workload) for variant in chosen}
    with (
        tempfile.TemporaryDirectory(prefix="burst-peers-") as folder,
        WorkerPool(world, threads=1, timeout=timeout, entries=entries) as pool,
    ):
        if rounds and workload.device == "cpu":  # ours plan by what ranks and links do
            rates = limited(calibrated(pool), link)
            chosen = [replace(each, rates=rates) if isinstance(each, Ours) else each for each in chosen]
        pool.run(prepare, workload.device, str(Path(folder) / "meeting"), timeout=timeout)
        outcomes = contest(pool, chosen, workload, rounds, refused=refused, timeout=timeout)
    return [_row(own) for own in outcomes]


def _row(own: Outcome) -> dict[str, Any]:
    variant = own.variant
    installed = own.refused is None or not own.refused.startswith("not installed")
    # A ratio has all of a round's time above the line: without copies it is less by their share.
    rest = [1 - copies / seconds for copies, seconds in zip(own.aside, own.seconds, strict=True)]
    return {
        "name": variant.name,
        "package": variant.package if isinstance(variant, Theirs) else "burst_attention",
        "version": package_version(variant) if installed else None,
        "passes": "forward and backward" if variant.has_backward else "forward",
        "detail": own.detail,
        "refused": own.refused,
        "errors": own.errors,
        "bounds": own.bounds,
        "correct": own.correct,
        "bytes": own.counts.get("bytes"),
        "transport_bytes": own.counts.get("transport_bytes"),
        "seconds": own.seconds,
        "copying": own.aside,
        "ratios": own.ratios,
        "ratios_without_copies": [ratio * share for ratio, share in zip(own.ratios, rest, strict=False)],
    }


def prepare(device: str, meeting: str) -> None:
    """Once on each rank, before anything else: the stand-ins, or the GPU."""
    flash_attn_stand_in.install_adapters()
    if device == "cpu":
        flash_attn_stand_in.install()
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    if world > torch.cuda.device_count():
        raise ValueError(f"world={world}, but there are {torch.cuda.device_count()} GPUs; take one rank per GPU")
    torch.cuda.set_device(rank)
    dist.destroy_process_group()  # the pool's, which is gloo's alone
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=rank, world_size=world)


def cells(row: dict[str, Any]) -> dict[str, str]:
    """One of ``compare``'s rows, as the terminal and the page show it."""
    name = {"variant": f"{row['name']} {row['version'] or ''}".strip(), "passes": row["passes"]}
    if not row["correct"]:
        return name | {"s": row["refused"] or "WRONG"}
    return name | {
        "s": spread(row["seconds"]),
        "ratio": spread(row["ratios"], ".3f"),
        "without copies": spread(row["ratios_without_copies"], ".3f"),
        "sent per rank": bytes_text(statistics.fmean(row["bytes"])) if row["bytes"] else "-",
    }


def show(console: Console, rows: list[dict[str, Any]], title: str) -> None:
    """Print ``compare``'s rows: a table, and under it why some have no figures."""
    strongest = next((row["bytes"] for row in rows if row["name"] == STRONGEST and row["correct"]), None)
    lines, notes = [], []
    for row in rows:
        lines.append(cells(row))
        if row["refused"]:
            lines[-1]["s"] = "not run"
            notes.append(f"{row['name']}: {row['refused']}")
        elif strongest and row["bytes"] and row["passes"] != "forward":
            lines[-1][f"of {STRONGEST}'s"] = f"{statistics.fmean(row['bytes']) / statistics.fmean(strongest):.3f}"
        wrong = {name: error for name, error in row["errors"].items() if not error <= row["bounds"][name]}
        for name, error in wrong.items():
            notes.append(f"{row['name']}: relative L2 of {name} is {error:.1e} and may be {row['bounds'][name]:.1e}")
    console.print(terminal(lines, title=title))
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Arguments(TimedArguments):
    rounds: int = 5
    """0: check the results and count the bytes only."""
    device: Literal["cpu", "cuda"] = "cpu"
    link: str | None = None
    """What a node's link lets through, such as 100mbit; each rank is a node then."""
    only: tuple[str, ...] | None = None
    """Of the others, such as "yunchang zigzag"."""


def main() -> None:
    a = asked(Arguments(), __doc__)
    workload, link = a.workload.at(a.seq_len, device=a.device), None
    with ExitStack() as stack:
        entries = None
        if a.link is not None:
            link = parse_rate(a.link)
            entries = stack.enter_context(Cluster(a.world, 1, rate=link)).entries()
        rows = compare(a.world, workload, a.rounds, names=a.only, entries=entries, link=link)
    over = f", links of {a.link}" if a.link else ""
    show(Console(width=max(Console().width, 130)), rows, f"{a.title}, {a.world} ranks x 1 thread{over}")
    a.write("peers", rows=rows)
