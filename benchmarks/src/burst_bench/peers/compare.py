"""Compare our causal attention, forward and backward, with other packages in one run.

All variants take turns, round by round, on the same ranks and cores, with one thread per rank and the same flash
kernels. On CPUs these are torch's kernels; flash_attn_stand_in.py offers them to the packages under flash_attn's names.
Each result is first compared with a single device's in fp32. A wrong variant is printed with its error and without a
time. Variants with only a forward are compared with our forward. ring-attention-pytorch's ring has a separate loop for
CPUs.

    burst bench peers [--world 2] [--seq-len 8192] [--heads 8] [--head-dim 128] [--rounds 5] [--json FILE]
                               [--link 100mbit]

``burst`` is what a newcomer gets: its plan measures links and kernels itself. ``burst, calibrated`` plans with the
rates of ``burst calibrate``. PyTorch in one process uses as many threads as there are ranks. With --link each rank is a
node of an emulated cluster with links of this rate (it needs root and iproute2). ``share of bound`` is then an
estimate of the fewest seconds that our plan allows, divided by ours, in each round. A pass takes at least as long as
its exchange on the busiest link, and as (processor time of all ranks / cores + first exchange + last exchange).

The extra ``peers`` installs the packages. Without them the program prints our variants, and what to install. With
--device cuda it runs one rank per GPU with NCCL and the real flash_attn; that mode has never been run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console

from burst_attention.launch.join import cores
from burst_attention.testing import WorkerPool

from ..arguments import TimedArguments, asked
from ..cluster import Cluster, parse_rate
from ..harness.bound import Exchanged, bound_of, exchanged
from ..harness.calibration import PAYLOAD, calibrated, limited
from ..harness.calls import Ours, Outcome, contest, ready
from ..harness.workload import Workload
from ..tables import terminal
from ..texts import bytes_text, spread
from . import flash_attn_stand_in
from .variants import CALIBRATED, STRONGEST, VARIANTS, Theirs, package_of, package_version, refusal


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
    """Check, count and time every variant; return a dict for each, in the order of ``VARIANTS``.

    Args:
        world: Number of ranks, at least 2.
        workload: Sizes of the call. In fp32, ring-flash-attn's gradients are wrong: its accumulators alias its buffers.
        rounds: Timed rounds; with 0, only check results and count bytes.
        names: Names of other packages' variants to run; None for all. Ours and PyTorch's always run.
        entries: Entries for :class:`burst_attention.testing.WorkerPool`, which say where the ranks run; None for plain
            processes.
        link: Rate of each node's link in bits per second, as set for ``entries``; None for no limit.
        timeout: Seconds that one call may take.

    Returns:
        Dicts with these keys:

        - ``name``, ``package``, ``version``, ``detail``;
        - ``passes``: ``forward`` or ``forward and backward``;
        - ``refused``: reason why there is no result, or None;
        - ``errors``, ``bounds``: relative L2 error and its limit, by tensor;
        - ``correct``: whether all errors are within their limits;
        - ``bytes``: bytes that each rank gave to the process group in one call;
        - ``transport_bytes``: bytes by the plan's count, without the agreements' records; None for other packages;
        - ``seconds``: the slowest rank's seconds in each round;
        - ``copying``: seconds of each round that the stand-in spent on copies;
        - ``ratios``: time divided by that of ours with the same passes, by round (above 1: ours is faster);
        - ``ratios_without_copies``: ratios without the time of those copies;
        - ``shares``: estimated fewest seconds of our plan on such links, divided by its time, by round; None for other
          variants, and without ``link``.

    Raises:
        ValueError: ``world`` is below 2, or a name is unknown.
    """
    if world < 2:
        raise ValueError(f"world={world} must be at least 2; the packages' rings can't send to themselves")
    unknown = sorted(set(names or ()) - {v.name for v in VARIANTS})
    if unknown:
        raise ValueError(f"names has unknown variants {unknown}; choose from {', '.join(v.name for v in VARIANTS)}")
    chosen = [v for v in VARIANTS if names is None or not isinstance(v, Theirs) or v.name in names]
    refused = {variant.name: refusal(variant, world, workload) for variant in chosen}
    with (
        tempfile.TemporaryDirectory(prefix="burst-peers-") as folder,
        WorkerPool(world, threads=1, timeout=timeout, entries=entries) as pool,
    ):
        if rounds and workload.device == "cpu":
            rates = limited(calibrated(pool), link)
            chosen = [replace(each, rates=rates) if each.name == CALIBRATED else each for each in chosen]
        pool.run(prepare, workload.device, folder, timeout=timeout)
        outcomes = contest(pool, chosen, workload, rounds, refused=refused, timeout=timeout)
        ours = [own for own in outcomes if isinstance(own.variant, Ours) and own.variant.has_backward]
        timed = [own for own in ours if own.seconds and link is not None]
        passes = {own.variant.name: pool.run(_passes, own.variant, workload, link)[0] for own in timed}
    return [_row(own) | {"shares": _shares(own, passes.get(own.variant.name))} for own in outcomes]


def _passes(variant: Ours, workload: Workload, link: float) -> list[Exchanged] | None:
    """Run on a rank: return the exchanges of the variant's plan; None on routes that forward shards."""
    plan = ready(variant, workload).call.plan
    if plan is None or not plan.schedule.route.direct:
        return None
    return exchanged(plan, PAYLOAD * link)


def _shares(own: Outcome, passes: Sequence[Exchanged] | None) -> list[float] | None:
    """Divide each round's bound by its time. Both are of one round, so a slower machine changes both."""
    if passes is None:
        return None
    rounds = zip(own.processor, own.seconds, strict=True)
    return [bound_of(passes, processor, cores()) / seconds for processor, seconds in rounds]


def _row(own: Outcome) -> dict[str, Any]:
    variant = own.variant
    installed = own.refused is None or not own.refused.startswith("not installed")
    # A variant's time is the numerator of its ratio, so leaving out copies reduces the ratio by their share.
    rest = [1 - copies / seconds for copies, seconds in zip(own.aside, own.seconds, strict=True)]
    return {
        "name": variant.name,
        "package": package_of(variant),
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


def prepare(device: str, folder: str) -> None:
    """Install the stand-ins, or set up the GPU; call it once on each rank, before anything else.

    ``folder``: an empty one, so that plans find no rates of earlier runs.
    """
    os.environ["XDG_CONFIG_HOME"] = folder
    flash_attn_stand_in.install_adapters()
    if device == "cpu":
        flash_attn_stand_in.install()
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    if world > torch.cuda.device_count():
        raise ValueError(f"world={world} exceeds the {torch.cuda.device_count()} GPUs; use at most one rank per GPU")
    torch.cuda.set_device(rank)
    dist.destroy_process_group()  # the pool's group supports gloo only
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)


def cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one of ``compare``'s rows, for the terminal and the page."""
    name = {"variant": f"{row['name']} {row['version'] or ''}".strip(), "passes": row["passes"]}
    if not row["correct"]:
        return name | {"s": row["refused"] or "WRONG"}
    found = name | {
        "s": spread(row["seconds"]),
        "ratio": spread(row["ratios"], ".3f"),
        "without copies": spread(row["ratios_without_copies"], ".3f"),
        "sent per rank": bytes_text(statistics.fmean(row["bytes"])) if row["bytes"] else "-",
    }
    if row.get("shares"):
        found["share of bound"] = spread(row["shares"])
    return found


def show(console: Console, rows: list[dict[str, Any]], title: str) -> None:
    """Print ``compare``'s rows as a table, followed by the reasons why some have no figures."""
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
            notes.append(f"{row['name']}: relative L2 of {name} is {error:.1e}; the limit is {row['bounds'][name]:.1e}")
    console.print(terminal(lines, title=title))
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class PeersArguments(TimedArguments):
    rounds: int = 5
    """Timed rounds; 0: only check results and count bytes."""
    device: Literal["cpu", "cuda"] = "cpu"
    link: str | None = None
    """Rate of each node's link, such as 100mbit; each rank is then a node of an emulated cluster."""
    only: tuple[str, ...] | None = None
    """Variants of other packages to run, such as "yunchang zigzag"; default: all."""


def main(arguments: list[str]) -> None:
    a = asked(PeersArguments(), __doc__, "burst bench peers", arguments)
    workload, link = a.workload.at(a.seq_len, device=a.device), None
    with ExitStack() as stack:
        entries = None
        if a.link is not None:
            link = parse_rate(a.link)
            entries = stack.enter_context(Cluster(a.world, 1, rate=link)).entries()
        try:
            rows = compare(a.world, workload, a.rounds, names=a.only, entries=entries, link=link)
        except ValueError as error:
            raise SystemExit(f"burst bench peers: {error}") from error
    over = f", links of {a.link}" if a.link else ""
    show(Console(width=max(Console().width, 130)), rows, f"{a.title}, {a.world} ranks x 1 thread{over}")
    a.write(rows=rows)
