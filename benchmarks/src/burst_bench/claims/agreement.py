"""Compare the cost of an agreement with torch's all_reduce of 8 bytes, and break down a tiny call.

The two take turns, over processes. Larger worlds are threads of one process, which take turns in Python; torch has no
collective for them. For a call over 64 tokens, forward and backward, waits are listed by their cause. CPU time is
listed by thread: the rank's own, or gloo's.

    burst bench agreement [--worlds 2 4 8] [--rounds 9] [--calls 20]"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_attention import burst_attention, make_plan
from burst_attention.testing import WorkerPool, local_world

from ..harness.trace import Trace, traced
from ..harness.turns import ratios, seconds_of, take_turns
from ..tables import terminal
from ..texts import spread

TOKENS, HEADS, HEAD_DIM = 64, 4, 32
WAITED = "agreement", "hop"
THREADS = 16, 32, 64  # numbers of ranks


def repeated(call: Callable[[], Any], calls: int) -> float:
    """Return the mean seconds of ``calls`` consecutive calls."""
    call()
    return seconds_of(lambda: [call() for _ in range(calls)]) / calls


def agreement(group: Any = None) -> Callable[[], Any]:
    return partial(make_plan(TOKENS, group=group).agreement.agree, "a call", {"scale": 0.5})


def in_turns(rounds: int, calls: int) -> list[list[float]]:
    """Run on a rank: return each round's seconds of (an agreement, an all_reduce)."""
    timed = agreement(), partial(dist.all_reduce, torch.zeros(8, dtype=torch.uint8))
    return take_turns([partial(repeated, call, calls) for call in timed], rounds)


def tiny_call(attention: Callable[..., Tensor], length: int) -> Callable[[], Any]:
    inputs = [torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in "qkv"]
    return lambda: torch.autograd.grad(attention(*inputs).sum(), inputs)


def tiny_parts(calls: int) -> dict[str, float]:
    """Run on a rank: return the milliseconds of one tiny call, their parts, and its number of exchanges."""
    plan, trace = make_plan(TOKENS), Trace()
    watched = traced(plan, trace)
    plain, seen = (tiny_call(partial(burst_attention, plan=each), plan.length) for each in (plan, watched))
    plain(), seen()
    process, own = -time.process_time(), -time.thread_time()
    whole = repeated(plain, calls)
    process, own = process + time.process_time(), own + time.thread_time()
    trace.clear()
    for _ in range(calls):
        seen()
    waits = {word: sum(x.end - x.start for x in trace.spans if x.kind == "wait" and word in x.label) for word in WAITED}
    seconds = {"call": whole} | {f"waits in {word}s": took / calls for word, took in waits.items()}
    seconds |= {"CPU, own thread": own / (calls + 1), "CPU, gloo's threads": (process - own) / (calls + 1)}
    posted = sum(each.kind == "exchange" for each in trace.spans) / calls
    return {name: value * 1e3 for name, value in seconds.items()} | {"exchanges": posted}


def run(*, worlds: tuple[int, ...] = (2, 4, 8), rounds: int = 9, calls: int = 20) -> None:
    """Measure, and print the tables."""
    torch.set_num_threads(1)
    costs, parts = [], []
    for world in (1, *worlds):
        with WorkerPool(world, timeout=300) as pool:
            by_rank = pool.run(tiny_parts, calls)
            parts.append({"ranks": str(world)} | {name: f"{max(x[name] for x in by_rank):.2f}" for name in by_rank[0]})
            each = pool.run(in_turns, rounds, calls) if world > 1 else []
        if each:
            ours, theirs = ([max(turn) * 1e6 for turn in zip(*x, strict=True)] for x in zip(*each, strict=True))
            ratio = {"all_reduce, us": spread(theirs, ".0f"), "ratio, per round": spread(ratios(theirs, ours))}
            costs.append({"ranks": f"{world} processes", "agreement, us": spread(ours, ".0f")} | ratio)
    for world in THREADS:
        with local_world(world) as ranks:
            turns = [max(ranks.run(lambda group: repeated(agreement(group), calls))) * 1e6 for _ in range(rounds)]
        costs.append({"ranks": f"{world} threads", "agreement, us": spread(turns, ".0f")})
    Console().print(terminal(costs, title="an agreement, and all_reduce of 8 bytes"))
    alone = repeated(tiny_call(scaled_dot_product_attention, TOKENS), calls)
    title = f"S={TOKENS}, H={HEADS}, D={HEAD_DIM}, fp32, forward and backward, ms; torch's own alone: {alone * 1e3:.2f}"
    Console().print(terminal(parts, title=title))


def main(arguments: list[str]) -> None:
    tyro.cli(run, prog="burst bench agreement", description=__doc__, args=arguments)
