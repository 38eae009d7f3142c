"""Measure what planning a step costs one rank: the time from a new mask to both passes' programs, and the memory.

Seconds are this process's CPU time, the least of several runs, so that other work on the machine counts little. Memory
is the peak that tracemalloc sees in a separate run.

    burst bench planning [--seq-len 1048576] [--documents 2000] [--ranks 8 64 256]"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from burst_attention import Mask
from burst_attention.plan.cost import Shape
from burst_attention.plan.layout import LAYOUTS
from burst_attention.plan.rows import Direction
from burst_attention.plan.strategy import Strategy
from burst_attention.planner.planner import Planner

from ..arguments import asked
from ..tables import terminal

SHAPE = Shape(batch=1, q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128, io=2, partial=2, accumulate=4)


def masks(seqlen: int, documents: int) -> dict[str, Mask]:
    """Return two masks: documents of random lengths, and one document."""
    dice = np.random.default_rng(0)
    cuts = np.sort(dice.choice(np.arange(1, seqlen), documents - 1, replace=False)).tolist()
    return {f"{documents:,} documents": Mask(cu_seqlens=[0, *cuts, seqlen]), "one document": Mask()}


def planned(seqlen: int, mask: Mask, layout: str, route: str, ranks: int, heads: int) -> Any:
    """Do everything that a rank does before its first call with a mask."""
    planner = Planner(nodes=tuple(rank // 8 for rank in range(ranks)))
    strategy = Strategy(layout=layout, route=route, ulysses_degree=heads)
    schedule = planner.choose(seqlen, mask=mask, strategy=strategy, rank=ranks // 3, world=ranks)
    groups, circulate = planner.decide(schedule, SHAPE)
    return [schedule.program(circulate, direction, groups) for direction in Direction]


def seconds(*case: Any, runs: int) -> float:
    best = float("inf")
    for _ in range(runs):
        start = time.process_time()
        planned(*case)
        best = min(best, time.process_time() - start)
    return best


def peak(*case: Any) -> int:
    tracemalloc.start()
    planned(*case)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


@dataclass(frozen=True, kw_only=True)
class PlanningArguments:
    seq_len: int = 1 << 20
    documents: int = 2000
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    routes: tuple[str, ...] = ("direct",)
    ranks: tuple[int, ...] = (8, 64, 256)
    heads: tuple[int, ...] = (1,)
    """Ulysses degrees."""
    runs: int = 3


def main(arguments: list[str]) -> None:
    a = asked(PlanningArguments(), __doc__, "burst bench planning", arguments)
    rows = []
    each = itertools.product(masks(a.seq_len, a.documents).items(), a.layouts, a.routes, a.ranks, a.heads)
    for (name, mask), layout, route, ranks, heads in each:
        case = (a.seq_len, mask, layout, route, ranks, heads)
        taken = seconds(*case, runs=a.runs)
        labels = {"mask": name, "layout": layout, "route": route, "ranks": ranks, "heads cut": heads}
        rows.append({**labels, "ms": 1e3 * taken, "MiB": peak(*case) / 2**20})
    lines = ({k: f"{v:.1f}" if isinstance(v, float) else str(v) for k, v in row.items()} for row in rows)
    Console().print(terminal(lines, title=f"planning {a.seq_len:,} tokens, CPU time and peak memory of one rank"))
