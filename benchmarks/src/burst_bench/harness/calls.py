"""One causal attention, forward and backward, by several variants: checked, counted and timed by one procedure.

What runs on a rank finds its variant by :func:`ready`; :func:`contest` is what drives the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from burst_attention import Mask, Plan, burst_attention, make_plan
from burst_attention.planner.choice import HeadsOrAuto
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
    """What a variant makes on a rank.

    Attributes:
        begin: the forward of q, k, v and dout, this rank's shards: (out, what gives dq, dk, dv, or nothing).
        positions: int64 [S_local]: the global ones of this rank's tokens, in the order in which it holds them.
        heads_first: tensors are [1, H, S_local, D] rather than [1, S_local, H, D].
        plan: ours; None for a package's.
        detail: what was chosen, in words.
        aside: how many seconds this process has spent so far on what others would not have to do.
    """

    begin: Begin
    positions: Tensor
    heads_first: bool = True
    plan: Plan | None = None
    detail: str = ""
    aside: Callable[[], float] = lambda: 0.0


class Variant(Protocol):
    """One way to compute the attention. Must be hashable and picklable: it is sent to the ranks."""

    @property
    def name(self) -> str: ...

    @property
    def has_backward(self) -> bool: ...

    @property
    def tolerance(self) -> float:
        """Relative L2 error allowed, in multiples of that of torch's own kernel in the same dtype."""
        ...

    def build(self, workload: Workload) -> Call:
        """On every rank at the same time."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ours:
    """The library's call; if not told, of heads that nobody cuts, so that it is the same wherever it is measured.

    Attributes:
        rates: of the machine, for what is left open; None for those of this user or this kind of machine.
    """

    name: str = "burst"
    layout: str = "zigzag"
    route: str = "auto"
    heads: HeadsOrAuto = 1
    travels: str = "auto"
    kernel: str = "auto"
    tolerance: float = 3.0
    has_backward: bool = True
    rates: Rates | None = None

    def plan(self, workload: Workload) -> Plan:
        return make_plan(workload.seq_len, **self.options(workload))

    def options(self, workload: Workload) -> dict[str, Any]:
        """What the plan is told."""
        sizes = {"q_heads": workload.heads, "kv_heads": workload.kv_heads, "head_dim": workload.head_dim}
        told = {"layout": self.layout, "route": self.route, "heads": self.heads, "rates": self.rates}
        return told | sizes | {"dtype": workload.torch_dtype}

    def build(self, workload: Workload) -> Call:
        plan = self.plan(workload)
        detail = f"route {plan.route}, travels {self.travels}"
        return Call(begin=self.begin(plan), positions=plan.positions, plan=plan, detail=detail)

    def begin(self, plan: Plan) -> Begin:
        call = partial(burst_attention, plan=plan, travels=self.travels, kernel=self.kernel)
        return by_autograd(call, backward=self.has_backward)


def by_autograd(attention: Callable[..., Tensor], *, backward: bool = True) -> Begin:
    """:attr:`Call.begin` of a function of q, k and v that torch differentiates."""

    def begin(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Callable[[], Sequence[Tensor]]]:
        inputs = [x.detach().requires_grad_(backward) for x in (q, k, v)]
        out = attention(*inputs)
        return out.detach(), lambda: torch.autograd.grad(out, inputs, dout) if backward else ()

    return begin


@dataclass(frozen=True)
class Ready:
    """A variant's call on this rank with its inputs."""

    call: Call
    inputs: list[Tensor]

    def run(self) -> list[Tensor]:
        """out, and dq, dk and dv where the variant has a backward."""
        out, backward = self.call.begin(*self.inputs)
        return [out, *backward()]


@cache
def ready(variant: Variant, workload: Workload) -> Ready:
    """Built at the first call, which every rank makes at the same time."""
    call = variant.build(workload)
    return Ready(call, _shards(call, workload))


def _shards(call: Call, workload: Workload) -> list[Tensor]:
    shards = random_qkv(workload, call.positions)
    return [(x if call.heads_first else x.transpose(1, 2).contiguous()).to(workload.device) for x in shards]


def checked(variant: Variant, workload: Workload, expected: list[Tensor]) -> dict[str, float]:
    """On a rank: each result's relative L2 error over all ranks. ``expected``: of the whole sequence, [1, H, S, D]."""
    own = ready(variant, workload)
    results = [x if own.call.heads_first else x.transpose(1, 2) for x in own.run()]
    right = [x.index_select(2, own.call.positions) for x in expected[: len(results)]]
    return dict(zip(NAMES, errors_over_ranks(results, right), strict=False))


def errors_over_ranks(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Relative L2 of tensors of which each rank has a part; every rank must call it, and gets the same figures."""
    pairs = [(x.cpu().double(), y.double()) for x, y in zip(actual, expected, strict=True)]
    squares = torch.stack([torch.stack([(x - y).square().sum(), y.square().sum()]) for x, y in pairs])
    if dist.is_initialized():
        dist.all_reduce(squares)
    return [(wrong / size).sqrt().item() for wrong, size in squares]


def counted(variant: Variant, workload: Workload) -> tuple[str, dict[str, int | None]]:
    """On a rank: what was chosen, and the bytes of one call, as given to the process group and to our plan's transport.

    The latter are without the records by which ranks agree on a call.
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


def timed(variant: Variant, workload: Workload) -> tuple[float, float]:
    """On a rank: seconds of one call, and how many of them were :attr:`Call.aside`."""
    own = ready(variant, workload)
    before = own.call.aside()
    return seconds_of(own.run), own.call.aside() - before


def slowest(pool: WorkerPool, variant: Variant, workload: Workload, timeout: float = 1800.0) -> tuple[float, float]:
    """:func:`timed` of the rank that took longest."""
    return max(pool.run(timed, variant, workload, timeout=timeout))


def memory_peaks(variant: Variant, workload: Workload) -> tuple[int, int]:
    """On a rank: peak resident memory above the start by the end of the forward and of all, what goes in included."""
    call = variant.build(workload)

    def forward() -> tuple[Any, ...]:
        inputs = _shards(call, workload)
        return inputs, *call.begin(*inputs)

    for _ in range(2):  # the first call also leaves what libraries allocate for good
        if dist.is_initialized():
            dist.barrier()
        give_back()
        before = resident()
        (inputs, out, backward), after_forward = peak_during(forward)
        grads, after_backward = peak_during(backward)
        del inputs, out, backward, grads
    return after_forward - before, max(after_forward, after_backward) - before


def reference(workload: Workload, *, dense: bool) -> tuple[list[Tensor], dict[str, float]]:
    """Global out, dq, dk and dv; and the relative L2 error of torch's own kernel in the workload's dtype, by name.

    Args:
        dense: written out in fp64, which takes memory for ten squares of the length; else by torch's kernel in fp32,
            or in fp64 for inputs in fp32.
    """
    wide = torch.float64 if workload.torch_dtype == torch.float32 else torch.float32
    right, plain = [], []
    q, k, v, dout = random_qkv(workload)
    group = workload.heads // workload.kv_heads
    for head in range(workload.kv_heads):  # the scores of few heads at a time
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
    """What came of a variant; figures only where its results were right.

    Attributes:
        refused: why there is no result.
        errors, bounds: relative L2 over all ranks, by tensor.
        counts: :func:`counted`'s by rank; None where some rank could not tell.
        seconds: of each round, the slowest rank's; ``aside``: how many of them were :attr:`Call.aside`.
        ratios: of ``seconds`` by round, to those of the first variant that has as many passes.
    """

    variant: Variant
    refused: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    counts: dict[str, list[int] | None] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    aside: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def correct(self) -> bool:
        return bool(self.errors) and all(error <= self.bounds[name] for name, error in self.errors.items())  # NaN: no


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
    """Check every variant, then count and time those that are right; an outcome for each, in their order.

    Args:
        rounds: timed calls of each; they begin when each has been called twice, by which all is compiled.
        refused: why variants of these names can't run; one that raises is then refused, too. None: it is an error.
        check: the sizes at which results are compared with fp64; None: with fp32 at ``workload``'s own.
        timeout: seconds that one call may take.
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
            if pool.broken or refused is None:  # a rank is lost or out of step: nothing more can be compared
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
        own.seconds, own.aside = [seconds for seconds, _ in took], [aside for _, aside in took]
        base = next(other for other in outcomes if other.variant.has_backward == own.variant.has_backward)
        if base.correct:  # whose seconds are known by now
            own.ratios = ratios(base.seconds, own.seconds)
    return outcomes
