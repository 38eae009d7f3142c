"""The attention as an operator of torch: what compilers and checkpointing see of it.

``burst_attention::attend`` gives (out, lse, settled); ``burst_attention::attend_backward`` the gradients. Their bodies
are what no compiler looks into: agreements, exchanges, tiles. A plan is no type of an operator's schema, so its handle
is passed.
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
from ..plan.assignment import TRAVELS
from ..plan.groups import Groups
from ..plan.rows import Side
from .checks import kernel_for, resolve, shared_fields, sign_of, signless
from .derivatives import check_transforms, refuse_second
from .passes import Backward, Forward, kept_shapes
from .plan import plan_of
from .sweep import sweep

QUERY, KEY, VALUE = 1, 2, 4  # bits of ``wanted``

# torch keeps compiled graphs on disk, the backward that it traced among them, under the operator's name and arguments
# alone. As one of the arguments, this keeps a graph of another formula from being run: add one to it with each change
# of this file that a graph may hold; a test goes red until it is done.
FORMULA_VERSION = 5


@dataclass(frozen=True)
class Settled:
    """What the forward settled, for its backward: the call's number, what ``None`` and ``auto`` came to, and how many
    waves shards come in.

    As an output of the operator it is a tensor, the one thing that reaches the backward of a compiled graph, too.
    """

    number: int
    scale: float
    travels: str
    kernel: str
    waves: int

    def pack(self) -> Tensor:
        """float64 [5], on CPU."""
        names = tuple(TRAVELS).index(self.travels), KERNELS.index(self.kernel)
        return torch.tensor((self.number, self.scale, *names, self.waves), dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor) -> Settled:
        """Of what :meth:`pack` gave."""
        number, scale, travels, kernel, waves = packed.tolist()
        return cls(int(number), scale, tuple(TRAVELS)[int(travels)], KERNELS[int(kernel)], int(waves))


def gradients_wanted(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Which of them want a gradient, as bits."""
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
    travels: str,
    kernel: str,
    heads: int,
    kept_rows: int,
    wanted: int,
    return_lse: bool,
    formula_version: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Ledger.

    in      q [B, Hq, S_local, D], k [B, Hkv, S_local, D], v [B, Hkv, S_local, Dv]: this rank's shards; ``handle``:
            the plan's; ``heads``, ``kept_rows``: :func:`~burst_attention.attention.checks.cut`; ``wanted``:
            :func:`gradients_wanted`; ``return_lse``: whether the caller asked for it; ``formula_version``:
            :data:`FORMULA_VERSION`
    out     O = softmax(scale Q K' + mask) V over all shards, L = logsumexp(scale Q K' + mask), :class:`Settled`, and
            with U = ``heads`` > 1 and ``kept_rows`` > 0 q [B, Hq / U, kept_rows, D], k and v of this rank's context
            slice and head group; else those are empty
    saved   q, k, v, or those of the slice in their place; O, L, and what was settled; the backward fetches again what
            else it needs
    merge   L = logaddexp(L1, L2), O = O1 e^(L1 - L) + O2 e^(L2 - L); (0, -inf) is its identity
    wire    K, V; or Q out and (O, L) home where either may travel, or heads are cut
    round   tiles and sums in fp32 (fp64 for fp64) where the kernel gives it; once, at the end
    """
    plan = plan_of(handle)
    wants = [bool(wanted & bit) for bit in (QUERY, KEY, VALUE)]
    with plan.agreement.entering("burst_attention"):
        keep = kept_rows > 0
        call = resolve(q, k, v, plan, scale=scale, travels=travels, kernel=kernel, heads=heads, keep=keep)
        fields = {**shared_fields(q, k, v, call, wants), "return_lse": return_lse}
        shapes = kept_shapes(q, k, v, heads, kept_rows)
        kept_q, kept_k, kept_v = (x.new_empty(shape) for x, shape in zip((q, k, v), shapes, strict=True))
        keeping = (kept_q, kept_k, kept_v) if keep else None
        q, k, v = map(_dense_rows, (q, k, v))
        q, scale = signless(q, call.scale)
        work = Forward(q, k, v, scale, call.kernel, call.groups, keeping)
        program = plan.schedule.program(call.travels, work.direction, call.groups)
    plan.agreement.agree("burst_attention", fields)
    plan.usage.note_call()
    # Alone there is nobody to mistake a backward of.
    number = plan.transport.health.next_call() if plan.world > 1 else 0
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(program, plan.transport, work, plan.indices)
    out, log_sum = sums[Side.QUERY]
    settled = Settled(number, call.scale, call.travels, call.kernel.name, call.groups.waves)
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
    kept_rows: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ledger.

    in      dO, dL, what the forward saved, the plan's handle, how heads were cut, and how many k and v had
    out     dQ, dK, dV of this rank's shards
    back    D = rowsum(dO * O) - dL, at home, before anything travels
            P = e^(scale Q K' - L), dV = P' dO, dS = P * (dO V' - D), dQ = scale dS K, dK = scale dS' Q per tile
    wire    (Q, dO, L, D) out and dQ home, or K, V out and dK, dV home; or one or the other, pair by pair; both where
            heads are cut, but for the Q, K, V that were kept
    round   sums in fp32 (fp64 for fp64); once to the io dtype when a partial is sent, once at the end
    """
    plan, forward = plan_of(handle), Settled.unpack(settled)
    with plan.agreement.entering("the backward of burst_attention"):
        kept = (q, k, v) if kept_rows else None
        if kept:  # of its shards a rank has no more than their shapes
            counts = out.shape[1], kv_heads, kv_heads
            q, k, v = (x.new_empty(x.shape[0], n, 0, x.shape[3]) for x, n in zip(kept, counts, strict=True))
        plan.transport.check_device(q.device)
        head_dims = q.shape[3], v.shape[3]
        kernel = kernel_for(forward.kernel, plan.mask, device=q.device, dtype=q.dtype, head_dims=head_dims)
        groups = Groups.of(heads, q_heads=q.shape[1], kv_heads=kv_heads, keep=kept is not None, waves=forward.waves)
        fields = {"call number": forward.number}
        delta = row_dot(dout, out, lse.dtype)
        if dlse is not None:
            delta = delta - dlse
        dout, q, k, v = map(_dense_rows, (dout, q, k, v))
        stats = torch.stack((lse, delta), -1)
        q, scale = signless(q, forward.scale)  # what was kept has its sign already
        work = Backward(dout, q, k, v, stats, scale, kernel, plan.world == 1, groups, kept)
        program = plan.schedule.program(forward.travels, work.direction, groups)
    # Ranks that run the backwards of several calls in different orders would add up each other's.
    plan.agreement.agree("the backward of burst_attention", fields)
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(program, plan.transport, work, plan.indices)
    grads = [*sums.pop(Side.QUERY), *sums.pop(Side.KEY)]
    if forward.scale <= 0:
        grads[0] = grads[0] * sign_of(forward.scale)
    for n, grad in enumerate(grads):  # one by one, so that a sum is free once it is rounded
        grads[n] = grad.to(q.dtype).contiguous()
    return grads[0], grads[1], grads[2]


@attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    scale: float | None,
    travels: str,
    kernel: str,
    heads: int,
    kept_rows: int,
    *_: Any,
) -> tuple[Tensor, ...]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    kept = (x.new_empty(shape) for x, shape in zip((q, k, v), kept_shapes(q, k, v, heads, kept_rows), strict=True))
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
    kept_rows: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    counts = out.shape[1], kv_heads, kv_heads
    dq, dk, dv = (
        x.new_empty(out.shape[0], n, out.shape[2], x.shape[3]) for x, n in zip((q, k, v), counts, strict=True)
    )
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.handle, _, _, _, ctx.heads, ctx.kept_rows, *_ = inputs
    out, lse, settled, *kept = output
    ctx.kv_heads = k.shape[1]
    # A graph must not lose its plan. A compiler's tracing has no number yet: there the caller keeps it.
    ctx.plan = plan_of(ctx.handle) if isinstance(ctx.handle, int) else None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(settled, *kept)
    ctx.save_for_backward(*(kept if ctx.kept_rows else (q, k, v)), out, lse, settled)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    name = "the backward of burst_attention"
    # A compiler's tracing has no plan; what fails in it runs on no rank.
    with nullcontext() if ctx.plan is None else ctx.plan.agreement.entering(name):
        if ctx.plan is not None:
            check_transforms(name, dout=dout, dlse=dlse)
        q, k, v, out, lse, settled = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
    how = ctx.heads, ctx.kept_rows, ctx.kv_heads
    grads = attend_backward(dout, dlse, q, k, v, out, lse, settled, ctx.handle, *how)
    return (*grads, *(None for _ in ctx.needs_input_grad[3:]))  # a setting has none


def _refuse(ctx: Any, *grads: Tensor) -> None:
    refuse_second("burst_attention")


attend.register_autograd(_differentiate, setup_context=_save)
attend_backward.register_autograd(_refuse)


def _dense_rows(x: Tensor) -> Tensor:
    """Kernels want a dense last dim; an expanded gradient has none."""
    return x if x.stride(-1) == 1 else x.contiguous()
