"""Check, and measure the memory of, one causal attention, forward and backward, by several variants.

Functions that run on a rank get their variant from :func:`ready`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_attention import CallShape, Hardware, Mask, Plan, Strategy, burst_attention, make_plan
from burst_attention.planner.rates import Rates
from burst_attention.testing import attend
from burst_attention.testing.check import relative_l2
from burst_attention.testing.oracle import torch_attention

from .memory import give_back, peak_during, resident
from .workload import Workload, random_qkv

NAMES = ("out", "dq", "dk", "dv")
Begin = Callable[..., tuple[Tensor, Callable[[], Sequence[Tensor]]]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A variant's call on one rank."""

    # Run the forward on this rank's shards of q, k, v and dout. It returns (out, backward); backward returns (dq, dk,
    # dv).
    begin: Begin
    # Int64 [S_local]: global positions of this rank's tokens, in the order in which the rank holds them.
    positions: Tensor
    heads_first: bool = True  # whether tensors are [1, H, S_local, D] rather than [1, S_local, H, D]
    plan: Plan | None = None  # our plan; None for a package's variant


# Allowed relative L2 error, as a multiple of the error of torch's own kernel in the same dtype. Correct results reach
# 0.7 to 1.3. A missing, doubled or wrongly scaled tile gives far larger errors.
TOLERANCE = 5.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to compute the attention; hashable, and picklable because it is sent to the ranks."""

    name: str

    def build(self, workload: Workload) -> Call:
        """Build the call; all ranks must call it at the same time."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Ours(Variant):
    """The library's call. By default heads stay whole, so that it is the same on every machine."""

    name: str = "burst"
    strategy: Strategy = field(default=Strategy(layout="zigzag", ulysses_degree=1))
    kernel: str = "auto"
    # The machine's rates, with which the planner chooses what the strategy leaves open. None: this user's calibrated
    # rates, or a preset.
    rates: Rates | None = None

    def build(self, workload: Workload) -> Call:
        sizes = {"q_heads": workload.heads, "kv_heads": workload.kv_heads, "head_dim": workload.head_dim}
        call = CallShape(**sizes, dtype=workload.torch_dtype)
        plan = make_plan(workload.seq_len, strategy=self.strategy, call=call, hardware=Hardware(rates=self.rates))
        begin = by_autograd(partial(burst_attention, plan=plan, kernel=self.kernel))
        return Call(begin=begin, positions=plan.positions, plan=plan)


def by_autograd(attention: Callable[..., Tensor]) -> Begin:
    """Return a :attr:`Call.begin` that runs ``attention(q, k, v)`` and differentiates it by autograd."""

    def begin(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Callable[[], Sequence[Tensor]]]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs)
        return out.detach(), lambda: torch.autograd.grad(out, inputs, dout)

    return begin


@dataclass(frozen=True)
class Ready:
    """A variant's call on this rank, with its inputs."""

    call: Call
    inputs: list[Tensor]

    def run(self) -> list[Tensor]:
        """Return [out], followed by dq, dk and dv if the variant has a backward."""
        out, backward = self.call.begin(*self.inputs)
        return [out, *backward()]


@cache
def ready(variant: Variant, workload: Workload) -> Ready:
    """Return the variant's call, built on first use; all ranks must call this at the same time."""
    call = variant.build(workload)
    return Ready(call, _shards(call, workload))


def _shards(call: Call, workload: Workload) -> list[Tensor]:
    shards = random_qkv(workload, call.positions)
    return [(x if call.heads_first else x.transpose(1, 2).contiguous()).to(workload.device) for x in shards]


def checked(variant: Variant, workload: Workload, expected: list[Tensor]) -> dict[str, float]:
    """Run on a rank: return each result's relative L2 error over all ranks; ``expected``: right ones, [1, H, S, D]."""
    own = ready(variant, workload)
    results = [x if own.call.heads_first else x.transpose(1, 2) for x in own.run()]
    right = [x.index_select(2, own.call.positions) for x in expected[: len(results)]]
    return dict(zip(NAMES, errors_over_ranks(results, right), strict=False))


def errors_over_ranks(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return relative L2 errors of sharded tensors. All ranks must call it, and get the same figures."""
    pairs = [(x.cpu().double(), y.double()) for x, y in zip(actual, expected, strict=True)]
    squares = torch.stack([torch.stack([(x - y).square().sum(), y.square().sum()]) for x, y in pairs])
    if dist.is_initialized():
        dist.all_reduce(squares)
    return [(wrong / size).sqrt().item() for wrong, size in squares]


def memory_peaks(variant: Variant, workload: Workload) -> tuple[int, int]:
    """Run on a rank: return the peak resident memory of (the forward, forward and backward), in bytes.

    Both exclude the memory at the start, and include the inputs.
    """
    call = variant.build(workload)

    def forward() -> tuple[Any, ...]:
        inputs = _shards(call, workload)
        return inputs, *call.begin(*inputs)

    for _ in range(2):  # in the first call libraries also allocate memory that they never free
        if dist.is_initialized():
            dist.barrier()
        give_back()
        before = resident()
        (inputs, out, backward), after_forward = peak_during(forward)
        grads, after_backward = peak_during(backward)
        del inputs, out, backward, grads
    return after_forward - before, max(after_forward, after_backward) - before


def reference(workload: Workload, *, dense: bool) -> tuple[list[Tensor], dict[str, float]]:
    """Return correct global out, dq, dk and dv, and torch's own kernel's relative L2 errors in this dtype, by name.

    ``dense``: with explicit scores in fp64, which needs memory for ten S x S matrices. Otherwise by torch's kernel in
    fp32, or in fp64 for fp32 inputs.
    """
    wide = torch.float64 if workload.torch_dtype == torch.float32 else torch.float32
    right, plain = [], []
    q, k, v, dout = random_qkv(workload)
    group = workload.heads // workload.kv_heads
    for head in range(workload.kv_heads):  # one key-value head at a time limits the memory for scores
        own = slice(head * group, (head + 1) * group)
        inputs, of_out = (q[:, own], k[:, head : head + 1], v[:, head : head + 1]), dout[:, own]
        if dense:
            truth = attend(*inputs, Mask(), dout=of_out)
        else:
            truth = torch_attention(*(x.to(wide) for x in inputs), Mask(), dout=of_out.to(wide))
        for heads, results in ((right, truth), (plain, torch_attention(*inputs, Mask(), dout=of_out))):
            heads.append([x for name, x in results.items() if name in NAMES])
    exact, stock = ([torch.cat(heads, 1) for heads in zip(*by_head, strict=True)] for by_head in (right, plain))
    return exact, {name: relative_l2(x, y) for name, x, y in zip(NAMES, stock, exact, strict=True)}
