"""The planner's predictions against emulated clusters.

Before each link rate a cluster is calibrated as by ``burst calibrate``, which times none of the configurations below.
All candidates of a call are then timed in turns. The program prints the median and the worst error of predicted times.
It also prints how often what the planner picks takes at most a tenth longer than the fastest candidate.

    burst bench cost-model [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from burst_attention import Mask, Strategy, burst_attention, make_plan
from burst_attention.attention.hardware import shape_of
from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.plan.cost import Shape
from burst_attention.plan.schedule import Schedule
from burst_attention.planner.choice import Candidate
from burst_attention.planner.planner import Planner
from burst_attention.planner.rates import Rates

from ..arguments import WrittenArguments, asked
from ..cluster import Cluster, parse_cluster, parse_rate
from ..harness.calibration import calibrated, limited
from ..harness.turns import seconds_of, take_turns
from ..pool import WorkerPool

HEADS, DIM = 8, 128
MASKS = {
    "causal": lambda s: Mask(),
    "window": lambda s: Mask(window=s // 8),
    "documents": lambda s: Mask(cu_seqlens=[0, s // 8, s // 2, s // 2 + 1, s]),
}


@dataclass(frozen=True, kw_only=True)
class CostModelArguments(WrittenArguments):
    clusters: tuple[str, ...] = ("2x1", "4x1", "2x2", "8x1")
    links: tuple[str, ...] = ("50mbit", "200mbit", "1gbit")
    seq_len: int = 2048
    rounds: int = 3


@dataclass(frozen=True)
class CallSetting:
    """One call on one cluster; several candidates compute it."""

    cluster: str
    link: str
    mask: str
    kv_heads: int
    seq_len: int

    @property
    def shape(self) -> Shape:
        """The sizes of the call."""
        return shape_of(torch.bfloat16, batch=1, q_heads=HEADS, kv_heads=self.kv_heads, head_dim=DIM)

    def planned(self, rates: Rates, layout: str) -> tuple[Planner, Schedule]:
        """Return a planner and rank 0's schedule; what circulates and the Ulysses degree stay open."""
        nodes, ranks = parse_cluster(self.cluster)
        planner = Planner(rates, tuple(node for node in range(nodes) for _ in range(ranks)), self.shape)
        strategy, mask = Strategy(layout=layout, route="direct"), MASKS[self.mask](self.seq_len)
        return planner, planner.choose(self.seq_len, mask=mask, strategy=strategy, rank=0, world=nodes * ranks)


@dataclass(frozen=True)
class Choice:
    """A layout and one of the planner's candidates."""

    layout: str
    candidate: Candidate


def picked(setting: CallSetting, rates: Rates) -> tuple[Choice, float]:
    """Return what the planner picks, and its predicted seconds."""
    planner, schedule = setting.planned(rates, "auto")
    pick = planner.choose_call(schedule, setting.shape)
    return Choice(schedule.layout.name, pick.candidate), pick.seconds


def ways(setting: CallSetting, rates: Rates) -> dict[Choice, float]:
    """Return predicted seconds of what the planner picks, and of the fastest of each layout and Ulysses degree."""
    found = dict([picked(setting, rates)])
    for layout in ("zigzag", "contiguous"):
        planner, schedule = setting.planned(rates, layout)
        predictions = planner.predict_for_links(schedule, setting.shape)[0]
        run = sorted((each for each in predictions if each.forward), key=lambda each: each.seconds)
        first_of_each = {each.candidate.groups.query: each for each in reversed(run)}
        found |= {Choice(layout, each.candidate): each.seconds for each in first_of_each.values()}
    return found


@cache
def ready(setting: CallSetting, way: Choice) -> Any:
    """Run on a rank: return a function that computes the call once; all ranks must call this together."""
    torch.set_num_threads(1)
    strategy = way.candidate.strategy(way.layout, "direct")
    plan = make_plan(setting.seq_len, mask=MASKS[setting.mask](setting.seq_len), strategy=strategy)
    counts = HEADS, setting.kv_heads, setting.kv_heads, HEADS
    q, k, v, dout = (torch.randn(1, n, plan.length, DIM, dtype=torch.bfloat16) for n in counts)

    def call() -> None:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(burst_attention(*inputs, plan), inputs, dout)

    call()
    return call


def timed(setting: CallSetting, way: Choice) -> float:
    """Run on a rank: return the seconds of one call."""
    return seconds_of(ready(setting, way))


def slowest(pool: WorkerPool, setting: CallSetting, way: Choice) -> float:
    return max(pool.run(timed, setting, way, timeout=600))


def settings(a: CostModelArguments, cluster: str, link: str) -> Iterator[CallSetting]:
    """Yield the calls for one cluster and one link rate."""
    for mask, kv_heads in product(MASKS, (HEADS, 2)):
        yield CallSetting(cluster, link, mask, kv_heads, a.seq_len)


def measured(a: CostModelArguments, cluster: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each candidate of each call."""
    nodes, ranks = parse_cluster(cluster)
    with Cluster(nodes, ranks) as network, WorkerPool(network.world, entries=network.entries(), timeout=600) as pool:
        for link in a.links:
            network.set_rate(None)
            rates = limited(calibrated(pool), parse_rate(link))  # again, because other programs change the speed
            network.set_rate(parse_rate(link))
            for setting in settings(a, cluster, link):
                predicted, (pick, _) = ways(setting, rates), picked(setting, rates)
                took = take_turns([partial(slowest, pool, setting, way) for way in predicted], a.rounds)
                for (way, seconds), rounds in zip(predicted.items(), took, strict=True):
                    result = {"layout": way.layout, "way": str(way.candidate), "picked": way == pick}
                    yield {**vars(setting), **result, "predicted": seconds, "seconds": rounds}


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return errors of predicted times, and the number of near-optimal choices."""
    errors = [abs(row["predicted"] / min(row["seconds"]) - 1) for row in rows]
    calls: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        calls.setdefault(tuple(row[name] for name in ("cluster", "link", "mask", "kv_heads")), []).append(row)
    right = 0
    for of_call in calls.values():
        (chosen,) = (row for row in of_call if row["picked"])
        right += min(chosen["seconds"]) <= 1.1 * min(min(row["seconds"]) for row in of_call)
    return {
        "configurations": len(rows),
        "calls": len(calls),
        "median error": statistics.median(errors),
        "worst error": max(errors),
        "errors beyond 0.4": sum(error > 0.4 for error in errors),
        "choices within a tenth of the best": right,
    }


LEGEND = {
    "cluster": "nodes x ranks of each",
    "link": "rate of each node's link",
    "way": "what circulates, and how heads are split",
    "predicted s": "by the planner",
    "least s": "measured, the fastest round",
}


def main(arguments: list[str]) -> None:
    a = asked(CostModelArguments(), __doc__, "burst bench cost-model", arguments)
    rows: list[dict[str, Any]] = []
    summarised: dict[str, float] = {}
    for cluster in a.clusters:
        rows += measured(a, cluster)
        summarised = summary(rows)
        a.write(summary=summarised, rows=rows)  # after each cluster, because a run takes long
    lines = (
        {name: str(row[name]) for name in ("cluster", "link", "mask", "kv_heads", "layout", "way")}
        | {"predicted s": f"{row['predicted']:.3f}", "least s": f"{min(row['seconds']):.3f}"}
        for row in rows
    )
    console = console_of_tables()
    print_table(
        console, lines, title=f"S={a.seq_len}, H={HEADS}, D={DIM}, bf16, forward and backward", legend=LEGEND, keys=6
    )
    for name, value in summarised.items():
        console.print(f"{name}: {value:.3g}")
