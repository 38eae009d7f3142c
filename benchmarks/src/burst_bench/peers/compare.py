"""Our attention against other packages'.

All variants compute one causal attention, forward and backward. They take turns, round by round, on the same ranks and
cores, with one thread per rank and the same flash kernels. On CPUs these are torch's kernels; flash_attn_stand_in.py
offers them to the packages under flash_attn's names. ringmaster calls torch's kernel through transformers. Each result
is first compared with a single device's in fp32. A wrong variant is printed with its error and without a time.

    burst bench peers [--world 2] [--seq-len 4096] [--heads 8] [--head-dim 128] [--rounds 3] [--json FILE]
                      [--link 100mbit]

``burst`` is what a newcomer gets: its plan measures links and kernels itself. ``burst, calibrated`` plans with the
rates of ``burst calibrate``. PyTorch in one process uses as many threads as there are ranks. With --link each rank is a
node of an emulated cluster with links of this rate (it needs root and iproute2).

The program prints how to install packages that are missing. With --device cuda it runs one rank per GPU with NCCL and
the real flash_attn; that mode has never been run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.testing import WorkerError

from ..arguments import CallArguments, asked
from ..cluster import Cluster, parse_rate
from ..harness.calibration import calibrated, limited
from ..harness.calls import TOLERANCE, Variant, checked, ready, reference
from ..harness.traffic_meter import TrafficMeter
from ..harness.turns import ratios, seconds_of, take_turns
from ..harness.workload import Workload
from ..pool import WorkerPool
from ..tables import bytes_text, spread
from . import flash_attn_stand_in
from .variants import CALIBRATED, OURS, STRONGEST, VARIANTS, Theirs, comparable, package_version, refusal

# Columns. Seconds have none: their medians come from different rounds, so their quotients are not the ratios.
TIMES, BARE_TIMES = f"time / {OURS}'s", "without copies"
SENT, SHARE = "sent per rank", f"of {STRONGEST}'s"
LEGEND = {
    TIMES: f"its time divided by {OURS}'s of the same round: median (least to greatest); above 1, {OURS} is faster",
    BARE_TIMES: "the same without the time in which the stand-in for flash_attn copies tensors; a GPU needs no copies",
    SENT: "payload that a rank hands to its process group in a call, mean of the ranks; -: can't be counted",
    SHARE: f"the bytes divided by those of {STRONGEST}",
}
NOT_TIMED = "is right and not timed: without a flash kernel for CPUs, it computes whole matrices of scores"


@dataclass
class Outcome:
    """Outcome of a variant; it has figures only if its results were right."""

    variant: Variant
    refused: str | None = None  # reason why it has no result
    comparable: bool = True  # whether its kernels are those of the others; if not, it is not timed
    # Relative L2 error and its limit over all ranks, by tensor.
    errors: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    # Bytes that each rank gave to the process group in one call; None if some rank could not count.
    bytes: list[int] | None = None
    seconds: list[float] = field(default_factory=list)  # the slowest rank's seconds in each round
    copying: list[float] = field(default_factory=list)  # seconds of each round that the stand-in spent on copies
    # ``seconds`` divided by the first variant's, by round (above 1: ours is faster).
    ratios: list[float] = field(default_factory=list)

    @property
    def correct(self) -> bool:
        """Whether all errors are within their limits; NaN is not."""
        return bool(self.errors) and all(error <= self.bounds[name] for name, error in self.errors.items())

    @property
    def ratios_without_copies(self) -> list[float]:
        """Return the ratios without the copies' share of the variant's time."""
        rounds = zip(self.ratios, self.copying, self.seconds, strict=False)
        return [ratio * (1 - copies / seconds) for ratio, copies, seconds in rounds]

    @property
    def mean_bytes(self) -> float | None:
        return statistics.fmean(self.bytes) if self.bytes else None

    def row(self) -> dict[str, Any]:
        """Return the figures for the file."""
        name = {"name": self.variant.name, "version": package_version(self.variant)}
        figures = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "variant"}
        return name | {"correct": self.correct} | figures


def compare(
    world: int,
    workload: Workload,
    rounds: int,
    *,
    names: Sequence[str] | None = None,
    entries: Sequence[Callable[[], str]] | None = None,
    link: float | None = None,
    timeout: float = 600.0,
) -> list[Outcome]:
    """Check, count and time every variant; return outcomes in the order of ``VARIANTS``.

    Args:
        world: Number of ranks, at least 2.
        workload: Sizes of the call. In fp32, ring-flash-attn's gradients are wrong: its accumulators alias its buffers.
        rounds: Timed rounds; with 0, only check results and count bytes.
        names: Names of other packages' variants to run; None for all. Ours and PyTorch's always run.
        entries: Entries for :class:`burst_bench.pool.WorkerPool`, which say where the ranks run; None for plain
            processes.
        link: Rate of each node's link in bits per second, as set for ``entries``; None for no limit.
        timeout: Seconds that one call may take.

    ValueError: ``world`` is below 2, or a name is unknown.
    """
    if world < 2:
        raise ValueError(f"world={world} must be at least 2; the packages' rings can't send to themselves")
    unknown = sorted(set(names or ()) - {v.name for v in VARIANTS})
    if unknown:
        raise ValueError(f"names has unknown variants {unknown}; choose from {', '.join(v.name for v in VARIANTS)}")
    chosen = [v for v in VARIANTS if names is None or not isinstance(v, Theirs) or v.name in names]
    with (
        tempfile.TemporaryDirectory(prefix="burst-peers-") as folder,
        WorkerPool(world, threads=1, timeout=timeout, entries=entries) as pool,
    ):
        if rounds and workload.device == "cpu":
            rates = limited(calibrated(pool), link)
            chosen = [replace(each, rates=rates) if each.name == CALIBRATED else each for each in chosen]
        pool.run(prepare, workload.device, folder, timeout=timeout)
        expected, stock = reference(workload, dense=False)
        outcomes = [Outcome(each, refusal(each, world, workload), comparable(each, workload)) for each in chosen]
        for own in outcomes:
            if own.refused is None:
                _check(pool, own, workload, expected, timeout)
                own.bounds = {name: TOLERANCE * stock[name] for name in own.errors}
        right = [own for own in outcomes if own.correct]
        for own in right:  # the second call of each: everything is compiled before it is timed
            counts = pool.run(counted, own.variant, workload, timeout=timeout)
            own.bytes = None if None in counts else counts
        measured = [own for own in right if own.comparable]
        turns = take_turns([partial(_slowest, pool, own.variant, workload, timeout) for own in measured], rounds)
        for own, took in zip(measured, turns, strict=True):
            own.seconds, own.copying = [each.seconds for each in took], [each.copying for each in took]
            own.ratios = ratios(outcomes[0].seconds, own.seconds) if outcomes[0].correct else []
    return outcomes


def _check(pool: WorkerPool, own: Outcome, workload: Workload, expected: list[Tensor], timeout: float) -> None:
    """Compare a variant's results with ``expected``; a variant that raises counts as refused."""
    try:
        own.errors = pool.run(checked, own.variant, workload, expected, timeout=timeout)[0]
    except WorkerError as error:
        if pool.broken:  # a rank is lost or out of step, so no later comparison is possible
            raise
        own.refused = str(error.errors[0]).strip().splitlines()[0] or type(error.errors[0]).__name__


def counted(variant: Variant, workload: Workload) -> int | None:
    """Run on a rank: return the bytes given to the process groups in one call; None if they can't be counted."""
    with TrafficMeter() as meter:
        ready(variant, workload).run()
    return meter.sent


class Took(NamedTuple):
    """Seconds of one call: of all its work, and of the stand-in's copies."""

    seconds: float
    copying: float


def timed(variant: Variant, workload: Workload) -> Took:
    """Run on a rank: time one call."""
    own, before = ready(variant, workload), flash_attn_stand_in.copying()
    seconds = seconds_of(own.run)
    return Took(seconds, flash_attn_stand_in.copying() - before)


def _slowest(pool: WorkerPool, variant: Variant, workload: Workload, timeout: float) -> Took:
    """Return :func:`timed` of the slowest rank."""
    return max(pool.run(timed, variant, workload, timeout=timeout))


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


def show(console: Console, outcomes: Sequence[Outcome], title: str) -> None:
    """Print a table, followed by the reasons why some variants have no figures."""
    strongest = next((own.mean_bytes for own in outcomes if own.variant.name == STRONGEST), None)
    lines, notes = [], []
    for own in outcomes:
        row = own.row()
        lines.append({"variant": f"{row['name']} {row['version'] or ''}".strip()})
        if not own.correct:
            lines[-1][TIMES] = "not run" if own.refused else "WRONG"
            notes += [f"{row['name']}: {own.refused}"] if own.refused else []
            wrong = {name: error for name, error in own.errors.items() if not error <= own.bounds[name]}
            for name, error in wrong.items():
                notes.append(
                    f"{row['name']}: relative L2 of {name} is {error:.1e}; the limit is {own.bounds[name]:.1e}"
                )
            continue
        if own.ratios:
            lines[-1] |= {TIMES: spread(own.ratios), BARE_TIMES: spread(own.ratios_without_copies)}
        lines[-1][SENT] = bytes_text(own.mean_bytes)
        if strongest and own.mean_bytes is not None:
            lines[-1][SHARE] = f"{own.mean_bytes / strongest:.3f}"
        if not own.comparable:
            notes.append(f"{row['name']} {NOT_TIMED}")
    print_table(console, lines, title=title, legend=LEGEND)
    if outcomes[0].ratios:
        console.print(f"a call of {OURS} takes {spread(outcomes[0].seconds)} s", highlight=False)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class PeersArguments(CallArguments):
    seq_len: int = 4096
    world: int = 2
    rounds: int = 3
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
            outcomes = compare(a.world, workload, a.rounds, names=a.only, entries=entries, link=link)
        except ValueError as error:
            raise SystemExit(f"burst bench peers: {error}") from error
    over = f", links of {a.link}" if a.link else ""
    show(console_of_tables(), outcomes, f"{a.title}, {a.world} ranks x 1 thread{over}")
    a.write(rows=[own.row() for own in outcomes])
