"""A run of ``burst bench``: worlds, links and lengths in turn, engines side by side, rows of figures at the end."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from burst_attention.launch.join import cores
from burst_attention.testing import WorkerPool

from .cluster import INTERFACE, Cluster
from .job import Job
from .judge import AGREEMENT, judge
from .measure import Figures, measure
from .results import Results, Row

CHECKED_TOKENS = 512
LOSS_AGREEMENT = 1e-3  # of a mean over all tokens
PATIENCE = 6 * 3600.0
STRAGGLE = 120.0  # seconds between the first rank that answers and the last


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to compare.

    Attributes:
        job: its task, engines, sizes and rounds; its ``seq_len`` is not looked at.
        seq_lens: tokens.
        worlds: numbers of local ranks; not looked at with ``cluster``.
        cluster: (nodes, ranks of each) of an emulated cluster.
        links: rates of its nodes' links in bits per second; None for no limit.
    """

    job: Job
    seq_lens: Sequence[int]
    worlds: Sequence[int] = (2,)
    cluster: tuple[int, int] | None = None
    links: Sequence[float | None] = (None,)

    def run(self, *, command: str, say: Callable[[str], None] = lambda text: None) -> Results:
        """Measure everything. ``say`` is told what is under way."""
        rows: list[Row] = []
        for world in self.worlds if self.cluster is None else [self.cluster[0] * self.cluster[1]]:
            with World.of(world, self.cluster, say=say) as ranks:
                rows += ranks.rows(self.job, self.seq_lens, self.links)
        return results_of(self.job, rows, command=command, cluster=self.cluster)


def results_of(job: Job, rows: Sequence[Row], *, command: str, cluster: tuple[int, int] | None) -> Results:
    """Rows of one task with what tells where they come from."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    told = setting(job, cluster)
    return Results(task=job.task, command=command, date=date, machine=machine(), setting=told, rows=list(rows))


class World:
    """A group of ranks that measures, on this machine or in an emulated cluster."""

    def __init__(self, pool: WorkerPool, cluster: Cluster | None, per_node: int, say: Callable[[str], None]) -> None:
        self.pool, self.cluster, self.per_node, self.say = pool, cluster, per_node, say
        self._judged: dict[Job, dict[str, tuple[float, float]]] = {}
        self._typical: dict[Job, list[float]] = {}  # what the engines agreed on, by what they computed

    @classmethod
    @contextmanager
    def of(
        cls, world: int, cluster: tuple[int, int] | None = None, *, say: Callable[[str], None] = lambda text: None
    ) -> Iterator[World]:
        """Start ``world`` ranks; with ``cluster`` (nodes, ranks of each), each in its node."""
        threads = max(1, cores() // world)
        if cluster is None:
            with WorkerPool(world, threads=threads, timeout=1800) as pool:
                yield cls(pool, None, 1, say)
            return
        with (
            Cluster(*cluster) as made,
            WorkerPool(world, threads=threads, timeout=1800, entries=made.entries()) as pool,
        ):
            yield cls(pool, made, cluster[1], say)

    def rows(self, job: Job, seq_lens: Sequence[int], links: Sequence[float | None] = (None,)) -> list[Row]:
        """One for each length, link and engine of ``job``."""
        return [row for seq_len in seq_lens for row in self._at(job, seq_len, links)]

    def judge(self, job: Job) -> dict[str, tuple[float, float]]:
        """(error against fp64, what it may be) of each engine; done once for each kind of job."""
        key = job.at(CHECKED_TOKENS, rounds=1, weigh=True, timeline=False)
        if key not in self._judged:
            self.say(f"{self.pool.world} ranks, {job.task}: checking against fp64 at {CHECKED_TOKENS} tokens")
            self._judged[key] = self._run(judge, key)[0]
        return self._judged[key]

    def _run(self, function: Callable[..., Any], job: Job) -> list[Any]:
        """On all ranks; one that fails is not waited for by the others' deadlines."""
        return self.pool.run(function, job, timeout=PATIENCE, patience=STRAGGLE)

    def _at(self, job: Job, seq_len: int, links: Sequence[float | None]) -> Iterator[Row]:
        judged = self.judge(job)
        weighed: dict[str, list[Figures]] = {}
        for n, link in enumerate(links):
            if self.cluster is not None:
                self.cluster.set_rate(link)
            elif link is not None:
                raise ValueError(f"links={links} need a cluster: this machine's own is not touched")
            self.say(f"{self.pool.world} ranks, {job.task}, {seq_len:,} tokens, link {_rate(link)}")
            interface = None if self.cluster is None else INTERFACE
            told = self._run(measure, job.at(seq_len, weigh=job.weigh and n == 0, interface=interface))
            by_engine = {figures[0].engine: list(figures) for figures in zip(*told, strict=True)}
            weighed = weighed or by_engine
            typical = self._agreed(job.at(seq_len), by_engine)
            for spec, figures in by_engine.items():
                yield self._row(job.at(seq_len), link, figures, weighed[spec], typical, judged.get(spec))
        if self.cluster is not None:
            self.cluster.set_rate(None)

    def _agreed(self, job: Job, by_engine: dict[str, list[Figures]]) -> list[float]:
        """The median over engines of each of their results; one by itself is held to what several agreed on before."""
        key = replace(job, engines=(), rounds=1, weigh=False, timeline=False)
        prints = [figures[0].prints for figures in by_engine.values() if figures[0].prints]
        if len(prints) > 1 or not self._typical.get(key):
            self._typical[key] = [_median([p.value for p in column]) for column in zip(*prints, strict=True)]
        return self._typical[key]

    def _wire(self, figures: list[Figures]) -> float | None:
        """Bytes by the interfaces, per rank and round."""
        counted = [n for each in figures for n in each.wire]
        return statistics.fmean(counted) / self.per_node if self.cluster is not None and counted else None

    def _row(
        self,
        job: Job,
        link: float | None,
        figures: list[Figures],
        weighed: list[Figures],
        typical: list[float],
        judged: tuple[float, float] | None,
    ) -> Row:
        spec = figures[0].engine
        row = Row(engine=spec, seq_len=job.seq_len, world=self.pool.world, link=link)
        if figures[0].refused or judged is None:
            return replace(
                row, refused=figures[0].refused or f"can't do {CHECKED_TOKENS} tokens, so it was not checked"
            )
        error, bound = _worst(job, figures[0], weighed[0].sampled, typical, judged)
        if not error <= bound:
            return replace(row, error=error, bound=bound)
        seconds = [max(each) for each in zip(*(f.seconds for f in figures), strict=True)]
        median = statistics.median(seconds)
        return replace(
            row,
            error=error,
            bound=bound,
            seconds=seconds,
            tokens_per_second=job.seq_len / median,
            flops_per_second=job.flops() / median,
            bytes_counted=_mean([f.counted for f in weighed]),
            bytes_predicted=_mean([f.predicted for f in weighed]),
            bytes_wire=self._wire(figures),
            nodes=None if self.cluster is None else self.cluster.nodes,
            peak_memory=max((f.peak for f in weighed if f.peak is not None), default=None),
            peak_resident=max((f.resident for f in weighed if f.resident is not None), default=None),
            timeline=[f.spans for f in figures] if figures[0].spans else [],
        )


def _worst(
    job: Job, figures: Figures, sampled: float | None, typical: list[float], judged: tuple[float, float]
) -> tuple[float, float]:
    """Of: fp64 at a short length, fp64 in some rows at this one, the other engines at this one; with its bound."""
    error, bound = judged
    if sampled is not None and not sampled <= error:
        error = sampled
    for n, (own, value) in enumerate(zip(figures.prints, typical, strict=True)):
        agreement = AGREEMENT[job.dtype]
        if job.task == "train" and n == 0:
            agreement = min(agreement, LOSS_AGREEMENT)
        apart = abs(own.value - value) / (own.size or 1.0)
        if not apart <= agreement:  # NaN too
            return apart, agreement
    return error, bound


def _median(values: list[float]) -> float:
    """Of those that are numbers."""
    return statistics.median([value for value in values if math.isfinite(value)] or [math.nan])


def _mean(values: Sequence[float | None]) -> float | None:
    """None if some rank does not know."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _rate(link: float | None) -> str:
    return "without a limit" if link is None else f"at {link / 1e6:,.0f} Mbit/s"


def machine() -> str:
    """This machine in a line."""
    info = Path("/proc/cpuinfo")
    names = [x.partition(":")[2].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
    kind = names[0] if names else platform.machine()
    return (
        f"{cores()} cores of {kind}, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def setting(job: Job, cluster: tuple[int, int] | None) -> dict[str, Any]:
    """The sizes that all rows share."""
    told: dict[str, Any] = {
        "heads": job.heads,
        "key-value heads": job.kv_heads,
        "head dim": job.head_dim,
        "dtype": job.dtype,
    }
    if job.task != "attention":
        sizes = {
            "layers": job.layers,
            "width": job.hidden,
            "feed-forward": job.intermediate,
            "vocabulary": job.vocabulary,
        }
        told |= sizes
    if cluster is not None:
        told["cluster"] = f"{cluster[0]} nodes x {cluster[1]} ranks, emulated"
    return told
