"""What ``ablation.py`` compares: our attention, and each time one thing about it undone.

Most differ by a value that the library takes. The others are a
:class:`burst_attention.attention.passes.Pass` or a transport of their own, run by the library's sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
from burst_attention.planner.choice import Candidate, HeadsOrAuto, KeepOrAuto, WavesOrAuto

from ..harness.calls import Begin, Call, Ours
from ..harness.trace import over
from ..harness.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Variant(Ours):
    """Ours, as it is planned for the calls and the machine, with one thing undone.

    Attributes:
        differs: what is not as in ours, in words.
        assignment, keep, waves: as for :func:`burst_attention.make_plan`; if ``keep`` or ``waves`` is told, and heads
            are not, heads are cut, and what travels does, as where both are left open.
        transport: of the messages; the plan's own class if None.
        builder: of the programs.
        forward, backward: the passes; if both are the library's, the public call is taken. Others are for whole heads.
    """

    differs: str
    layout: str = "auto"
    heads: HeadsOrAuto = "auto"
    keep: KeepOrAuto = "auto"
    waves: WavesOrAuto = "auto"
    assignment: str = "auto"
    transport: type[Transport] | None = None
    builder: type[Builder] = Builder
    forward: type[Forward] = Forward
    backward: type[Backward] = Backward

    def plan(self, workload: Workload) -> Plan:
        if (self.keep, self.waves) != ("auto", "auto") and self.heads == "auto":
            return self.held(workload).plan(workload)
        plan = super().plan(workload)
        if self.builder is not Builder:
            plan = Plan(replace(plan.schedule, builder=self.builder), plan.transport, plan.agreement)
        return plan if self.transport is None else over(plan, self.transport, agreement=plan.agreement)

    def options(self, workload: Workload) -> dict[str, Any]:
        more = {"keep": self.keep, "assignment": self.assignment, "waves": self.waves}
        return super().options(workload) | more

    def held(self, workload: Workload) -> Variant:
        """This one, all else as it is where nothing is told: by itself it would be planned otherwise."""
        planned = replace(self, keep="auto", waves="auto")
        plan = planned.plan(workload)
        groups, travels = plan.schedule.decide(planned.shape(workload), planned.travels)
        keep = groups.keep if self.keep == "auto" else self.keep
        waves = groups.waves if self.waves == "auto" else self.waves
        found = {"layout": plan.layout, "heads": groups.query, "keep": keep, "waves": waves, "assignment": travels}
        return replace(self, **found)  # type: ignore[arg-type]

    def build(self, workload: Workload) -> Call:
        call = super().build(workload)
        assert call.plan is not None
        return replace(call, detail=f"{call.plan.layout}, {self.candidate(call.plan, workload)}, {call.plan.route}")

    def candidate(self, plan: Plan, workload: Workload) -> Candidate:
        """How heads are cut, and what travels."""
        return Candidate(*plan.schedule.decide(self.shape(workload), self.travels))

    def shape(self, workload: Workload) -> Shape:
        """Of a call."""
        sizes = {"q_heads": workload.heads, "kv_heads": workload.kv_heads, "head_dim": workload.head_dim}
        return shape_of(workload.torch_dtype, batch=1, **sizes)

    def begin(self, plan: Plan) -> Begin:
        library = (self.forward, self.backward) == (Forward, Backward)
        return super().begin(plan) if library else partial(swept, self, plan)


def swept(
    variant: Variant, plan: Plan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Callable[[], Tensors]]:
    """The call with the variant's own passes, put together as in the public one; all [1, H, S_local, D]."""
    scale = 1 / math.sqrt(q.shape[-1])
    kernel = choose(variant.kernel, device=q.device, dtype=q.dtype)
    plan.agreement.agree("an ablation's forward", {"variant": variant.name})
    out, lse = _forward(variant.forward(q, k, v, scale, kernel), plan)

    def backward() -> Tensors:
        plan.agreement.agree("an ablation's backward", {"variant": variant.name})
        stats = torch.stack((lse, row_dot(dout, out, lse.dtype)), -1)
        work = variant.backward(dout, q, k, v, stats, scale, kernel)
        sums = sweep(plan.schedule.program(variant.travels, Direction.BACKWARD), plan.transport, work)
        grads = [*sums.pop(Side.QUERY), *sums.pop(Side.KEY)]
        for n, grad in enumerate(grads):  # one by one, so that a sum is free once it is rounded
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
    """A forward that keeps each hop's (out, lse) and merges them, in the same order, when the sweep is over.

    Only for layouts in which a pair's rows are consecutive: of others it gets a copy of the total's rows to fold into.
    """

    parts: list[tuple[Tensors, Tensors]] = field(default_factory=list)

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        self.parts.append((total, part))

    def merge(self) -> None:
        """Fold in what was kept."""
        for total, part in self.parts:
            merge_(*total, *part)


@dataclass(frozen=True, eq=False)
class NarrowForward(Forward):
    """A forward whose out is rounded to the io dtype after each visit; a visit itself is merged in fp32."""

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
    """A backward whose sums dq, dk, dv are rounded to the io dtype after each visit."""

    def blank(self, side: Side, rows: int) -> Tensors:
        return tuple(x.to(self.q.dtype) for x in super().blank(side, rows))

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        return tuple(self.q.dtype for _ in super().wire_dtypes(side, exact=True))


class PairByPair(Builder):
    """Programs that visit one pair of shards at a time, or of their chunks where they come in waves."""

    def products(self, keys: dict[int, list[int]], group: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        return (((j,), (i,)) for i, these in keys.items() for j in these)

    def at_once(self, rectangles: list[Rectangle]) -> list[list[int]]:
        return [[n] for n in range(len(rectangles))]


class Waiting(Transport):
    """A transport that finishes each exchange before it goes on: nothing is computed while it is on the wire."""

    def post(self, sends: Sequence[Send], receives: Sequence[Receive], *, label: str) -> Pending:
        pending = super().post(sends, receives, label=label)
        self.wait(pending)
        return pending


Published = partial(Variant, layout="zigzag", heads=1, route="direct")
VARIANTS = (
    Variant(name="ours", differs=""),  # what was planned is told in its place
    Variant(name="heads uncut", differs="heads=1, all else planned", heads=1),
    Variant(name="nothing kept", differs="the backward fetches its context slice again", keep=False),
    Variant(name="one wave", differs="a context slice's shards come all at once", waves=1),
    Variant(name="owner by owner", differs="a context slice's shards come one by one", waves=0),
    Variant(name="pair by pair", differs="each pair of shards, or of their waves, a visit", builder=PairByPair),
    Variant(name="no overlap", differs="each exchange waited for when posted", transport=Waiting),
    Variant(name="no LAO", differs="eager tiles", kernel="reference"),
    Published(name="published", differs="as in the paper: zigzag, heads uncut, query travels", travels="query"),
    Published(
        name="no GAO",
        differs="published, each hop's (out, lse) kept, merged at the end",
        travels="query",
        forward=LateMerge,
    ),
    Published(
        name="published, no overlap",
        differs="published, each exchange waited for when posted",
        travels="query",
        transport=Waiting,
    ),
    Published(name="key-value travels", differs="published, backward moves K, V, dK, dV", travels="key-value"),
    Published(name="ring route", differs="published, shards passed on round the ring", route="ring", travels="query"),
    Published(
        name="RingAttention",
        differs="published, K, V, dK, dV round the ring, dK, dV in fp32",
        route="ring-attention",
        travels="key-value",
    ),
    Published(
        name="io-dtype accumulation",
        differs="published, out, dq, dk, dv rounded after each visit",
        travels="query",
        forward=NarrowForward,
        backward=NarrowBackward,
        tolerance=6.0,  # the error is the point
    ),
    Published(name="contiguous", differs="published, but for the layout", layout="contiguous", travels="query"),
    Published(
        name="contiguous, either travels",
        differs="published, but for the layout, and each pair is computed at its nearer end",
        layout="contiguous",
        travels="either",
    ),
)
