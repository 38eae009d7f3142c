"""Check, count and time one causal attention, forward and backward, by several variants.

:func:`contest` drives the ranks. Functions that run on a rank get their variant from :func:`ready`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from burst_attention import CallShape, Hardware, Mask, Plan, Strategy, burst_attention, make_plan
from burst_attention.planner.rates import Rates
from burst_attention.testing import WorkerError, WorkerPool, attend
from burst_attention.testing.check import relative_l2
from burst_attention.testing.oracle import torch_attention

from .memory import give_back, peak_during, resident
from .traffic_meter import TrafficMeter
from .turns import ratios, seconds_of, take_turns
from .workload import Workload, random_qkv

NAMES = ("out", "dq", "dk", "dv")
Begin = Callable[..., tuple[Tensor, Callable[[], Sequence[Tensor]]]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A variant's call on one rank.

    Attributes:
        begin: Run the forward on this rank's shards of q, k, v and dout. It returns (out, backward); backward returns
            (dq, dk, dv), or an empty sequence for variants without a backward.
        positions: int64 [S_local]: global positions of this rank's tokens, in the order in which the rank holds them.
        heads_first: Whether tensors are [1, H, S_local, D] rather than [1, S_local, H, D].
        plan: Our plan; None for a package's variant.
        detail: Description of the chosen strategy.
        aside: Return the seconds that this process has spent so far on work that a GPU package would not need.
    """

    begin: Begin
    positions: Tensor
    heads_first: bool = True
    plan: Plan | None = None
    detail: str = ""
    aside: Callable[[], float] = lambda: 0.0


class Variant(Protocol):
    """A way to compute the attention; hashable, and picklable because it is sent to the ranks."""

    @property
    def name(self) -> str: ...

    @property
    def has_backward(self) -> bool: ...

    @property
    def tolerance(self) -> float:
        """Allowed relative L2 error, as a multiple of the error of torch's own kernel in the same dtype."""
        ...

    def build(self, workload: Workload) -> Call:
        """Build the call; all ranks must call it at the same time."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ours:
    """The library's call. By default heads stay whole, so that it is the same on every machine.

    Attributes:
        rates: The machine's rates, with which the planner chooses what the strategy leaves open. None: this user's
            calibrated rates, or a preset.
    """

    name: str = "burst"
    strategy: Strategy = field(default=Strategy(layout="zigzag", ulysses_degree=1))
    kernel: str = "auto"
    tolerance: float = 3.0
    has_backward: bool = True
    rates: Rates | None = None

    def plan(self, workload: Workload) -> Plan:
        sizes = {"q_heads": workload.heads, "kv_heads": workload.kv_heads, "head_dim": workload.head_dim}
        call = CallShape(**sizes, dtype=workload.torch_dtype)
        return make_plan(workload.seq_len, strategy=self.strategy, call=call, hardware=Hardware(rates=self.rates))

    def build(self, workload: Workload) -> Call:
        plan = self.plan(workload)
        detail = f"route {plan.route}, {self.strategy}"
        return Call(begin=self.begin(plan), positions=plan.positions, plan=plan, detail=detail)

    def begin(self, plan: Plan) -> Begin:
        call = partial(burst_attention, plan=plan, kernel=self.kernel)
        return by_autograd(call, backward=self.has_backward)


def by_autograd(attention: Callable[..., Tensor], *, backward: bool = True) -> Begin:
    """Return a :attr:`Call.begin` that runs ``attention(q, k, v)`` and differentiates it by autograd."""

    def begin(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Callable[[], Sequence[Tensor]]]:
        inputs = [x.detach().requires_grad_(backward) for x in (q, k, v)]
        out = attention(*inputs)
        return out.detach(), lambda: torch.autograd.grad(out, inputs, dout) if backward else ()

    return begin


@dataclass(frozen=True)
class Ready:
    """A variant's call on this rank, with its inputs."""

    call: Call
    inputs: list[Tensor]

    def run(self, processor: list[float] | None = None) -> list[Tensor]:
        """Return [out], followed by dq, dk and dv if the variant has a backward.

        ``processor``: gets the processor seconds of the forward and of the backward.
        """
        clock = [time.process_time()]
        out, backward = self.call.begin(*self.inputs)
        clock.append(time.process_time())
        grads = backward()
        clock.append(time.process_time())
        if processor is not None:
            processor += [end - start for start, end in pairwise(clock)]
        return [out, *grads]


@cache
def ready(variant: Variant, workload: Workload) -> Ready:
    """Return the variant's call, built on first use; all ranks must call this at the same time."""
    call = variant.build(workload)
    return Ready(call, _shards(call, workload))


def _shards(call: Call, workload: Workload) -> list[Tensor]:
    shards = random_qkv(workload, call.positions)
    return [(x if call.heads_first else x.transpose(1, 2).contiguous()).to(workload.device) for x in shards]


def checked(variant: Variant, workload: Workload, expected: list[Tensor]) -> dict[str, float]:
    """Run on a rank: return each result's relative L2 error over all ranks.

    Args:
        variant: The variant to check.
        workload: Sizes of the call.
        expected: Correct results of the whole sequence, [1, H, S, D].
    """
    own = ready(variant, workload)
    results = [x if own.call.heads_first else x.transpose(1, 2) for x in own.run()]
    right = [x.index_select(2, own.call.positions) for x in expected[: len(results)]]
    return dict(zip(NAMES, errors_over_ranks(results, right), strict=False))


def errors_over_ranks(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return relative L2 errors of sharded tensors.

    All ranks must call it, and get the same figures.
    """
    pairs = [(x.cpu().double(), y.double()) for x, y in zip(actual, expected, strict=True)]
    squares = torch.stack([torch.stack([(x - y).square().sum(), y.square().sum()]) for x, y in pairs])
    if dist.is_initialized():
        dist.all_reduce(squares)
    return [(wrong / size).sqrt().item() for wrong, size in squares]


def counted(variant: Variant, workload: Workload) -> tuple[str, dict[str, int | None]]:
    """Run on a rank: return the chosen strategy, and the bytes sent in one call.

    ``bytes`` counts all payload given to the process groups. ``transport_bytes`` counts the payload of our plan's
    transport, without the agreements' records.
    """
    own = ready(variant, workload)
    transport = None if own.call.plan is None else own.call.plan.transport
    sent = [0 if transport is None else transport.sent]
    with TrafficMeter() as meter:
        _, backward = own.call.begin(*own.inputs)
        sent.append(0 if transport is None else transport.sent)
        backward()
    if transport is None:
        return own.call.detail, {"bytes": meter.sent, "transport_bytes": None}
    start, middle, end = (*sent, transport.sent)
    counts = {"transport_bytes": end - start, "bytes_forward": middle - start, "bytes_backward": end - middle}
    return own.call.detail, {"bytes": meter.sent, **counts}


class Took(NamedTuple):
    """Seconds of one call: of all its work, of what :attr:`Call.aside` counts, and of the processor in each pass."""

    seconds: float
    aside: float
    processor: tuple[float, ...]


def timed(variant: Variant, workload: Workload) -> Took:
    """Run on a rank: time one call."""
    own, processor = ready(variant, workload), list[float]()
    before = own.call.aside()
    seconds = seconds_of(partial(own.run, processor))
    return Took(seconds, own.call.aside() - before, tuple(processor))


def slowest(pool: WorkerPool, variant: Variant, workload: Workload, timeout: float = 1800.0) -> Took:
    """Return :func:`timed` of the slowest rank, with the processor seconds of all ranks together."""
    ranks = pool.run(timed, variant, workload, timeout=timeout)
    return max(ranks)._replace(processor=tuple(map(sum, zip(*(each.processor for each in ranks), strict=True))))


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
    """Return correct global out, dq, dk and dv, and the relative L2 errors of torch's own kernel.

    The errors are those of the workload's dtype, by tensor name.

    Args:
        workload: Sizes and dtype of the call.
        dense: Compute with explicit scores in fp64, which needs memory for ten S x S matrices. Otherwise use torch's
            kernel in fp32, or in fp64 for fp32 inputs.
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


@dataclass
class Outcome:
    """Outcome of a variant; it has figures only if its results were right.

    Attributes:
        variant: The variant.
        refused: Reason why it has no result.
        errors, bounds: Relative L2 error and its limit over all ranks, by tensor.
        detail: Description of the chosen strategy.
        counts: Counts of :func:`counted`, one per rank; None if some rank could not count.
        seconds: The slowest rank's seconds in each round.
        aside: Seconds of each round that :attr:`Call.aside` counted.
        processor: Processor seconds of each pass in each round, of all ranks together.
        ratios: ``seconds`` of each round divided by those of the first variant with the same passes.
    """

    variant: Variant
    refused: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    counts: dict[str, list[int] | None] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    aside: list[float] = field(default_factory=list)
    processor: list[tuple[float, ...]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def correct(self) -> bool:
        return bool(self.errors) and all(
            error <= self.bounds[name] for name, error in self.errors.items()
        )  # False for NaN


def contest(
    pool: WorkerPool,
    variants: Sequence[Variant],
    workload: Workload,
    rounds: int,
    *,
    refused: Mapping[str, str | None] | None = None,
    check: Workload | None = None,
    timeout: float = 1800.0,
) -> list[Outcome]:
    """Check every variant, then count and time the correct ones; return outcomes in the same order.

    Args:
        pool: The ranks.
        variants: The variants; the first ones of each kind of pass are the base of the ratios.
        workload: Sizes of the timed call.
        rounds: Timed calls of each variant. They start after two calls of each, so that everything is compiled.
        refused: Reasons why variants can't run, by name. If given, a variant that raises also counts as refused; None
            lets the error through.
        check: Sizes at which results are compared with fp64. None: compare with fp32 at the sizes of ``workload``.
        timeout: Seconds that one call may take.
    """
    at = workload if check is None else check
    expected, stock = reference(at, dense=check is not None)
    outcomes = [Outcome(variant, (refused or {}).get(variant.name)) for variant in variants]
    for own in outcomes:
        if own.refused is not None:
            continue
        try:
            own.errors = pool.run(checked, own.variant, at, expected, timeout=timeout)[0]
        except WorkerError as error:
            if pool.broken or refused is None:  # a rank is lost or out of step, so no later comparison is possible
                raise
            own.refused = str(error.errors[0]).strip().splitlines()[0] or type(error.errors[0]).__name__
        own.bounds = {name: own.variant.tolerance * stock[name] for name in own.errors}
    right = [own for own in outcomes if own.correct]
    for own in right:
        (own.detail, first), *others = pool.run(counted, own.variant, workload, timeout=timeout)
        by_rank = {key: [count, *(counts[key] for _, counts in others)] for key, count in first.items()}
        own.counts = {key: None if None in counts else counts for key, counts in by_rank.items()}
    turns = take_turns([partial(slowest, pool, own.variant, workload, timeout) for own in right], rounds)
    for own, took in zip(right, turns, strict=True):
        own.seconds, own.aside = [each.seconds for each in took], [each.aside for each in took]
        own.processor = [each.processor for each in took]
        base = next(other for other in outcomes if other.variant.has_backward == own.variant.has_backward)
        if base.correct:  # the loop has set its seconds already
            own.ratios = ratios(base.seconds, own.seconds)
    return outcomes
