"""Attention, forward and backward: W ranks x 1 thread against one process x W threads of torch's own kernel.

The two take turns in one run, round by round, on the same cores; printed is the ratio per round (theirs / ours, above 1
is faster), its median and its spread. Before the clock starts the result is checked against the stock kernel's.

    python benchmarks/attention.py [--world 2] [--seq-len 8192] [--heads 8] [--head-dim 128] [--rounds 9]
        [--json docs/results/attention.json]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_attention import burst_attention, make_plan
from burst_attention.testing import WorkerPool
from burst_attention.testing.check import relative_l2

from ..arguments import TimedArguments, asked

_inputs: dict[str, tuple] = {}  # on a rank: the inputs of the timed call, between two messages from the parent


def make_inputs(seqlen: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Global q, k, v, dout, the same in every process."""
    make = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, seqlen, dim, generator=make, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads)]


def prepare(options: dict, shape: tuple, kernel: str) -> None:
    plan = make_plan(shape[0], **options)
    local = [plan.shard(x, 2) for x in make_inputs(*shape)]
    _inputs["call"] = plan, [x.requires_grad_() for x in local[:3]], local[3], kernel


def ours() -> tuple[float, tuple[Tensor, ...]]:
    """Seconds of one forward and backward here, and what came of it."""
    plan, inputs, dout, kernel = _inputs["call"]
    started = time.perf_counter()
    out = burst_attention(*inputs, plan, kernel=kernel)
    grads = torch.autograd.grad(out, inputs, dout)
    return time.perf_counter() - started, (out.detach(), *grads)


def timed() -> float:
    return ours()[0]


def global_results() -> list[Tensor]:
    plan = _inputs["call"][0]
    return [plan.unshard(x, 2) for x in ours()[1]]


def stock_call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Callable[[], tuple[float, tuple[Tensor, ...]]]:
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def run() -> tuple[float, tuple[Tensor, ...]]:
        started = time.perf_counter()
        out = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        grads = torch.autograd.grad(out, inputs, dout)
        return time.perf_counter() - started, (out.detach(), *grads)

    return run


@dataclass(frozen=True, kw_only=True)
class Arguments(TimedArguments):
    kv_heads: int | None = None
    layout: str = "zigzag"
    route: str = "auto"
    kernel: str = "auto"


def main() -> None:
    a = asked(Arguments(), __doc__)
    torch.set_num_threads(a.world)
    shape = (a.seq_len, a.heads, a.kv_heads or a.heads, a.head_dim, a.torch_dtype)
    stock = stock_call(*make_inputs(*shape))
    with WorkerPool(a.world, timeout=300) as pool:
        pool.run(prepare, {"layout": a.layout, "route": a.route}, shape, a.kernel)
        expected, actual = stock()[1], pool.run(global_results)[0]
        errors = [relative_l2(x, y) for x, y in zip(actual, expected, strict=True)]
        if not max(errors) < 2e-2:
            raise SystemExit(f"the results differ, so no time is reported: relative L2 of out, dq, dk, dv {errors}")
        seconds = [(stock()[0], max(pool.run(timed))) for _ in range(a.rounds)]
    table = Table("", "median s", "min", "max", title=a.title)
    ratios = [theirs / mine for theirs, mine in seconds]
    rows = {f"torch, 1 x {a.world} threads": [theirs for theirs, _ in seconds]}
    rows |= {f"burst, {a.world} x 1 thread": [mine for _, mine in seconds], "ratio, per round": ratios}
    for name, values in rows.items():
        table.add_row(name, *(f"{x:.3f}" for x in (statistics.median(values), min(values), max(values))))
    Console().print(table)
    ratio = {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}
    a.write("attention", rounds=a.rounds, ratio=ratio, seconds=seconds)
