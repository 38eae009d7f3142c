"""Time W ranks x 1 thread of our attention against torch's own kernel in one process x W threads.

Both run forward and backward, and take turns, round by round, on the same cores. The program prints the median and the
range of each round's ratio (theirs / ours; above 1: ours is faster). Results are first compared with torch's.

    burst bench overhead [--world 2] [--seq-len 8192] [--heads 8] [--head-dim 128] [--rounds 9]
        [--json docs/results/attention.json]
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention

from burst_attention.plan.strategy import Strategy
from burst_attention.testing import WorkerPool

from ..arguments import TimedArguments, asked
from ..harness.calls import Call, Ours, Ready, by_autograd, checked, slowest
from ..harness.turns import ratios, seconds_of, take_turns
from ..harness.workload import random_qkv
from ..tables import terminal


@dataclass(frozen=True, kw_only=True)
class OverheadArguments(TimedArguments):
    kv_heads: int | None = None
    layout: str = "zigzag"
    route: str = "auto"
    kernel: str = "auto"


def main(arguments: list[str]) -> None:
    a = asked(OverheadArguments(), __doc__, "burst bench overhead", arguments)
    torch.set_num_threads(a.world)
    workload = a.workload.at(a.seq_len, kv_heads=a.kv_heads or a.heads)
    ours = Ours(strategy=Strategy(layout=a.layout, route=a.route, ulysses_degree=1), kernel=a.kernel)
    call = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=workload.heads != workload.kv_heads)
    stock = Ready(Call(begin=by_autograd(call), positions=torch.arange(a.seq_len)), random_qkv(workload))
    with WorkerPool(a.world, timeout=300) as pool:
        errors = pool.run(checked, ours, workload, stock.run())[0]
        if not all(error < 2e-2 for error in errors.values()):
            raise SystemExit(f"the results differ from torch's, so no time is reported: relative L2 errors {errors}")
        calls = (lambda: seconds_of(stock.run), lambda: slowest(pool, ours, workload).seconds)
        theirs, mine = take_turns(calls, a.rounds)
    by_round = ratios(mine, theirs)
    rows = {f"torch, 1 x {a.world} threads": theirs, f"burst, {a.world} x 1 thread": mine, "ratio, per round": by_round}
    ends = {"median s": statistics.median, "min": min, "max": max}
    lines = ({"": name} | {end: f"{of(x):.3f}" for end, of in ends.items()} for name, x in rows.items())
    Console().print(terminal(lines, title=a.title))
    ratio = {"median": statistics.median(by_round), "least": min(by_round), "greatest": max(by_round)}
    a.write(rounds=a.rounds, ratio=ratio, seconds=list(zip(theirs, mine, strict=True)))
