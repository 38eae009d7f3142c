"""The public call, and the torch operator behind it: what compilers and activation checkpointing see.

``burst_attention::attend`` returns (out, lse, settled, ...), ``burst_attention::attend_backward`` the gradients.
Compilers don't trace into either: both hold agreements, exchanges and tiles. An operator's schema has no plans, so it
takes a plan's handle.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..kernels.precision import accumulation_dtype, converted
from ..plan.rows import Side
from .derivatives import check_transforms, refuse_second
from .passes import cache
from .plan import Plan, plan_of
from .prepare import (
    SETTLED,
    Settled,
    caches_results,
    check_types,
    lost_rows,
    prepare_backward,
    prepare_forward,
    rounded_gradients,
    row_delta,
    shared_fields,
    sink_gradient,
    split_heads,
    with_lost_rows,
    with_sinks,
)
from .sweep import sweep


@overload
def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    return_lse: Literal[True],
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
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
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor: ...
def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention over a sequence that is sharded over ``plan``'s ranks. Every rank must call it.

    Args:
        q: [B, Hq, S_local, D], this rank's queries: float64, float32, bfloat16 or float16.
        k: [B, Hkv, Sk_local, D]; Hq must be a multiple of Hkv. Sk_local is S_local, unless the plan has ``keys``.
        v: [B, Hkv, Sk_local, Dv].
        plan: from :func:`burst_attention.make_plan`. It holds the positions, the mask and the strategy.
        scale: factor of the scores; None: 1 / sqrt(D). Any finite number (numpy scalars and 0-d tensors too), including
            zero and negatives. Its size must be a normal number in the dtype of scores: fp32, or fp64 for fp64 inputs.
        softcap: c > 0: each score s becomes c tanh(s / c) (Gemma 2, arXiv 2408.00118); None for plain scores.
        sinks: [Hq], one learned logit a query head, which takes part in the softmax without a value (gpt-oss). Equal
            on all ranks. Its gradient is this rank's part: sum it over the ranks, as for other parameters.
        kernel: ``auto``, or a name of :data:`burst_attention.kernels.KERNELS`.
            :func:`burst_attention.kernels.explain` says which kernel ``auto`` takes, and why.
        return_lse: also return the log-sum-exp of each row of scores.

    Returns:
        out [B, Hq, S_local, Dv] in q's dtype. With ``return_lse`` also lse [B, Hq, S_local] in fp32 (fp64 for fp64).
        Both are differentiable, once. A query that sees no key gets out 0, lse -inf and gradient 0. With sinks, lse
        includes the sink.

    Raises:
        TypeError, ValueError: an argument can't be used, here or on another rank, or ranks disagree. Every rank raises
            the same class, before anything moves.
        PeerError: another rank failed before the call; nothing moved.
        ExchangeError: a peer exited, or is stuck.

    A call without a valid plan raises on this rank only; the other ranks can't be notified.

    Source: BurstAttention (arXiv 2403.09347), equations 2 to 4 and algorithm 2.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r} must come from make_plan(seqlen, ...)")
    # The operator guards its own part again: a compiled graph holds the split of heads, and calls the operator later.
    with plan.agreement.entering("burst_attention", once=True):
        number, cap = check_types(q, k, v, scale, kernel, softcap=softcap, sinks=sinks)
        check_transforms("burst_attention", q=q, k=k, v=v, sinks=sinks)
        wanted = gradients_wanted(q, k, v, sinks)
        heads, cached_rows = split_heads(q, k, v, plan)
        cached_rows = cached_rows if wanted else 0
        results = caches_results(heads, cached_rows, plan.world, sinks=sinks, return_lse=bool(return_lse))
    out, lse, *_ = attend(
        q,
        k,
        v,
        sinks,
        handle=plan.handle,
        scale=number,
        softcap=cap,
        kernel=kernel,
        heads=heads,
        cached_rows=cached_rows,
        cached_results=results,
        wanted=wanted,
        return_lse=bool(return_lse),
        formula_version=FORMULA_VERSION,
    )
    return (out, lse) if return_lse else out


QUERY, KEY, VALUE, SINKS = 1, 2, 4, 8  # bits of ``wanted``

# torch caches compiled graphs on disk, with the traced backward, by the operator's name and arguments only. This
# argument stops it from running a graph of an older formula. Add one with each change of this file that a graph may
# hold; a test fails until you do.
FORMULA_VERSION = 18


def gradients_wanted(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> int:
    """Return which of them want a gradient, as bits."""
    if not torch.is_grad_enabled():
        return 0
    wanted = QUERY * q.requires_grad + KEY * k.requires_grad + VALUE * v.requires_grad
    return wanted if sinks is None else wanted + SINKS * sinks.requires_grad


@torch.library.custom_op("burst_attention::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: int,
    scale: float | None,
    softcap: float | None,
    kernel: str,
    heads: int,
    cached_rows: int,
    cached_results: bool,
    wanted: int,
    return_lse: bool,
    formula_version: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the forward.

    in:     q [B, Hq, S_local, D], k [B, Hkv, Sk_local, D], v [B, Hkv, Sk_local, Dv]: this rank's shards. sinks [Hq].
            ``handle``: the plan's. ``heads``, ``cached_rows``: :func:`~burst_attention.attention.prepare.split_heads`.
            ``wanted``: :func:`gradients_wanted`. ``formula_version``: :data:`FORMULA_VERSION`.
    out:    O = softmax(scale Q K' + mask) V over all shards, where a soft cap c makes each score s c tanh(s / c).
            L = logsumexp(scale Q K' + mask). Sinks join both: :func:`with_sinks`.
            :class:`Settled`.
            The cache: q [B, Hq / U, kept_rows, D], k and v of this rank's sequence group and head group, U = ``heads``.
            With ``cached_results`` also O and L of the head group; U is then the number of ranks.
            The cache is empty if U is 1 or ``cached_rows`` is 0.
    saved:  q, k, v or the cache; O and L of the shard or of the cache; :class:`Settled`. The rest is fetched again.
    merge:  L = logaddexp(L1, L2), O = O1 e^(L1 - L) + O2 e^(L2 - L). Its identity is (0, -inf).
    wire:   K and V. With ``nearest``, ``blocks`` or U > 1 also Q out, and (O, L) home.
    round:  tiles and sums in fp32 (fp64 for fp64) if the kernel supports it; results once, at the end.
    """
    plan = plan_of(handle)
    wants = [bool(wanted & bit) for bit in (QUERY, KEY, VALUE, SINKS)]
    with plan.agreement.entering("burst_attention", once=True):
        kept = cache(q, k, v, heads, cached_rows, results=cached_results)
        keeping = kept[: 5 if cached_results else 3] if cached_rows > 0 else None
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "kernel": kernel, "heads": heads}
        program, work, call = prepare_forward(q, k, v, plan, **options, keeping=keeping)
        fields = {**shared_fields(q, k, v, call, wants, sinks), "return_lse": return_lse}
    plan.agreement.agree("burst_attention", fields, once=True)
    plan.usage.note_call()
    # A single rank can't confuse its backward with another rank's.
    number = plan.transport.health.next_call() if plan.world > 1 else 0
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(program, plan.transport, work, plan.indices, call=number)
    out, log_sum = sums[Side.QUERY]
    out, log_sum = with_sinks(*with_lost_rows(out, log_sum, lost_rows(q)), sinks)
    settled = Settled.of(number, call, of_lse=return_lse)
    kept_q, kept_k, kept_v, kept_out, kept_lse = kept
    rounded = converted(out, q.dtype).contiguous()
    return rounded, log_sum.contiguous(), settled.pack(), kept_q, kept_k, kept_v, kept_out, kept_lse


@torch.library.custom_op("burst_attention::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    settled: Tensor,
    handle: int,
    heads: int,
    cached_rows: int,
    cached_results: bool,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients.

    in:     dO, dL; what the forward saved; the plan's handle; U and the number of key-value heads.
    out:    dQ, dK, dV of this rank's shards; this rank's part of the sinks' gradient, empty without sinks.
    back:   D = rowsum(dO * O) - dL, at home, before anything circulates; in the kernel with ``cached_results`` and on a
            single rank.
            Per tile: P = e^(scale Q K' - L), dV = P' dO, dS = P * (dO V' - D), dQ = scale dS K, dK = scale dS' Q.
            With a soft cap, dS also has the cap's slope, 1 - tanh(s / c)^2.
    wire:   ``query``: (Q, dO, L, D) out and dQ home. ``key-value``: K, V out and dK, dV home.
            ``nearest``: one or the other, by pair. U > 1: both, except for cached Q, K, V.
    round:  sums in fp32 (fp64 for fp64); to the io dtype once when a partial is sent, and once at the end.
    """
    plan, forward = plan_of(handle), Settled.unpack(settled)
    if cached_results and dlse is not None:
        raise ValueError(
            "dlse is given, but with cached_results the backward leaves it out of D; run the forward with "
            "return_lse=True, which caches no results"
        )
    kept = (q, k, v, *([out, lse] if cached_results else [])) if cached_rows else None
    if kept:  # the cache replaced this rank's own shards; only their shapes remain
        counts = dout.shape[1], kv_heads, kv_heads
        q, k, v = (x.new_empty(x.shape[0], n, 0, x.shape[3]) for x, n in zip((q, k, v), counts, strict=True))
    alone = plan.world == 1 and not forward.of_lse and sinks is None  # then the kernel computes D
    stats = None if cached_results or alone else (lse, row_delta(dout, out, dlse, lse.dtype))
    program, work = prepare_backward(
        *(dout, q, k, v, stats, plan, forward),
        heads=heads,
        kv_heads=kv_heads,
        keeping=kept,
        results=(out, lse) if alone else None,
    )
    number = plan.transport.health.note_backward(forward.number)
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(program, plan.transport, work, plan.indices, call=number)
    dq, dk, dv = rounded_gradients(sums, forward.scale, q.dtype)
    return dq, dk, dv, lse.new_empty(0) if sinks is None or stats is None else sink_gradient(*stats, sinks)


@attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: int,
    scale: float | None,
    softcap: float | None,
    kernel: str,
    heads: int,
    cached_rows: int,
    cached_results: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    kept = cache(q, k, v, heads, cached_rows, results=cached_results)
    return out, lse, torch.empty(SETTLED, dtype=torch.float64), *kept


@attend_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    settled: Tensor,
    handle: int,
    heads: int,
    cached_rows: int,
    cached_results: bool,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # The cache has other heads and rows than q, k and v. With a cache, keys are as many as queries.
    counts = dout.shape[1], kv_heads, kv_heads
    dq, dk, dv = (
        x.new_empty(dout.shape[0], n, dout.shape[2] if cached_rows else x.shape[2], x.shape[3])
        for x, n in zip((q, k, v), counts, strict=True)
    )
    return dq, dk, dv, lse.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, ctx.handle, _, _, _, ctx.heads, ctx.cached_rows, ctx.cached_results, *_ = inputs
    out, lse, settled, *kept = output
    ctx.kv_heads, ctx.output_shape = k.shape[1], out.shape
    # A graph must not lose its plan. While a compiler traces there is no handle yet; the caller keeps the plan.
    ctx.plan = plan_of(ctx.handle) if isinstance(ctx.handle, int) else None
    ctx.set_materialize_grads(False)
    # The cached lse stays differentiable: without any such tensor, second derivatives would be dropped, not refused.
    ctx.mark_non_differentiable(settled, *kept[: 4 if ctx.cached_results else 5])
    results = kept[3:] if ctx.cached_results else (out, lse)
    ctx.save_for_backward(*(kept[:3] if ctx.cached_rows else (q, k, v)), sinks, *results, settled)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if ctx.plan is not None:  # there is none while a compiler traces
        check_transforms("the backward of burst_attention", dout=dout, dlse=dlse)
    q, k, v, sinks, out, lse, settled = ctx.saved_tensors
    dout = out.new_zeros(ctx.output_shape) if dout is None else dout
    how = ctx.heads, ctx.cached_rows, ctx.cached_results, ctx.kv_heads
    *grads, of_sinks = attend_backward(dout, dlse, q, k, v, sinks, out, lse, settled, ctx.handle, *how)
    # Settings have no gradient.
    return (*grads, None if sinks is None else of_sinks, *(None for _ in ctx.needs_input_grad[4:]))


def _refuse(ctx: Any, *grads: Tensor) -> None:
    refuse_second("burst_attention")


attend.register_autograd(_differentiate, setup_context=_save)
attend_backward.register_autograd(_refuse)


def keep_attention() -> tuple[Any, Any]:
    """Save (out, lse) in activation checkpointing.

    Pass this function as ``context_fn`` to ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``. The
    backward recomputes the rest of the layer. It does not recompute the attention, which sends nothing again.

    Each call saves one tensor of out's size and one of lse's. If the plan caches the fetched q, k and v, they are saved
    too. They are as large as the call's own q, k and v. Use ``make_plan(strategy=Strategy(cache_qkv=False))`` to avoid
    that.

    With transformers: ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})``.
    """
    return create_selective_checkpoint_contexts([torch.ops.burst_attention.attend.default])
