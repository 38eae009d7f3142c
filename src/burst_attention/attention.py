"""The public call: check and agree, then the autograd Function over the sweep."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import choose
from .kernels.contract import DTYPES, Kernel, accumulation_dtype, wire_dtype
from .kernels.merge import row_dot
from .plan.cost import Shape
from .plan.rows import Side
from .plan.schedule import TRAVELS
from .planning import Plan
from .sweep import Backward, Forward, sweep


@dataclass(frozen=True, eq=False)
class _Call:
    """The frozen half of a call: everything but the tensors. ``number``: which call on its process group it is."""

    plan: Plan
    scale: float
    travels: str
    kernel: Kernel
    number: int = 0


@overload
def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    return_lse: Literal[True],
    scale: float | None = None,
    travels: str = "auto",
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    return_lse: Literal[False] = False,
    scale: float | None = None,
    travels: str = "auto",
    kernel: str = "auto",
) -> Tensor: ...
def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    travels: str = "auto",
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that is spread over the ranks of ``plan``. Every rank of the group must call it.

    Args:
        q: [B, Hq, S_local, D], this rank's queries: float64, float32, bfloat16 or float16.
        k: [B, Hkv, S_local, D], Hq divisible by Hkv.
        v: [B, Hkv, S_local, Dv].
        plan: from :func:`burst_attention.make_plan`; it says which positions are here and what a query sees.
        scale: of the scores; 1 / sqrt(D) if None.
        travels: what moves in the backward: ``query`` (arXiv 2403.09347, algorithm 2), ``key-value`` (RingAttention),
            or ``auto``, the one with fewer bytes.
        kernel: ``auto``, ``reference``, ``aten`` or ``aten-fp32`` (:func:`burst_attention.kernels.choose`).
        return_lse: also return the log-sum-exp of each row's scores.

    Returns:
        out [B, Hq, S_local, Dv] in q's dtype; with ``return_lse`` also lse [B, Hq, S_local] in fp32 (fp64 for fp64).
        Both are differentiable, once. A query that sees nothing gives out 0, lse -inf and gradient 0.

    Raises:
        TypeError, ValueError: an argument can't be used, here or on another rank, or the ranks disagree: the same
            class on every rank, before anything moves.
        ExchangeError: a peer is gone or stuck.
    """
    try:
        call, fields = _checked(q, k, v, plan, scale, travels, kernel)
    except (TypeError, ValueError) as error:
        if isinstance(plan, Plan):
            plan.refuse(error)
        raise
    plan.agreement.agree("burst_attention", {**fields, "return_lse": bool(return_lse)})
    out, lse = _BurstAttention.apply(q, k, v, replace(call, number=plan.transport.health.next_call()))
    return (out, lse) if return_lse else out


def _checked(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None, travels: str, kernel: str
) -> tuple[_Call, dict[str, Any]]:
    """The call, and what all ranks must pass alike."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r} must come from make_plan(seqlen, ...)")
    _check_tensors(q, k, v, plan.length)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[3])
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale <= sys.float_info.max:
        raise ValueError(f"scale={scale!r} must be a positive, finite number, or None for 1 / sqrt(head dim)")
    if travels != "auto" and travels not in TRAVELS:
        raise ValueError(f"travels={travels!r} is unknown; choose one of auto, {', '.join(TRAVELS)}")
    plan.transport.check_device(q.device)
    chosen = choose(kernel, device=q.device, dtype=q.dtype)
    wanted = [x.requires_grad and torch.is_grad_enabled() for x in (q, k, v)]
    if travels == "auto" and any(wanted):
        travels = plan.schedule.choose_travels(call_shape(q, k, v))
    call = _Call(plan, float(scale), travels, chosen)
    fields = {
        **plan.schedule.told,
        "batch": q.shape[0],
        "query heads": q.shape[1],
        "key-value heads": k.shape[1],
        "head dim": q.shape[3],
        "value head dim": v.shape[3],
        "dtype": str(q.dtype),
        "device": q.device.type,
        "scale": call.scale,
        "travels": travels,
        "kernel": chosen.name,
        "gradients wanted by q, k, v": wanted,
    }
    return call, fields


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, length: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, not a tensor")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; use one of {', '.join(map(str, DTYPES))}")
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, heads, S_local, head dim]")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise TypeError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must be alike")
        if x.shape[2] != length:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, but this rank holds {length} tokens (dim 2); cut it with plan.shard"
            )
        if x.shape[0] != q.shape[0] or 0 in (x.shape[0], x.shape[1], x.shape[3]):
            raise ValueError(
                f"{name} has shape {list(x.shape)}, q {list(q.shape)}; batch must be equal, no dim but S 0"
            )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"q has head dim {q.shape[3]}, k has {k.shape[3]}; they must be equal")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads, v has {v.shape[1]}; they must be equal")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, not a multiple of the {k.shape[1]} heads of k and v")


def call_shape(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """What a call moves per row, from its tensors."""
    return Shape(
        batch=q.shape[0],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        io=q.element_size(),
        partial=wire_dtype(q.dtype).itemsize,
        accumulate=accumulation_dtype(q.dtype).itemsize,
    )


class _BurstAttention(torch.autograd.Function):
    """Ledger.

    in      q [B, Hq, S_local, D], k [B, Hkv, S_local, D], v [B, Hkv, S_local, Dv]: this rank's shards
    out     O = softmax(scale Q K' + mask) V over all shards, L = logsumexp(scale Q K' + mask)
    saved   q, k, v, O, L; nothing of other ranks: the backward fetches again what it needs
    merge   L = logaddexp(L1, L2), O = O1 e^(L1 - L) + O2 e^(L2 - L); (0, -inf) is its identity
    back    D = rowsum(dO * O) - dL, at home, before anything travels
            P = e^(scale Q K' - L), dV = P' dO, dS = P * (dO V' - D), dQ = scale dS K, dK = scale dS' Q per tile
    wire    forward K, V; backward (Q, dO, L, D) out and dQ home, or K, V out and dK, dV home
    round   tiles and sums in fp32 (fp64 for fp64) where the kernel gives it; once to the io dtype when a partial
            is sent, once at the end
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        plan = call.plan
        work = Forward(_dense_rows(q), _dense_rows(k), _dense_rows(v), call.scale, call.kernel)
        with torch.autocast(q.device.type, enabled=False):
            sums = sweep(plan.schedule.forward, plan.transport, work, phase="forward")
        out, lse = sums[Side.QUERY]
        out = out.to(q.dtype).contiguous()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        # Ranks that run the backwards of several calls in different orders would add up each other's.
        call.plan.agreement.agree("the backward of burst_attention", {"call number": call.number})
        dout = torch.zeros_like(out) if dout is None else dout
        delta = row_dot(dout, out, lse.dtype)
        if dlse is not None:
            delta = delta - dlse
        dout, q, k, v = map(_dense_rows, (dout, q, k, v))
        work = Backward(dout, q, k, v, torch.stack((lse, delta), -1), call.scale, call.kernel)
        program = call.plan.schedule.backward(call.travels)
        with torch.autocast(q.device.type, enabled=False):
            sums = sweep(program, call.plan.transport, work, phase="backward")
        grads = [*sums.pop(Side.QUERY), *sums.pop(Side.KEY)]
        for n, grad in enumerate(grads):  # one by one, so that a sum is free once it is rounded
            grads[n] = grad.to(q.dtype).contiguous()
        return *grads, None


def _dense_rows(x: Tensor) -> Tensor:
    """Kernels want a dense last dim; an expanded gradient has none."""
    return x if x.stride(-1) == 1 else x.contiguous()
