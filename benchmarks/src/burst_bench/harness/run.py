"""Run a measurement over ranks: for each link rate and length, compare the strategies and return rows of figures."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from burst_attention.launch.join import cores
from burst_attention.planner.rates import Rates

from ..cluster import INTERFACE, Cluster
from ..pool import WorkerPool
from ..tables import link_text
from .calibration import calibrated, forget_links, limited
from .judge import AGREEMENT, judge
from .measure import Measurement, measure
from .origin import origin
from .results import Results, Row
from .workload import Workload

CHECKED_TOKENS = 512
LOSS_AGREEMENT = 1e-3  # relative difference of losses, each a mean over all tokens
PATIENCE = 6 * 3600.0
STRAGGLE = 120.0  # seconds that the last rank may take longer than the first


class World:
    """A group of ranks for measurements, on this machine or in an emulated cluster."""

    def __init__(
        self,
        pool: WorkerPool,
        cluster: Cluster | None,
        per_node: int,
        say: Callable[[str], None],
        *,
        calibrates: bool = False,
    ) -> None:
        self.pool, self.cluster, self.per_node, self.say = pool, cluster, per_node, say
        self.calibrates = calibrates and pool.world > 1
        self._rates: Rates | None = None  # with unlimited links
        self._kept = tempfile.TemporaryDirectory(prefix="burst-rates-")  # of what plans measure, by link
        self._judged: dict[Workload, dict[str, tuple[float, float]]] = {}
        self._typical: dict[Workload, list[float]] = {}  # the strategies' common results, by workload

    @classmethod
    @contextmanager
    def of(
        cls,
        world: int,
        cluster: tuple[int, int] | None = None,
        *,
        calibrate: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> Iterator[World]:
        """Start ``world`` ranks as processes, or on a ``cluster`` of (nodes, ranks per node); ``say`` reports progress.

        ``calibrate``: measure ranks and links first, and adapt the rates to each limit of the links. Plans use them.
        """
        with ExitStack() as stack:
            made = None if cluster is None else stack.enter_context(Cluster(*cluster))
            options = {"threads": max(1, cores() // world), "entries": None if made is None else made.entries()}
            pool = stack.enter_context(WorkerPool(world, timeout=1800, **options))
            yield cls(pool, made, 1 if cluster is None else cluster[1], say, calibrates=calibrate)

    def rows(self, workload: Workload, seq_lens: Sequence[int], links: Sequence[float | None] = (None,)) -> list[Row]:
        """Return a row for each length, link and strategy of ``workload``."""
        return [row for seq_len in seq_lens for row in self._at(workload, seq_len, links)]

    def judge(self, workload: Workload) -> dict[str, tuple[float, float]]:
        """Return (error against fp64, bound) of each strategy; computed once for each kind of workload."""
        key = workload.at(CHECKED_TOKENS, rounds=1, resources=True, timeline=False)
        if key not in self._judged:
            self.say(f"{self.pool.world} ranks, {workload.task}: checking against fp64 at {CHECKED_TOKENS} tokens")
            self._judged[key] = self._run(judge, key)[0]
        return self._judged[key]

    def rates(self, link: float | None) -> Rates | None:
        """Return the rates of these ranks at this limit of their links; None without calibration."""
        if not self.calibrates:
            return None
        if self._rates is None:
            self.say(f"{self.pool.world} ranks: measuring kernels and links")
            if self.cluster is not None:
                self.cluster.set_rate(None)
            self._rates = calibrated(self.pool)
        return limited(self._rates, link)

    def _run(self, function: Callable[..., Any], workload: Workload) -> list[Any]:
        """Run a function on all ranks; after a rank fails, don't wait for the full timeout of the others."""
        return self.pool.run(function, workload, timeout=PATIENCE, patience=STRAGGLE)

    def _at(self, workload: Workload, seq_len: int, links: Sequence[float | None]) -> Iterator[Row]:
        judged = self.judge(workload)
        resources: dict[str, list[Measurement]] = {}  # of the first link, unless plans differ between links
        for n, link in enumerate(links):
            rates = self.rates(link)
            if self.cluster is not None:
                self.cluster.set_rate(link)
                self.pool.run(forget_links, f"{self._kept.name}/{link}")
            elif link is not None:
                raise ValueError(f"links={links} need a cluster; this program never changes this machine's own network")
            self.say(f"{self.pool.world} ranks, {workload.task}, {seq_len:,} tokens, {link_text(link)}")
            interface = None if self.cluster is None else INTERFACE
            fresh = n == 0 or self.calibrates
            alone = workload.resources and fresh
            at = workload.at(seq_len, resources=alone, interface=interface, rates=rates)
            by_rank = self._run(measure, at)
            by_strategy = {ranks[0].strategy: list(ranks) for ranks in zip(*by_rank, strict=True)}
            resources = by_strategy if fresh else resources
            typical = self._agreed(workload.at(seq_len), by_strategy)
            for spec, ranks in by_strategy.items():
                yield self._row(workload.at(seq_len), link, ranks, resources[spec], typical, judged.get(spec))
        if self.cluster is not None:
            self.cluster.set_rate(None)

    def _agreed(self, workload: Workload, by_strategy: dict[str, list[Measurement]]) -> list[float]:
        """Return the median over strategies of each fingerprint.

        A single strategy is compared with the median of an earlier comparison of several strategies.
        """
        key = replace(workload, strategies=(), rounds=1, resources=False, timeline=False)
        fingerprints = [ranks[0].fingerprints for ranks in by_strategy.values() if ranks[0].fingerprints]
        if len(fingerprints) > 1 or not self._typical.get(key):
            self._typical[key] = [_median([p.value for p in column]) for column in zip(*fingerprints, strict=True)]
        return self._typical[key]

    def _wire(self, ranks: list[Measurement]) -> float | None:
        """Return the bytes that the interfaces counted, per rank and round."""
        counted = [n for each in ranks for n in each.wire]
        return statistics.fmean(counted) / self.per_node if self.cluster is not None and counted else None

    def _row(
        self,
        workload: Workload,
        link: float | None,
        ranks: list[Measurement],
        resources: list[Measurement],
        typical: list[float],
        judged: tuple[float, float] | None,
    ) -> Row:
        spec = ranks[0].strategy
        row = Row(strategy=spec, seq_len=workload.seq_len, world=self.pool.world, link=link, chosen=ranks[0].chosen)
        if ranks[0].refused or judged is None:
            return replace(row, refused=ranks[0].refused or f"can't do {CHECKED_TOKENS} tokens, so it was not checked")
        error, bound = _worst(workload, ranks[0], resources[0].sampled, typical, judged)
        if not error <= bound:
            return replace(row, error=error, bound=bound)
        seconds = [max(each) for each in zip(*(rank.seconds for rank in ranks), strict=True)]
        median = statistics.median(seconds)
        return replace(
            row,
            error=error,
            bound=bound,
            seconds=seconds,
            tokens_per_second=workload.seq_len / median,
            flops_per_second=workload.flops() / median,
            bytes_counted=_of_all(statistics.fmean, [rank.counted for rank in resources]),
            bytes_predicted=_of_all(statistics.fmean, [rank.predicted for rank in resources]),
            bytes_wire=self._wire(ranks),
            nodes=None if self.cluster is None else self.cluster.nodes,
            peak_memory=_of_all(max, [rank.peak for rank in resources]),
            peak_resident=_of_all(max, [rank.resident for rank in resources]),
            timeline=[rank.spans for rank in ranks] if ranks[0].spans else [],
        )


def _worst(
    workload: Workload, measured: Measurement, sampled: float | None, typical: list[float], judged: tuple[float, float]
) -> tuple[float, float]:
    """Return the largest of three errors, with its bound.

    They are against fp64 at a short length, fp64 in some rows at this length, and the other strategies at this length.
    """
    error, bound = judged
    if sampled is not None and not sampled <= error:
        error = sampled
    for n, (own, value) in enumerate(zip(measured.fingerprints, typical, strict=True)):
        agreement = AGREEMENT[workload.dtype]
        if workload.task == "train" and n == 0:
            agreement = min(agreement, LOSS_AGREEMENT)
        apart = abs(own.value - value) / (own.size or 1.0)
        if not apart <= agreement:  # also true for NaN
            return apart, agreement
    return error, bound


def _median(values: list[float]) -> float:
    """Return the median of the finite values."""
    return statistics.median([value for value in values if math.isfinite(value)] or [math.nan])


def _of_all(join: Callable[..., Any], values: Sequence[float | None]) -> Any:
    """Join the ranks' values; return None if a rank has none."""
    return None if None in values else join(values)


def results_of(
    workload: Workload, rows: list[Row], *, command: str, cluster: tuple[int, int] | None, by_rates: bool
) -> Results:
    """Return the rows of one task, with the sizes that all rows share, and their origin.

    ``cluster``: (nodes, ranks per node), or None. ``by_rates``: whether plans used rates that were measured before.
    """
    names = {"heads": "heads", "key-value heads": "kv_heads", "head dim": "head_dim", "dtype": "dtype"}
    if workload.task != "attention":
        names |= {"layers": "layers", "width": "hidden", "feed-forward": "intermediate", "vocabulary": "vocabulary"}
    sizes = {text: getattr(workload, name) for text, name in names.items()}
    if cluster is not None:
        sizes["cluster"] = f"{cluster[0]} nodes x {cluster[1]} ranks, emulated"
    if by_rates:
        sizes["plans"] = "by rates measured before, and each link's limit"
    return Results(task=workload.task, setting=sizes, rows=rows, **origin(command))
