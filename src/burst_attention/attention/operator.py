"""The attention as a torch operator: what compilers and activation checkpointing see of it.

``burst_attention::attend`` returns (out, lse, settled, ...), ``burst_attention::attend_backward`` the gradients.
Compilers don't trace into either: both hold agreements, exchanges and tiles. An operator's schema has no plans, so it
takes a plan's handle.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import KERNELS
from ..kernels.merge import row_dot
from ..kernels.precision import accumulation_dtype
from ..plan.assignment import CIRCULATIONS
from ..plan.groups import Groups
from ..plan.rows import Side
from .checks import kernel_for, resolve, shared_fields, sign_of, signless
from .derivatives import check_transforms, refuse_second
from .passes import Backward, Forward, cached_shapes
from .plan import plan_of
from .sweep import sweep

QUERY, KEY, VALUE = 1, 2, 4  # bits of ``wanted``

# torch caches compiled graphs on disk, with the traced backward, by the operator's name and arguments only. This
# argument stops it from running a graph of an older formula. Add one with each change of this file that a graph may
# hold; a test fails until you do.
FORMULA_VERSION = 6


@dataclass(frozen=True)
class Settled:
    """The forward's decisions, for its backward: the call's number, resolved arguments, and the number of chunks.

    It is an output tensor of the operator, because only tensors reach the backward of a compiled graph.
    """

    number: int
    scale: float
    circulate: str
    kernel: str
    chunks: int

    def pack(self) -> Tensor:
        """Return a float64 [5] tensor on the CPU."""
        names = tuple(CIRCULATIONS).index(self.circulate), KERNELS.index(self.kernel)
        return torch.tensor((self.number, self.scale, *names, self.chunks), dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor) -> Settled:
        """Read a tensor of :meth:`pack`."""
        number, scale, circulate, kernel, chunks = packed.tolist()
        return cls(int(number), scale, tuple(CIRCULATIONS)[int(circulate)], KERNELS[int(kernel)], int(chunks))


def gradients_wanted(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return which of them want a gradient, as bits."""
    if not torch.is_grad_enabled():
        return 0
    return QUERY * q.requires_grad + KEY * k.requires_grad + VALUE * v.requires_grad


@torch.library.custom_op("burst_attention::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    scale: float | None,
    kernel: str,
    heads: int,
    cached_rows: int,
    wanted: int,
    return_lse: bool,
    formula_version: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the forward.

    in:     q [B, Hq, S_local, D], k [B, Hkv, S_local, D], v [B, Hkv, S_local, Dv]: this rank's shards.
            ``handle``: the plan's. ``heads``, ``cached_rows``: :func:`~burst_attention.attention.checks.split_heads`.
            ``wanted``: :func:`gradients_wanted`. ``formula_version``: :data:`FORMULA_VERSION`.
    out:    O = softmax(scale Q K' + mask) V over all shards.
            L = logsumexp(scale Q K' + mask).
            :class:`Settled`.
            The cache: q [B, Hq / U, kept_rows, D], k and v of this rank's sequence group and head group, U = ``heads``.
            The cache is empty if U is 1 or ``cached_rows`` is 0.
    saved:  q, k, v or the cache; O, L and :class:`Settled`. The backward fetches everything else again.
    merge:  L = logaddexp(L1, L2), O = O1 e^(L1 - L) + O2 e^(L2 - L). Its identity is (0, -inf).
    wire:   K and V. With ``nearest``, ``blocks`` or U > 1 also Q out, and (O, L) home.
    round:  tiles and sums in fp32 (fp64 for fp64) if the kernel supports it; results once, at the end.
    """
    plan = plan_of(handle)
    wants = [bool(wanted & bit) for bit in (QUERY, KEY, VALUE)]
    with plan.agreement.entering("burst_attention"):
        keep = cached_rows > 0
        call = resolve(q, k, v, plan, scale=scale, kernel=kernel, heads=heads, keep=keep)
        fields = {**shared_fields(q, k, v, call, wants), "return_lse": return_lse}
        shapes = cached_shapes(q, k, v, heads, cached_rows)
        kept_q, kept_k, kept_v = (x.new_empty(shape) for x, shape in zip((q, k, v), shapes, strict=True))
        keeping = (kept_q, kept_k, kept_v) if keep else None
        q, k, v = map(_dense_rows, (q, k, v))
        q, scale = signless(q, call.scale)
        work = Forward(q, k, v, scale, call.kernel, call.groups, keeping)
        program = plan.schedule.program(call.circulate, work.direction, call.groups)
    plan.agreement.agree("burst_attention", fields)
    plan.usage.note_call()
    # A single rank can't confuse its backward with another rank's.
    number = plan.transport.health.next_call() if plan.world > 1 else 0
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(program, plan.transport, work, plan.indices)
    out, log_sum = sums[Side.QUERY]
    settled = Settled(number, call.scale, call.circulate, call.kernel.name, call.groups.chunks)
    return out.to(q.dtype).contiguous(), log_sum.contiguous(), settled.pack(), kept_q, kept_k, kept_v


@torch.library.custom_op("burst_attention::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    settled: Tensor,
    handle: int,
    heads: int,
    cached_rows: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients.

    in:     dO, dL; what the forward saved; the plan's handle; U and the number of key-value heads.
    out:    dQ, dK, dV of this rank's shards.
    back:   D = rowsum(dO * O) - dL, at home, before anything circulates.
            Per tile: P = e^(scale Q K' - L), dV = P' dO, dS = P * (dO V' - D), dQ = scale dS K, dK = scale dS' Q.
    wire:   ``query``: (Q, dO, L, D) out and dQ home. ``key-value``: K, V out and dK, dV home.
            ``nearest``: one or the other, by pair. U > 1: both, except for cached Q, K, V.
    round:  sums in fp32 (fp64 for fp64); to the io dtype once when a partial is sent, and once at the end.
    """
    plan, forward = plan_of(handle), Settled.unpack(settled)
    with plan.agreement.entering("the backward of burst_attention"):
        kept = (q, k, v) if cached_rows else None
        if kept:  # the cache replaced this rank's own shards; only their shapes remain
            counts = out.shape[1], kv_heads, kv_heads
            q, k, v = (x.new_empty(x.shape[0], n, 0, x.shape[3]) for x, n in zip(kept, counts, strict=True))
        plan.transport.check_device(q.device)
        head_dims = q.shape[3], v.shape[3]
        kernel = kernel_for(forward.kernel, plan.mask, device=q.device, dtype=q.dtype, head_dims=head_dims)
        groups = Groups.of(heads, q_heads=q.shape[1], kv_heads=kv_heads, keep=kept is not None, chunks=forward.chunks)
        fields = {"call number": forward.number}
        delta = row_dot(dout, out, lse.dtype)
        if dlse is not None:
            delta = delta - dlse
        dout, q, k, v = map(_dense_rows, (dout, q, k, v))
        stats = torch.stack((lse, delta), -1)
        q, scale = signless(q, forward.scale)  # the cached q has its sign already
        work = Backward(dout, q, k, v, stats, scale, kernel, plan.world == 1, groups, kept)
        program = plan.schedule.program(forward.circulate, work.direction, groups)
    # Ranks that run the backwards of several calls in different orders would add up unrelated gradients.
    plan.agreement.agree("the backward of burst_attention", fields)
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(program, plan.transport, work, plan.indices)
    grads = [*sums.pop(Side.QUERY), *sums.pop(Side.KEY)]
    if forward.scale <= 0:
        grads[0] = grads[0] * sign_of(forward.scale)
    for n, grad in enumerate(grads):  # one by one, to free each sum once it is rounded
        grads[n] = grad.to(q.dtype).contiguous()
    return grads[0], grads[1], grads[2]


@attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    scale: float | None,
    kernel: str,
    heads: int,
    cached_rows: int,
    *_: Any,
) -> tuple[Tensor, ...]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    kept = (x.new_empty(shape) for x, shape in zip((q, k, v), cached_shapes(q, k, v, heads, cached_rows), strict=True))
    return out, lse, torch.empty(5, dtype=torch.float64), *kept


@attend_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    settled: Tensor,
    handle: int,
    heads: int,
    cached_rows: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    counts = out.shape[1], kv_heads, kv_heads
    dq, dk, dv = (
        x.new_empty(out.shape[0], n, out.shape[2], x.shape[3]) for x, n in zip((q, k, v), counts, strict=True)
    )
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.handle, _, _, ctx.heads, ctx.cached_rows, *_ = inputs
    out, lse, settled, *kept = output
    ctx.kv_heads = k.shape[1]
    # A graph must not lose its plan. While a compiler traces there is no handle yet; the caller keeps the plan.
    ctx.plan = plan_of(ctx.handle) if isinstance(ctx.handle, int) else None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(settled, *kept)
    ctx.save_for_backward(*(kept if ctx.cached_rows else (q, k, v)), out, lse, settled)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    name = "the backward of burst_attention"
    # While a compiler traces there is no plan, and a failure concerns no rank.
    with nullcontext() if ctx.plan is None else ctx.plan.agreement.entering(name):
        if ctx.plan is not None:
            check_transforms(name, dout=dout, dlse=dlse)
        q, k, v, out, lse, settled = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
    how = ctx.heads, ctx.cached_rows, ctx.kv_heads
    grads = attend_backward(dout, dlse, q, k, v, out, lse, settled, ctx.handle, *how)
    return (*grads, *(None for _ in ctx.needs_input_grad[3:]))  # settings have no gradient


def _refuse(ctx: Any, *grads: Tensor) -> None:
    refuse_second("burst_attention")


attend.register_autograd(_differentiate, setup_context=_save)
attend_backward.register_autograd(_refuse)


def _dense_rows(x: Tensor) -> Tensor:
    """Make the last dim dense, as kernels need; an expanded gradient's is not."""
    return x if x.stride(-1) == 1 else x.contiguous()
