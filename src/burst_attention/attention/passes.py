"""Forward and backward as the sweep sees them, the last steps of both, and which derivatives there are.

Each pass defines what circulates, what a pair of shards yields, and how to combine partial results. A forward merges
(out, lse) by online softmax. A backward adds up gradients. Each also defines the dtypes of results on the wire.

All derivatives except one backward are refused. For some of the others torch would silently return zeros: an operator
drops forward-mode tangents. A function marked ``once_differentiable`` has no graph for its gradients:
``torch.autograd.functional.jvp``, which differentiates twice, then returns zeros.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels.contract import (
    BackwardInputs,
    Kernel,
    accumulation_dtype,
    add_,
    blank_output,
    converted,
    merge_,
    row_dot,
    wire_dtype,
)
from ..plan.groups import WHOLE, Groups
from ..plan.program import Program
from ..plan.rows import Direction, Payload, Side
from ..plan.tile import Tiles

Tensors = tuple[Tensor, ...]  # dim 2 of each holds a shard's rows: [B, H, rows, ...] or [B, H, rows]
Running = Callable[[], Tensors | None]


def part_of(tensors: Tensors, parts: int, part: int) -> Tensors:
    """Return views of one of ``parts`` equal parts of the heads."""
    if parts == 1:
        return tensors
    return tuple(x.narrow(1, part * (x.shape[1] // parts), x.shape[1] // parts) for x in tensors)


def cache(q: Tensor, k: Tensor, v: Tensor, heads: int, rows: int, *, results: bool) -> Tensors:
    """Make the cache of a sequence group for one head group: q, k, v, out and lse; empty if not cached."""
    if not rows:
        return tuple(q.new_empty(0) for _ in range(5))
    counts = q.shape[1] // heads, *(max(1, k.shape[1] // heads),) * 2  # surplus groups share a key-value head
    inputs = (x.new_empty(x.shape[0], n, rows, x.shape[3]) for x, n in zip((q, k, v), counts, strict=True))
    out = (q.shape[0], counts[0], rows, v.shape[3]) if results else (0,)
    return *inputs, q.new_empty(out), q.new_empty(out[:3], dtype=accumulation_dtype(q.dtype))


class Pass:
    """What circulates in a sweep, what a visit of two shards computes, and how partial results combine."""

    direction: ClassVar[Direction]
    returns: ClassVar[tuple[Side, ...]]

    @property
    def own(self) -> Mapping[Side, Tensors]:
        """The tensors of each side that this rank holds and that circulate."""
        raise NotImplementedError

    @property
    def own_slice(self) -> Mapping[Side, tuple[Tensor | None, ...]]:
        """The buffers that cache the sequence group's q, k, v, by side; None for a tensor that is not cached."""
        return {}

    @property
    def own_results(self) -> Tensors:
        """The buffers that cache the results of the whole sequence for one head group; () to cache none."""
        return ()

    def payload(self, side: Side, payload: Payload) -> tuple[int, ...]:
        """Return the indices of the side's tensors that belong to the payload."""
        return tuple(range(len(self.own[side])))

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        """Compute one pair; return partial results by side, {} if a kernel extended ``running()`` in place."""
        raise NotImplementedError

    def empty(self, side: Side, rows: int, dtypes: tuple[torch.dtype, ...]) -> Tensors:
        """Allocate partial results of some rows, for one part of the heads."""
        raise NotImplementedError

    def blank(self, side: Side, rows: int) -> Tensors:
        """Return the identity of :meth:`combine`, in the accumulation dtype, for one part of the heads."""
        raise NotImplementedError

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        """Fold ``part`` into ``total`` in place."""
        raise NotImplementedError

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        """Return the dtypes that partial results are rounded to before they are sent."""
        raise NotImplementedError

    def final_dtypes(self, side: Side) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the final results."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Forward(Pass):
    """The forward pass: (out, lse) from q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv].

    ``keeping``: buffers to fill with the sequence group's q, k, v for one head group, and maybe out, lse; None: no
    cache.
    """

    direction: ClassVar[Direction] = Direction.FORWARD
    returns: ClassVar[tuple[Side, ...]] = direction.returns

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    kernel: Kernel
    groups: Groups = WHOLE
    keeping: Tensors | None = None

    @property
    def own(self) -> Mapping[Side, Tensors]:
        return {Side.QUERY: (self.q,), Side.KEY: self.keys}

    @property
    def keys(self) -> Tensors:
        """The tensors of keys and values that circulate."""
        return self.k, self.v

    @property
    def own_slice(self) -> Mapping[Side, tuple[Tensor | None, ...]]:
        return {} if self.keeping is None else {Side.QUERY: self.keeping[:1], Side.KEY: self.keeping[1:3]}

    @property
    def own_results(self) -> Tensors:
        return (self.keeping or ())[3:]

    def payload(self, side: Side, payload: Payload) -> tuple[int, ...]:
        return (0,) if side is Side.QUERY else (0, 1)

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (q,), (k, v) = query, key
        if self.kernel.continues and (total := running()):
            self.kernel.extend(q, k, v, tiles, self.scale, *total)
            return {}
        return {Side.QUERY: self.kernel.forward(q, k, v, tiles, self.scale)}

    def empty(self, side: Side, rows: int, dtypes: tuple[torch.dtype, ...]) -> Tensors:
        (q,) = part_of((self.q,), self.groups.query, 0)
        shape = (*q.shape[:2], rows)
        return q.new_empty(*shape, self.v.shape[3], dtype=dtypes[0]), q.new_empty(shape, dtype=dtypes[1])

    def blank(self, side: Side, rows: int) -> Tensors:
        (q,) = part_of((self.q,), self.groups.query, 0)
        return blank_output(q, self.v, rows, accumulation_dtype(q.dtype))

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        merge_(*total, *part)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        wide = accumulation_dtype(self.q.dtype)
        return (wide if exact else wire_dtype(self.q.dtype)), wide

    def final_dtypes(self, side: Side) -> tuple[torch.dtype, ...]:
        return self.q.dtype, accumulation_dtype(self.q.dtype)


@dataclass(frozen=True, eq=False)
class Backward(Pass):
    """The backward pass: (dq) and (dk, dv).

    dout is [B, Hq, Sq, Dv]. ``stats``: (lse, D) per row, [B, Hq, Sq, 2]; None if ``keeping`` (what the forward cached)
    or ``results`` (of a rank that computes all its pairs) has out and lse. lse is 0, not -inf, in rows that see
    nothing. ``alone``: a single pair gives the whole result. ``of_lse``: D may include a gradient of the lse.
    """

    direction: ClassVar[Direction] = Direction.BACKWARD
    returns: ClassVar[tuple[Side, ...]] = direction.returns

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    stats: Tensor | None
    scale: float
    kernel: Kernel
    alone: bool = False
    groups: Groups = WHOLE
    keeping: Tensors | None = None
    results: Tensors | None = None
    of_lse: bool = False

    @property
    def own(self) -> Mapping[Side, Tensors]:
        # If out and lse are cached, these two only hold their places: ``own_slice`` has the tensors.
        results = (self.results or (self.q[..., :0], self.q[..., 0])) if self.stats is None else (self.stats,)
        return {Side.QUERY: (self.dout, self.q, *results), Side.KEY: self.keys}

    @property
    def keys(self) -> Tensors:
        """The tensors of keys and values that circulate; a gradient of each returns."""
        return self.k, self.v

    @property
    def own_slice(self) -> Mapping[Side, tuple[Tensor | None, ...]]:
        if self.keeping is None:
            return {}
        results = (None,) if self.stats is not None else self.keeping[3:]
        return {Side.QUERY: (None, self.keeping[0], *results), Side.KEY: self.keeping[1:3]}

    def payload(self, side: Side, payload: Payload) -> tuple[int, ...]:
        if side is Side.KEY:
            return 0, 1
        return {
            Payload.ALL: (0, 1, 2),
            Payload.INPUTS: (1,),
            Payload.GRADIENTS: (0, 2),
            Payload.OUTPUT_GRADIENT: (0,),
        }[payload]

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (dout, q, *results), (k, v) = query, key
        out, lse, delta = (*results, None) if self.stats is None else (None, *results[0].unbind(-1))
        assert lse is not None
        inputs = BackwardInputs(dout, q, k, v, lse, delta, tiles, self.scale, self.alone, out, self.of_lse)
        dq, dk, dv = self.kernel.backward(inputs)
        return {Side.QUERY: (dq,), Side.KEY: (dk, dv)}

    def empty(self, side: Side, rows: int, dtypes: tuple[torch.dtype, ...]) -> Tensors:
        own, parts = ((self.q,), self.groups.query) if side is Side.QUERY else (self.keys, self.groups.key)
        like = part_of(own, parts, 0)
        made = zip(like, dtypes, strict=True)
        return tuple(x.new_empty(*x.shape[:2], rows, x.shape[3], dtype=dtype) for x, dtype in made)

    def blank(self, side: Side, rows: int) -> Tensors:
        return tuple(x.zero_() for x in self.empty(side, rows, self.wire_dtypes(side, exact=True)))

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        for a, b in zip(total, part, strict=True):
            add_(a, b)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        dtype = accumulation_dtype(self.q.dtype) if exact else wire_dtype(self.q.dtype)
        return (dtype,) if side is Side.QUERY else (dtype,) * len(self.keys)

    def final_dtypes(self, side: Side) -> tuple[torch.dtype, ...]:
        return (self.q.dtype,) if side is Side.QUERY else (self.q.dtype,) * len(self.keys)


@dataclass(frozen=True, eq=False)
class CallKind:
    """What all calls of one kind resolve to, for the forward and the backward. The plan keeps it."""

    kernel: Kernel
    softcap: float | None
    groups: Groups
    circulate: str
    programs: dict[Direction, Program] = field(default_factory=dict)


SETTLED = 4  # numbers of a packed :class:`Settled`


@dataclass(frozen=True)
class Settled:
    """The forward's decisions, as an output tensor: only tensors reach the backward of a compiled graph."""

    number: int
    kind: int  # in the plan's list
    scale: float
    of_lse: bool  # whether the lse was returned, so that it may have a gradient

    def pack(self) -> Tensor:
        """Return a float64 [SETTLED] tensor on the CPU."""
        return torch.tensor((self.number, self.kind, self.scale, self.of_lse), dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor) -> Settled:
        """Read a tensor of :meth:`pack`."""
        number, kind, scale, of_lse = packed.tolist()
        return cls(int(number), int(kind), scale, bool(of_lse))


def signless(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return (q, scale) with the same scores and a positive scale, which fused kernels need; the sign moves into q.

    So does a zero, which keeps NaN and inf in q visible.
    """
    return (q, scale) if scale > 0 else (q * sign_of(scale), abs(scale) or 1.0)


def sign_of(scale: float) -> float:
    """Return -1, 0 or 1."""
    return float((scale > 0) - (scale < 0))


def lost_rows(q: Tensor) -> Tensor | None:
    """Return [B, H, S_local]: NaN for rows whose query holds a NaN or an infinity, else 0; None on a GPU.

    PyTorch's operator for CPUs takes a row whose scores are all NaN for one that sees nothing, and gives 0.
    """
    return None if q.is_cuda else (q - q).sum(-1)


def with_lost_rows(out: Tensor, lse: Tensor, lost: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the result of :func:`lost_rows` to a call's results, in place."""
    if lost is None:
        return out, lse
    return out.add_(converted(lost, out.dtype).unsqueeze(-1)), lse.add_(converted(lost, lse.dtype))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of rows that also see a sink, a logit per head without a value (gpt-oss). Overwrites ``out``.

    L' = logaddexp(L, sink), O' = O e^(L - L'). A row that sees no key keeps out 0. With L' and O', the backward of the
    keys is the same: P = e^(S - L') includes the sink in its sum, and D = rowsum(dO * O').
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # Without a key and with a sink of -inf, both are -inf and their difference is NaN.
    out *= torch.exp(lse - total).masked_fill_(lse == -torch.inf, 0).unsqueeze(-1)
    return out, total


def sink_gradient(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """Return this rank's part of the gradient of the sinks, [H]: the sum over its rows of -e^(sink - L') D.

    The sink's value is zero, so dP is zero, and dS = P (dP - D).
    """
    part = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill_(lse == -torch.inf, 0) * delta
    return -part.sum((0, 2)).to(sinks.dtype)


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return D = rowsum(dO * O) - dL, [B, H, S_local], in ``dtype``; ``dlse`` is dL, the gradient of lse, or None."""
    delta = row_dot(dout, out, dtype)
    return delta if dlse is None else delta - dlse


def rounded_gradients(sums: dict[Side, Tensors], scale: float, dtype: torch.dtype) -> list[Tensor]:
    """Return dq, dk and maybe dv from a backward's sums, which it takes; frees each sum once it is rounded."""
    grads = [*sums.pop(Side.QUERY), *sums.pop(Side.KEY)]
    if scale <= 0:
        grads[0] = grads[0] * sign_of(scale)
    for n, grad in enumerate(grads):
        grads[n] = converted(grad, dtype).contiguous()
    return grads


def dense_rows(x: Tensor) -> Tensor:
    """Make the last dim dense, as kernels need; an expanded gradient's is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_transforms(call: str, **tensors: Tensor | None) -> None:
    """Raise ValueError inside torch.func's transforms, and for tensors with a forward-mode tangent."""
    remedy = "use backward() or torch.autograd.grad"
    if torch._C._are_functorch_transforms_active():
        raise ValueError(f"{call} can't be transformed by torch.func (grad, jacrev, jvp, jacfwd, vmap, ...); {remedy}")
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(f"{name} has a tangent, but {call} has no forward-mode derivative; {remedy}")


def is_dtensor(x: Any) -> bool:
    """Return whether ``x`` is a DTensor, without the half second of importing its module if nothing else has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_batches(call: str, *grads: Tensor) -> None:
    """Raise ValueError for gradients that torch has batched (``is_grads_batched``, ``vectorize``)."""
    if any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
        raise ValueError(f"{call} takes no batches of gradients; leave out is_grads_batched and vectorize")


def differentiable_once(call: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an autograd Function's backward so that its results refuse to be differentiated again."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``backward`` so that a second derivative raises an error."""

        def once(ctx: Any, *grads: Tensor) -> Any:
            saved = list(ctx.saved_tensors)
            again = torch.is_grad_enabled()
            sources = [x for x in (*grads, *saved) if again and x is not None and x.requires_grad]
            with torch.no_grad():
                results = backward(ctx, saved, *grads)
            if not sources:
                return results
            return tuple(None if x is None else _Refused.apply(call, x, *sources) for x in results)

        return once

    return decorate


class _Refused(torch.autograd.Function):
    """Ledger. in a gradient and the tensors it depends on; out the same gradient; back an error."""

    @staticmethod
    def forward(ctx: Any, call: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.call = call
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_second(ctx.call)


def refuse_second(call: str) -> NoReturn:
    """Raise RuntimeError because a gradient of ``call`` is differentiated."""
    raise RuntimeError(f"{call} can be differentiated once; second derivatives are not supported")
