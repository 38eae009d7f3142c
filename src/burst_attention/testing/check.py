"""Compare one distributed call and its gradients with the fp64 oracle, on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..attention.call import burst_attention
from ..attention.hardware import shape_of
from ..attention.new_plan import make_plan
from ..attention.plan import Plan
from ..plan.layout import Layout
from ..plan.mask import Mask
from ..plan.strategy import CacheOrAuto, ChunksOrAuto, DegreeOrAuto, GatherOrAuto, Strategy
from .oracle import Gradients, attend, seen_of, torch_attention


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call to check.

    ``logits`` multiplies the scores, which ``softcap`` caps. ``sinks`` adds a sink to each head. ``dlse`` says whether
    the lse gets a gradient too. With ``keys``, ``seqlen`` counts queries, from position ``query_offset`` on.
    """

    seqlen: int = 512
    mask: Mask = field(default_factory=Mask)
    layout: str = "zigzag"
    route: str = "auto"
    circulate: str = "auto"
    ulysses_degree: DegreeOrAuto = 1
    cache_qkv: CacheOrAuto = "auto"
    chunks: ChunksOrAuto = "auto"
    gather_kv: GatherOrAuto = "auto"
    kernel: str = "auto"
    dtype: torch.dtype = torch.float32
    batch: int = 1
    q_heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    v_head_dim: int | None = None
    dlse: bool = True
    logits: float = 1.0
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0
    device: str = "cpu"
    keys: Layout | None = None
    query_offset: int = 0

    @property
    def strategy(self) -> Strategy:
        """The strategy under test."""
        return Strategy(**{each.name: getattr(self, each.name) for each in fields(Strategy)})

    def inputs(self) -> dict[str, Tensor]:
        """Return the global q, k, v, dout, dlse and sinks if there are any, identical on every rank."""
        make = torch.Generator().manual_seed(self.seed)
        value_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, dtype=torch.float64)

        batch, s, keys = self.batch, self.seqlen, self.seqlen if self.keys is None else self.keys.stop
        q = normal(batch, self.q_heads, s, self.head_dim) * self.logits
        k, v = normal(batch, self.kv_heads, keys, self.head_dim), normal(batch, self.kv_heads, keys, value_dim)
        dout, dlse = normal(batch, self.q_heads, s, value_dim), normal(batch, self.q_heads, s)
        cast = {name: x.to(self.device, self.dtype) for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout))}
        wide = torch.promote_types(self.dtype, torch.float32)
        cast["dlse"] = dlse.to(self.device, wide)
        return cast | ({"sinks": normal(self.q_heads).to(self.device, wide)} if self.sinks else {})


MAX_ERROR = "max error / max"


@dataclass(frozen=True)
class Row:
    """One tensor's error on one rank. ``error`` and ``bound`` are in the unit ``measure``; error <= bound passes."""

    tensor: str
    rank: int
    measure: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound  # False for NaN


@dataclass(frozen=True)
class Report:
    """The result of one check: the rows of all ranks."""

    title: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether all rows passed."""
        return all(row.passed for row in self.rows)

    def table(self) -> Any:
        """Return a ``rich.table.Table`` with the worst rank of each tensor."""
        from rich.table import Table

        table = Table("tensor", "measure", "worst rank", "error", "bound", "", title=self.title)
        for name in dict.fromkeys(row.tensor for row in self.rows):
            worst = max((r for r in self.rows if r.tensor == name), key=lambda r: (not r.passed, r.error))
            verdict = "[green]ok[/]" if worst.passed else "[red]WRONG[/]"
            figures = (f"{worst.error:.2e}", f"{worst.bound:.2e}")
            table.add_row(name, worst.measure, str(worst.rank), *figures, verdict)
        return table


def relative_l2(actual: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Return ||actual - expected|| / max(||expected||, floor) in fp64; equal infinities count as equal."""
    actual, expected = actual.detach().double(), expected.detach().double()
    both = (actual == expected) & expected.isinf()
    actual, expected = actual.masked_fill(both, 0.0), expected.masked_fill(both, 0.0)
    difference, size = (actual - expected).norm().item(), max(expected.norm().item(), floor)
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size


def relative_max(actual: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Return max |actual - expected| / max |scale| in fp64; 0 for empty tensors. x / 0 gives inf."""
    if not actual.numel():
        return 0.0
    difference = (actual.detach().double() - expected.double()).abs().max().item()
    size = scale.double().abs().max().item()
    return difference / size if size else math.inf if difference else 0.0


def distributed_call(case: Case, plan: Plan, inputs: dict[str, Tensor]) -> Gradients:
    """Run the call on this rank; return its shards of out, lse, dq, dk and dv."""
    q, k, v, dout, dlse = (_shard(plan, name, inputs[name]) for name in ("q", "k", "v", "dout", "dlse"))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sinks = inputs["sinks"].requires_grad_() if case.sinks else None
    options: dict[str, Any] = {"softcap": case.softcap, "sinks": sinks, "kernel": case.kernel}
    if case.dlse:
        out, lse = burst_attention(q, k, v, plan, **options, return_lse=True)
        torch.autograd.backward([out, lse], [dout, dlse])
    else:  # a call without lse may cache other tensors
        out = burst_attention(q, k, v, plan, **options)
        out.backward(dout)
        with torch.no_grad():
            _, lse = burst_attention(q, k, v, plan, **options, return_lse=True)
    result = Gradients(out.detach(), lse.detach(), q.grad, k.grad, v.grad)
    if sinks is None or sinks.grad is None:
        return result
    parts = plan.agreement.collect("gradients of sinks", sinks.grad.tolist())  # each rank has a part of the sum
    whole = torch.tensor(parts, dtype=torch.float64).sum(0)
    return replace(result, dsinks=whole.to(sinks))


def _shard(plan: Plan, name: str, x: Tensor) -> Tensor:
    """Return this rank's part of a global tensor with this name."""
    if name == "dsinks":
        return x
    return plan.shard_keys(x, 2) if name in ("k", "v", "dk", "dv") else plan.shard(x, 2)


def compare(case: Case, plan: Plan) -> list[Row]:
    """Compare this rank's shards with the oracle. Every rank of the plan's group must call it."""
    inputs = case.inputs()
    actual = distributed_call(case, plan, inputs)
    dlse = inputs["dlse"] if case.dlse else None
    offset = case.query_offset
    arguments = (inputs["q"], inputs["k"], inputs["v"], plan.mask)
    cap, sinks = case.softcap, inputs.get("sinks")
    oracle = attend(*arguments, dout=inputs["dout"], dlse=dlse, softcap=cap, sinks=sinks, query_offset=offset)
    expected = {name: _shard(plan, name, x) for name, x in oracle.items()}
    # A gradient can be 0 by cancellation (one key has all the weight). Measure its error relative to dout instead.
    size = inputs["dout"].double().norm().item()
    floor = 0.05 * size
    if case.dtype in (torch.float64, torch.float32):
        bound = 1e-12 if case.dtype == torch.float64 else 1e-5
        errors = {name: relative_l2(x, expected[name], floor=floor) for name, x in actual.items()}
        return [Row(name, plan.rank, "relative L2", error, bound) for name, error in errors.items()]
    if case.softcap is not None or case.sinks:
        raise ValueError(f"dtype={case.dtype} with softcap or sinks: no kernel of PyTorch gives a bound; use float32")
    stock = dict(torch_attention(*arguments, dout=inputs["dout"], query_offset=offset).items())
    plain = dict(attend(*arguments, dout=inputs["dout"], query_offset=offset).items())
    if dlse is not None:
        # PyTorch's call has no gradient of lse, so its error is one of other gradients. Ours is that of D, because out
        # is rounded once, and of one rounding of the result. A lost D acts as a gradient of lse.
        lost = (inputs["dout"].double() * (oracle.out - oracle.out.to(case.dtype))).sum(-1)
        once = attend(*arguments, dout=inputs["dout"], dlse=dlse + lost, query_offset=offset)
    whole, rows = dict(oracle.items()), []
    for name, x in actual.items():
        eps = torch.finfo(case.dtype).eps
        if name in ("dq", "dk") and plain[name].double().norm().item() < eps * size:
            # A stock kernel's error may be 0, or any. With dlse the gradient itself may be large.
            right = expected[name].double()
            error = (x.double() - right).norm().item() / (size + right.norm().item())
            rows.append(Row(name, plan.rank, "error / norm of dout", error, eps / 4))
        else:
            row = _half_row(case, plan, name, x, whole, stock, plain)
            if dlse is not None and name in ("dq", "dk") and row.measure == MAX_ERROR:
                rounded = dict(once.items())[name].to(case.dtype)
                row = replace(row, bound=max(row.bound, 1.25 * relative_max(rounded, whole[name], whole[name])))
            rows.append(row)
    return rows


def _half_row(
    case: Case,
    plan: Plan,
    name: str,
    actual: Tensor,
    oracle: dict[str, Tensor],
    stock: dict[str, Tensor],
    plain: dict[str, Tensor],
) -> Row:
    """Compare a bf16 or fp16 result; the bound is PyTorch's error on one device, whole or on this rank's rows."""
    expected = _shard(plan, name, oracle[name])
    exact = plan.kinds[0].kernel.exact_partials(case.dtype)
    if name == "lse":  # in fp32; stock kernels use a less accurate exponential for bf16 and fp16
        # Its relative error of 1e-4 is an absolute error of the lse, which may be near 0 where a row sees one key.
        floor = 0.0 if exact else 2 * math.sqrt(expected.isfinite().sum().item())
        error = relative_l2(actual, expected, floor=floor)
        return Row(name, plan.rank, "relative L2", error, 1e-5 if exact else 5e-5)
    blind = ~seen_of(plan.mask, oracle["out"], oracle["dk"], case.query_offset).any(1).to(actual.device)
    theirs, truth = (x[name].double().clone() for x in (stock, plain))
    if name in ("out", "dq"):  # stock kernels give NaN where a query sees nothing
        theirs[:, :, blind], truth[:, :, blind] = 0.0, 0.0
    here = (_shard(plan, name, theirs), _shard(plan, name, truth))
    stock_error = max(relative_l2(theirs, truth), relative_l2(*here) if here[0].numel() else 0.0)
    if exact:
        if name in _rounded_on_wire(case, plan):  # rounded once more than a stock kernel's result
            bound = 1.25 * stock_error
            return Row(name, plan.rank, "relative L2", relative_l2(actual, expected), bound)
        # Scale by the oracle: if the lse has a gradient, dq and dk are larger than the stock call's.
        size = oracle[name]
        error, bound = relative_max(actual, expected, size), 1.25 * relative_max(theirs, truth, truth)
        return Row(name, plan.rank, MAX_ERROR, error, bound)
    return Row(name, plan.rank, "relative L2", relative_l2(actual, expected), 1.5 * stock_error)


def _rounded_on_wire(case: Case, plan: Plan) -> tuple[str, ...]:
    """Return the names of the results whose partials are sent back in the io dtype."""
    if plan.world == 1 or plan.schedule.route.ring:
        return ()
    sizes = {name: getattr(case, name) for name in ("batch", "q_heads", "kv_heads", "head_dim", "v_head_dim")}
    shape = shape_of(case.dtype, **sizes)
    groups, circulate = plan.planner.decide(plan.schedule, shape)
    if groups.query > 1 and groups.query == plan.world:
        return ("dk", "dv") if groups.key < groups.query else ()
    both = ("out", "dq", "dk", "dv")
    rounded = {"query": ("dq",), "key-value": ("dk", "dv"), "pass-query": ("out", "dq")}.get(circulate, both)
    return (*rounded, "dk", "dv") if groups.key < groups.query else rounded


def check(case: Case | None = None, *, group: Any = None, timeout: float | None = None) -> Report:
    """Run ``case`` over the ranks of ``group`` and compare it with the oracle. Every rank must call it.

    The oracle is dense, so memory grows with S²: keep ``seqlen`` below a few thousand tokens. Every rank gets the same
    report; print ``report.table()`` with a rich console on one of them.
    """
    case = case or Case()
    over: dict[str, Any] = {"keys": case.keys, "query_offset": case.query_offset}
    plan = make_plan(case.seqlen, mask=case.mask, **over, strategy=case.strategy, group=group, timeout=timeout)
    mine = compare(case, plan)
    figures = [figure for row in mine for figure in (row.error, row.bound)]
    rows = [
        Row(row.tensor, rank, row.measure, theirs[2 * n], theirs[2 * n + 1])
        for rank, theirs in enumerate(plan.exchange_small(figures))
        for n, row in enumerate(mine)
    ]
    kernel = plan.kinds[0].kernel.name
    keys = "" if case.keys is None else f" from {case.query_offset} over {case.keys.lengths} keys"
    title = (
        f"{plan.world} ranks, S={case.seqlen}{keys}, {case.mask}, {case.layout}, {plan.route}, {kernel}, {case.dtype}"
    )
    if case.ulysses_degree != 1:
        title += f", ulysses_degree={case.ulysses_degree}, cache_qkv={case.cache_qkv}, chunks={case.chunks}"
    return Report(title, tuple(rows))
