"""The cost model held against what is measured, on emulated clusters: time predicted and taken, and plans chosen.

Each cluster is calibrated first, by ``burst calibrate``'s own measurements; none of the configurations that are timed
then is in them. Every way to compute a call is timed in turns; printed are the median and the worst error of predicted
times, and how often the way that the planner chose takes no more than a tenth longer than the fastest.

    python benchmarks/cost_model.py [--quick] [--rounds 3] [--json docs/results/cost-model.json]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.attention.hardware import shape_of
from burst_attention.planner.choice import Candidate, Planner
from burst_attention.planner.rates import Rates
from burst_attention.planner.schedule import Schedule, make_schedule
from burst_attention.testing import WorkerPool

from ..arguments import asked, command_given
from ..cluster.emulated import Cluster, parse_cluster, parse_rate
from ..harness.calibration import calibrated, limited
from ..harness.origin import origin
from ..harness.results import write_json
from ..harness.turns import seconds_of, take_turns
from ..tables import terminal

HEADS, DIM = 8, 128
MASKS = {
    "causal": lambda s: Mask(),
    "window": lambda s: Mask(window=s // 8),
    "documents": lambda s: Mask(cu_seqlens=[0, s // 8, s // 2, s // 2 + 1, s]),
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    quick: bool = False
    """A handful of configurations."""
    clusters: tuple[str, ...] = ("2x1", "4x1", "2x2", "8x1")
    links: tuple[str, ...] = ("50mbit", "200mbit", "1gbit")
    seq_len: int = 2048
    rounds: int = 3
    json: Path | None = None


@dataclass(frozen=True)
class Setting:
    """One call on one cluster, to be computed in several ways."""

    cluster: str
    link: str
    mask: str
    kv_heads: int
    seq_len: int

    def schedule(self, rates: Rates, layout: str) -> Schedule:
        """Of rank 0, heads and what travels left open."""
        nodes, ranks = parse_cluster(self.cluster)
        planner = Planner(rates, tuple(node for node in range(nodes) for _ in range(ranks)))
        options = {"mask": MASKS[self.mask](self.seq_len), "layout": layout, "route": "direct", "heads": "auto"}
        return make_schedule(self.seq_len, **options, rank=0, world=nodes * ranks, planner=planner)


@dataclass(frozen=True)
class Way:
    """How: a layout and a candidate of the planner's."""

    layout: str
    candidate: Candidate


def ways(setting: Setting, rates: Rates) -> dict[Way, float]:
    """Seconds predicted of what may be the best of each layout, and of heads that nobody cuts; the planner's choice is
    the first of the fastest."""
    sizes = {"q_heads": HEADS, "kv_heads": setting.kv_heads, "head_dim": DIM}
    shape, found = shape_of(torch.bfloat16, batch=1, **sizes), dict[Way, float]()
    for layout in ("zigzag", "contiguous"):
        predictions = setting.schedule(rates, layout).predictions(shape, "auto")
        run = sorted((each for each in predictions if each.forward), key=lambda each: each.seconds)
        first_of_each = {each.candidate.groups.query: each for each in reversed(run)}
        found |= {Way(layout, each.candidate): each.seconds for each in first_of_each.values()}
    return found


@cache
def ready(setting: Setting, way: Way) -> Any:
    """On a rank: what computes the call once; built when all ranks ask for it."""
    torch.set_num_threads(1)
    groups = way.candidate.groups
    plan = make_plan(
        setting.seq_len,
        mask=MASKS[setting.mask](setting.seq_len),
        layout=way.layout,
        route="direct",
        heads=groups.query,
        keep=groups.keep,
        waves=groups.waves,
        assignment=way.candidate.travels,
    )
    counts = HEADS, setting.kv_heads, setting.kv_heads, HEADS
    q, k, v, dout = (torch.randn(1, n, plan.length, DIM, dtype=torch.bfloat16) for n in counts)

    def call() -> None:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(burst_attention(*inputs, plan), inputs, dout)

    call()
    return call


def timed(setting: Setting, way: Way) -> float:
    """On a rank: seconds of one call."""
    return seconds_of(ready(setting, way))


def slowest(pool: WorkerPool, setting: Setting, way: Way) -> float:
    return max(pool.run(timed, setting, way, timeout=600))


def settings(a: Arguments, cluster: str, link: str) -> Iterator[Setting]:
    """Calls on one cluster with one link."""
    cases: Sequence[tuple[str, int]] = [*product(MASKS, (HEADS, 2))]
    if a.quick:
        cases = [("causal", HEADS), ("window", 2)]
    for mask, kv_heads in cases:
        yield Setting(cluster, link, mask, kv_heads, a.seq_len)


def measured(a: Arguments, cluster: str) -> Iterator[dict[str, Any]]:
    """A row for each way of each call."""
    nodes, ranks = parse_cluster(cluster)
    with Cluster(nodes, ranks) as network, WorkerPool(network.world, entries=network.entries(), timeout=600) as pool:
        unlimited = calibrated(pool)
        for link in a.links:
            network.set_rate(parse_rate(link))
            rates = limited(unlimited, parse_rate(link))
            for setting in settings(a, cluster, link):
                predicted = ways(setting, rates)
                took = take_turns([partial(slowest, pool, setting, way) for way in predicted], a.rounds)
                for (way, seconds), rounds in zip(predicted.items(), took, strict=True):
                    told = {"layout": way.layout, "way": str(way.candidate), "predicted": seconds, "seconds": rounds}
                    yield {**vars(setting), **told}


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors of predicted times, and how often the choice was nearly the best."""
    errors = [abs(row["predicted"] / min(row["seconds"]) - 1) for row in rows]
    calls: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        calls.setdefault(tuple(row[name] for name in ("cluster", "link", "mask", "kv_heads")), []).append(row)
    right = 0
    for of_call in calls.values():
        chosen = min(of_call, key=lambda row: row["predicted"])
        right += min(chosen["seconds"]) <= 1.1 * min(min(row["seconds"]) for row in of_call)
    return {
        "configurations": len(rows),
        "calls": len(calls),
        "median error": statistics.median(errors),
        "worst error": max(errors),
        "errors beyond 0.4": sum(error > 0.4 for error in errors),
        "choices within a tenth of the best": right,
    }


def main() -> None:
    a = asked(Arguments(), __doc__)
    if a.quick:
        a = replace(a, clusters=("2x1", "4x1"), links=("200mbit",), seq_len=1024, rounds=2)
    rows: list[dict[str, Any]] = []
    told: dict[str, float] = {}
    for cluster in a.clusters:
        rows += measured(a, cluster)
        told = summary(rows)
        if a.json is not None:  # after each: it takes a while
            write_json(a.json, {"summary": told, "rows": rows} | origin(command_given("cost_model", a.json)))
    lines = (
        {name: str(row[name]) for name in ("cluster", "link", "mask", "kv_heads", "layout", "way")}
        | {"predicted s": f"{row['predicted']:.3f}", "least s": f"{min(row['seconds']):.3f}"}
        for row in rows
    )
    console = Console()
    console.print(terminal(lines, title=f"S={a.seq_len}, H={HEADS}, D={DIM}, bf16, forward and backward"))
    for name, value in told.items():
        console.print(f"{name}: {value:.3g}")
