"""The variants of ``ablation.py``: our attention with one feature removed at a time.

Most differ by an argument of the library. The others replace a :class:`burst_attention.attention.passes.Pass` or the
transport, and run through the library's sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from burst_attention import Plan
from burst_attention.attention.hardware import shape_of
from burst_attention.attention.passes import Backward, Forward, Tensors
from burst_attention.attention.sweep import sweep
from burst_attention.comm.transport import Pending, Receive, Send, Transport
from burst_attention.kernels import choose
from burst_attention.kernels.merge import merge_, row_dot
from burst_attention.plan.build import Builder, Rectangle
from burst_attention.plan.cost import Shape
from burst_attention.plan.rows import Direction, Side
from burst_attention.plan.strategy import NAMED, Strategy
from burst_attention.planner.choice import Candidate

from ..harness.calls import Begin, Call, Ours
from ..harness.trace import over
from ..harness.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Ablation(Ours):
    """Our attention as planned for the call and the machine, with one feature removed.

    Attributes:
        differs: Description of the difference from ours.
        strategy: As for :func:`burst_attention.make_plan`. If it fixes ``cache_qkv`` or ``chunks`` and not the
            Ulysses degree, the rest is as the planner chooses it without them.
        transport: Class of the transport; None: the plan's own class.
        builder: Class that builds the programs.
        forward, backward: Classes of the passes. If both are the library's, the public call runs. Others support whole
            heads only.
    """

    differs: str
    strategy: Strategy = field(default=Strategy())
    transport: type[Transport] | None = None
    builder: type[Builder] = Builder
    forward: type[Forward] = Forward
    backward: type[Backward] = Backward

    def plan(self, workload: Workload) -> Plan:
        asked = self.strategy
        if (asked.cache_qkv, asked.chunks) != ("auto", "auto") and asked.ulysses_degree == "auto":
            return self.held(workload).plan(workload)
        plan = super().plan(workload)
        if self.builder is not Builder:
            plan = Plan(replace(plan.schedule, builder=self.builder), plan.planner, plan.transport, plan.agreement)
        return plan if self.transport is None else over(plan, self.transport, agreement=plan.agreement)

    def held(self, workload: Workload) -> Ablation:
        """Return this variant with the rest as the full plan has it; alone it would be planned differently."""
        asked = self.strategy
        planned = replace(self, strategy=replace(asked, cache_qkv="auto", chunks="auto"))
        plan = planned.plan(workload)
        found = planned.candidate(plan, workload).strategy(plan.layout, asked.route)
        held = {name: getattr(asked, name) for name in ("cache_qkv", "chunks") if getattr(asked, name) != "auto"}
        return replace(self, strategy=replace(found, **held))

    def build(self, workload: Workload) -> Call:
        call = super().build(workload)
        assert call.plan is not None
        return replace(call, detail=f"{call.plan.layout}, {self.candidate(call.plan, workload)}, {call.plan.route}")

    def candidate(self, plan: Plan, workload: Workload) -> Candidate:
        """Return what the planner chose for the call."""
        return plan.planner.decide(plan.schedule, self.shape(workload))

    def shape(self, workload: Workload) -> Shape:
        """Return the shape of a call."""
        sizes = {"q_heads": workload.heads, "kv_heads": workload.kv_heads, "head_dim": workload.head_dim}
        return shape_of(workload.torch_dtype, batch=1, **sizes)

    def begin(self, plan: Plan) -> Begin:
        library = (self.forward, self.backward) == (Forward, Backward)
        return super().begin(plan) if library else partial(swept, self, plan)


def swept(
    variant: Ablation, plan: Plan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Callable[[], Tensors]]:
    """Run the call with the variant's own passes, in the order of the public call.

    Return (out, backward); all tensors are [1, H, S_local, D].
    """
    scale = 1 / math.sqrt(q.shape[-1])
    kernel = choose(variant.kernel, device=q.device, dtype=q.dtype)
    plan.agreement.agree("an ablation's forward", {"variant": variant.name})
    out, lse = _forward(variant.forward(q, k, v, scale, kernel), plan)

    def backward() -> Tensors:
        plan.agreement.agree("an ablation's backward", {"variant": variant.name})
        stats = torch.stack((lse, row_dot(dout, out, lse.dtype)), -1)
        work = variant.backward(dout, q, k, v, stats, scale, kernel)
        sums = sweep(plan.schedule.program(variant.strategy.circulate, Direction.BACKWARD), plan.transport, work)
        grads = [*sums.pop(Side.QUERY), *sums.pop(Side.KEY)]
        for n, grad in enumerate(grads):  # one by one, so that each fp32 sum is freed after rounding
            grads[n] = grad.to(q.dtype).contiguous()
        return tuple(grads)

    return out, backward


def _forward(work: Forward, plan: Plan) -> tuple[Tensor, Tensor]:
    out, lse = sweep(plan.schedule.program("query", Direction.FORWARD), plan.transport, work)[Side.QUERY]
    if isinstance(work, LateMerge):
        work.merge()
    return out.to(work.q.dtype).contiguous(), lse


@dataclass(frozen=True, eq=False)
class LateMerge(Forward):
    """A forward that stores each hop's (out, lse) and merges them, in the same order, after the sweep.

    It works only for layouts in which a pair's rows are consecutive. For other layouts ``combine`` gets a copy of the
    total's rows, so merging would not change the total.
    """

    parts: list[tuple[Tensors, Tensors]] = field(default_factory=list)

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        self.parts.append((total, part))

    def merge(self) -> None:
        """Merge the stored parts."""
        for total, part in self.parts:
            merge_(*total, *part)


@dataclass(frozen=True, eq=False)
class NarrowForward(Forward):
    """A forward that rounds out to the io dtype after each visit; each merge runs in fp32."""

    def blank(self, side: Side, rows: int) -> Tensors:
        out, lse = super().blank(side, rows)
        return out.to(self.q.dtype), lse

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        out, lse = total
        wide = out.to(lse.dtype)
        merge_(wide, lse, *part)
        out.copy_(wide)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        _, lse = super().wire_dtypes(side, exact=True)
        return self.q.dtype, lse


@dataclass(frozen=True, eq=False)
class NarrowBackward(Backward):
    """A backward that rounds the sums dq, dk and dv to the io dtype after each visit."""

    def blank(self, side: Side, rows: int) -> Tensors:
        return tuple(x.to(self.q.dtype) for x in super().blank(side, rows))

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        return tuple(self.q.dtype for _ in super().wire_dtypes(side, exact=True))


class PairByPair(Builder):
    """A builder of programs that visit one pair of shards, or of their chunks, at a time."""

    def products(self, keys: dict[int, list[int]], group: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        return (((j,), (i,)) for i, these in keys.items() for j in these)

    def at_once(self, rectangles: list[Rectangle]) -> list[list[int]]:
        return [[n] for n in range(len(rectangles))]


class Waiting(Transport):
    """A transport that waits for each exchange, so that no computation overlaps it."""

    def post(self, sends: Sequence[Send], receives: Sequence[Receive], *, label: str) -> Pending:
        pending = super().post(sends, receives, label=label)
        self.wait(pending)
        return pending


PAPER = NAMED["burst-attention"]
Published = partial(Ablation, strategy=replace(PAPER, route="direct"))
RING = replace(NAMED["ring-attention"], route="direct")
VARIANTS = (
    Ablation(name="ours", differs=""),  # the report prints what was planned in its place
    Ablation(name="heads whole", differs="ulysses_degree=1, all else planned", strategy=Strategy(ulysses_degree=1)),
    Ablation(name="no cache", differs="the backward exchanges q, k, v again", strategy=Strategy(cache_qkv=False)),
    Ablation(name="one chunk", differs="a sequence group's shards come together", strategy=Strategy(chunks=1)),
    Ablation(name="owner by owner", differs="a sequence group's shards come one by one", strategy=Strategy(chunks=0)),
    Ablation(name="pair by pair", differs="a visit for each pair of shards, or of their chunks", builder=PairByPair),
    Ablation(name="no overlap", differs="waits for each exchange immediately", transport=Waiting),
    Ablation(name="no LAO", differs="eager tiles", kernel="reference"),
    Published(name="published", differs="as in the paper: zigzag, heads whole, Q circulates"),
    Published(
        name="no GAO",
        differs="published, stores each hop's (out, lse) and merges them at the end",
        forward=LateMerge,
    ),
    Published(
        name="published, no overlap",
        differs="published, waits for each exchange immediately",
        transport=Waiting,
    ),
    Ablation(name="key-value circulates", differs="published, backward moves K, V, dK, dV", strategy=RING),
    Ablation(
        name="ring route",
        differs="published, shards passed on around the ring",
        strategy=replace(PAPER, route="ring"),
    ),
    Ablation(
        name="RingAttention",
        differs="published, K, V, dK, dV around the ring, dK, dV in fp32",
        strategy=NAMED["ring-attention"],
    ),
    Published(
        name="io-dtype accumulation",
        differs="published, out, dq, dk, dv rounded after each visit",
        forward=NarrowForward,
        backward=NarrowBackward,
        tolerance=6.0,  # the error is the point
    ),
    Ablation(
        name="contiguous",
        differs="published, in another layout",
        strategy=replace(PAPER, layout="contiguous", route="direct"),
    ),
    Ablation(
        name="contiguous, nearest circulates",
        differs="published, in another layout, each pair computed at its nearer end",
        strategy=replace(PAPER, layout="contiguous", route="direct", circulate="nearest"),
    ),
)
