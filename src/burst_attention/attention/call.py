"""One call from entry to result: :func:`burst_attention`, its checks, and the torch operator behind it.

``burst_attention::attend`` returns (out, lse, settled, ...), ``burst_attention::attend_backward`` the gradients.
Compilers and activation checkpointing see the two and don't trace into either: both hold agreements, exchanges and
tiles. An operator's schema has no plans, so it takes a plan's handle.
"""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..comm.link import real
from ..kernels import choose
from ..kernels.contract import DTYPES, accumulation_dtype, converted, finite_lse, wire_dtype
from ..plan.groups import Groups
from ..plan.program import Program
from ..plan.rows import Direction, Side
from .hardware import shape_of
from .passes import (
    SETTLED,
    Backward,
    CallKind,
    Forward,
    Settled,
    Tensors,
    cache,
    check_transforms,
    dense_rows,
    is_dtensor,
    lost_rows,
    refuse_second,
    rounded_gradients,
    row_delta,
    signless,
    sink_gradient,
    with_lost_rows,
    with_sinks,
)
from .plan import Plan, plan_of, split_key
from .sweep import sweep


class _Options(TypedDict, total=False):
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    kernel: str


@overload
def burst_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def burst_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
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
    check_plan(plan)
    # The operator guards its own part again: a compiled graph holds the split of heads, and calls the operator later.
    with plan.agreement.entering("burst_attention", once=True):
        scale, softcap = check_types(q, k, v, scale, kernel, softcap=softcap, sinks=sinks)
        check_transforms("burst_attention", q=q, k=k, v=v, sinks=sinks)
        wanted = gradients_wanted(q, k, v, sinks)
        degree, cached_rows = split_heads(q, k, v, plan)
        cached_rows = cached_rows if wanted else 0
        # A gradient of lse changes D, and the gradient of sinks needs D at home.
        results = cached_rows > 0 and degree == plan.world and sinks is None and not return_lse
    out, lse, *_ = attend(
        q,
        k,
        v,
        sinks,
        handle=plan.handle,
        scale=scale,
        softcap=softcap,
        kernel=kernel,
        heads=degree,
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
FORMULA_VERSION = 23


def gradients_wanted(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> int:
    """Return which of them want a gradient, as bits."""
    if not torch.is_grad_enabled():
        return 0
    wanted = QUERY * q.requires_grad + KEY * k.requires_grad + VALUE * v.requires_grad
    return wanted if sinks is None else wanted + SINKS * sinks.requires_grad


def check_plan(plan: Any) -> None:
    """Raise TypeError if ``plan`` is no Plan. Only this rank raises; it can't notify others without a plan."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r} must come from make_plan(seqlen, ...)")


def check_plain(**tensors: Any) -> None:
    """Raise TypeError unless these arguments, by name, are plain tensors."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, not a tensor")
        if is_dtensor(x):
            raise TypeError(f"{name} is a DTensor; pass this rank's shard of the sequence as a plain tensor")


def check_types(
    q: Any, k: Any, v: Any, scale: Any, kernel: Any, *, softcap: Any = None, sinks: Any = None
) -> tuple[float | None, float | None]:
    """Return (scale, softcap) as floats; raise TypeError or ValueError for arguments that an operator can't take."""
    check_plain(q=q, k=k, v=v, **({} if sinks is None else {"sinks": sinks}))
    number, cap = check_scale(scale, q.dtype), check_softcap(softcap, q.dtype)
    if not isinstance(kernel, str):
        raise ValueError(f"kernel={kernel!r} must be a kernel's name, or auto")
    if sinks is not None:
        check_sinks(sinks, q)
    return number, cap


def check_softcap(softcap: Any, dtype: torch.dtype) -> float | None:
    """Return the soft cap of a call with ``dtype`` inputs as a float, or None."""
    number = None if softcap is None else real(softcap)
    bounds = torch.finfo(accumulation_dtype(dtype))
    if softcap is not None and (number is None or not bounds.tiny <= number <= bounds.max / 2):
        raise ValueError(
            f"softcap={softcap!r} must be a number from {bounds.tiny:.3g} to {bounds.max / 2:.3g}, or None for none"
        )
    return None if number is None else float(number)


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise TypeError or ValueError unless ``sinks`` holds one logit for each head of ``q``."""
    if not sinks.dtype.is_floating_point or sinks.device != q.device:
        raise TypeError(f"sinks is {sinks.dtype} on {sinks.device}; it must be floating point on {q.device}, as q is")
    if q.ndim == 4 and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks has shape {list(sinks.shape)}; it must be [{q.shape[1]}], one logit a query head")


def check_scale(scale: Any, dtype: torch.dtype) -> float | None:
    """Return the scale of a call with ``dtype`` inputs as a float, or None."""
    if scale is None:
        return None
    number = real(scale)
    if number is None or not abs(number) <= sys.float_info.max:
        raise ValueError(f"scale={scale!r} must be a finite number, or None for 1 / sqrt(head dim)")
    wide = accumulation_dtype(dtype)
    # Kernels also use scale * log2(e), which must be finite too.
    least, most = torch.finfo(wide).tiny, torch.finfo(wide).max / 2
    if number and not least <= abs(number) <= most:
        raise ValueError(
            f"scale={scale!r} is too {'small' if abs(number) < least else 'large'} for {wide}, in which scores are "
            f"computed. Use 0, or a size from {least:.3g} to {most:.3g}"
        )
    return float(number)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, length: int, keys: int | None = None) -> None:
    """Raise TypeError or ValueError unless these can be this rank's shards of ``length`` tokens."""
    of_keys = (length, "tokens", "plan.shard") if keys is None else (keys, "keys", "plan.shard_keys")
    for name, x in (("q", q), ("k", k), ("v", v)):
        rows, held, remedy = (length, "tokens", "plan.shard") if name == "q" else of_keys
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; use one of {', '.join(map(str, DTYPES))}")
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, heads, S_local, head dim]")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise TypeError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must be equal")
        if x.shape[2] != rows and x.shape[1] == rows:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, with this rank's {rows} tokens in dim 1; it must be "
                f"[batch, heads, S_local, head dim]: pass {name}.transpose(1, 2)"
            )
        if x.shape[2] != rows:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, but this rank holds {rows} {held} (dim 2); cut it with {remedy}"
            )
        if 0 in (x.shape[0], x.shape[1], x.shape[3]):
            raise ValueError(f"{name} has shape {list(x.shape)}; only the number of tokens (dim 2) may be 0")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has shape {list(x.shape)}, q {list(q.shape)}; their batch (dim 0) must be equal")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"q has head dim {q.shape[3]}, k has {k.shape[3]}; they must be equal")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads, v has {v.shape[1]}; they must be equal")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, not a multiple of the {k.shape[1]} heads of k and v")


def split_heads(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[int, int]:
    """Return a call's Ulysses degree, and how many rows of its sequence group this rank caches."""
    if plan.world == 1 or plan.schedule.strategy.ulysses_degree == 1:
        return 1, 0
    check_tensors(q, k, v, plan.length, plan.keys_apart)
    # index() makes a compiler treat these sizes as constants.
    heads = operator.index(q.shape[1]), operator.index(k.shape[1])
    dims = operator.index(q.shape[3]), operator.index(v.shape[3])
    split = plan.splits.get(split_key(*heads, *dims, q.dtype.itemsize, wire_dtype(q.dtype).itemsize))
    if split is not None:
        return operator.index(split[0]), split[1]
    return _split_heads(plan.handle_text, str(q.dtype), *heads, *dims)


def _split_heads(
    handle: str, dtype: str, q_heads: int, kv_heads: int, head_dim: int, v_head_dim: int
) -> tuple[int, int]:
    """Choose as :func:`split_heads` does, from what a compiler knows of a call; the batch does not matter."""
    plan, key = plan_of(int(handle)), (dtype, q_heads, kv_heads, head_dim, v_head_dim)
    if key not in plan.resolved:
        sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
        plan.resolved[key] = plan.split(shape_of(getattr(torch, dtype.removeprefix("torch.")), batch=1, **sizes))
    split: tuple[int, int] = plan.resolved[key]
    return split


# As torch.compiler.assume_constant_result does, whose import loads the compiler: tracing need not enter arrays.
setattr(_split_heads, "_dynamo_marked_constant", True)  # noqa: B010


def shared_fields(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, call: Settled, wanted: list[bool], sinks: Any
) -> dict[str, Any]:
    """What all ranks must pass equally. The values of ``sinks`` are a parameter's, which ranks keep equal."""
    kind = plan.kinds[call.kind]
    return {
        **plan.schedule.description,
        "batch": q.shape[0],
        "query heads": q.shape[1],
        "key-value heads": k.shape[1],
        "head dim": q.shape[3],
        "value head dim": v.shape[3],
        "dtype": str(q.dtype),
        "device": q.device.type,
        "scale": call.scale,
        "circulate": kind.circulate,
        "ulysses_degree": kind.groups.query,
        "cache_qkv": kind.groups.keep,
        "chunks": kind.groups.chunks,
        "gather_kv": kind.groups.gather,
        "kernel": kind.kernel.name,
        "softcap": kind.softcap,
        "sinks": None if sinks is None else str(sinks.dtype),
        "gradients wanted by q, k, v, sinks": wanted,
    }


def prepare_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float | None,
    kernel: str,
    heads: int,
    softcap: float | None = None,
    keeping: Tensors | None = None,
    return_lse: bool = False,
) -> tuple[Program, Forward, Settled]:
    """Check a call, and return its program, its pass and its resolved arguments, without its number."""
    if heads == 1:  # split_heads has checked the others
        check_tensors(q, k, v, plan.length, plan.keys_apart)
    plan.transport.check_device(q.device)
    sizes: dict[str, Any] = {"q_heads": q.shape[1], "kv_heads": k.shape[1]}
    cached, dims, ordered = len(keeping or ()), (q.shape[3], v.shape[3]), torch.are_deterministic_algorithms_enabled()
    # Then a backward gets D itself, which fp16 dO has no columns for.
    exact_delta = return_lse or (q.dtype == torch.float16 and plan.world > 1 and cached <= 3)
    options = softcap, heads, cached, exact_delta
    key = (kernel, *options, q.shape[0], *sizes.values(), *dims, q.dtype, q.device, ordered)
    if key not in plan.resolved:
        groups = Groups.of(heads, **sizes, keep=cached > 0, results=cached > 3)
        seen: dict[str, Any] = {"documents": plan.mask.parts, "banded": plan.mask.banded}
        seen["exact_delta"] = exact_delta
        chosen = choose(kernel, **seen, device=q.device, dtype=q.dtype, head_dims=dims, softcap=softcap)
        shape = shape_of(q.dtype, batch=q.shape[0], **sizes, head_dim=q.shape[3], v_head_dim=v.shape[3])
        plan.kinds.append(kind := CallKind(chosen, softcap, *plan.settle(shape, groups)))
        kind.programs[Direction.FORWARD] = plan.schedule.program(kind.circulate, Direction.FORWARD, kind.groups)
        plan.resolved[key] = plan.kinds.index(kind)
    call = Settled(0, plan.resolved[key], 1 / math.sqrt(q.shape[3]) if scale is None else scale, of_lse=False)
    kind = plan.kinds[call.kind]
    q, k, v = map(dense_rows, (q, k, v))
    q, positive = signless(q, call.scale)
    work = Forward(q, k, v, positive, kind.kernel, kind.groups, keeping)
    return kind.programs[Direction.FORWARD], work, call


def prepare_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: tuple[Tensor, Tensor] | None,
    plan: Plan,
    forward: Settled,
    *,
    keeping: Tensors | None = None,
    results: Tensors | None = None,
) -> tuple[Program, Backward]:
    """Return the program and the pass of a call's backward."""
    plan.transport.check_device(q.device)
    kind = plan.kinds[forward.kind]
    if Direction.BACKWARD not in kind.programs:
        kind.programs[Direction.BACKWARD] = plan.schedule.program(kind.circulate, Direction.BACKWARD, kind.groups)
    dout, q, k, v = map(dense_rows, (dout, q, k, v))
    q, scale = signless(q, forward.scale)  # the cached q has its sign already
    packed = None if stats is None else torch.stack((finite_lse(stats[0]), stats[1]), -1)
    if keeping is not None and len(keeping) > 3:
        keeping = *keeping[:4], finite_lse(keeping[4])
    if results is not None:
        results = results[0], finite_lse(results[1])
    how = kind.kernel, plan.world == 1, kind.groups, keeping, results, forward.of_lse
    return kind.programs[Direction.BACKWARD], Backward(dout, q, k, v, packed, scale, *how)


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
            ``handle``: the plan's. ``heads``: the Ulysses degree U, with ``cached_rows`` from :func:`split_heads`.
            ``wanted``: :func:`gradients_wanted`. ``formula_version``: :data:`FORMULA_VERSION`.
    out:    O = softmax(scale Q K' + mask) V over all shards, where a soft cap c makes each score s c tanh(s / c).
            L = logsumexp(scale Q K' + mask). Sinks join both: :func:`with_sinks`.
            :class:`Settled`.
            The cache: q [B, Hq / U, kept_rows, D], k and v of this rank's sequence group and head group.
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
        program, work, call = prepare_forward(q, k, v, plan, **options, keeping=keeping, return_lse=return_lse)
        fields = {**shared_fields(q, k, v, plan, call, wants, sinks), "return_lse": return_lse}
    plan.agreement.agree("burst_attention", fields, once=True)
    plan.usage.note_call()
    # A single rank can't confuse its backward with another rank's.
    number = plan.transport.health.next_call() if plan.world > 1 else 0
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(program, plan.transport, work, plan.indices, call=number)
    out, log_sum = sums[Side.QUERY]
    out, log_sum = with_sinks(*with_lost_rows(out, log_sum, lost_rows(q)), sinks)
    settled = replace(call, number=number, of_lse=return_lse)
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
    cached_rows: int,
    cached_results: bool,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients.

    in:     dO, dL; what the forward saved; the plan's handle; the number of key-value heads.
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
        dout, q, k, v, stats, plan, forward, keeping=kept, results=(out, lse) if alone else None
    )
    number = plan.transport.health.note_backward(forward.number)
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(program, plan.transport, work, plan.indices, call=number)
    dq, dk, dv = rounded_gradients(sums, forward.scale, q.dtype)
    return dq, dk, dv, lse.new_empty(0) if sinks is None or stats is None else sink_gradient(*stats, sinks)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Any, *others: Any) -> tuple[Tensor, ...]:
    *_, heads, cached_rows, cached_results, _, _, _ = others
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    kept = cache(q, k, v, heads, cached_rows, results=cached_results)
    return out, lse, torch.empty(SETTLED, dtype=torch.float64), *kept


@attend_backward.register_fake
def _(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, out: Any, lse: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    *_, cached_rows, _, kv_heads = others
    # The cache has other heads and rows than q, k and v. With a cache, keys are as many as queries.
    counts = dout.shape[1], kv_heads, kv_heads
    grads = (
        x.new_empty(dout.shape[0], n, dout.shape[2] if cached_rows else x.shape[2], x.shape[3])
        for x, n in zip((q, k, v), counts, strict=True)
    )
    return *grads, lse.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, ctx.handle, _, _, _, _, ctx.cached_rows, ctx.cached_results, *_ = inputs
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
    how = ctx.cached_rows, ctx.cached_results, ctx.kv_heads
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

    Each call saves one tensor of out's size and one of lse's; an indexer's call saves its choice. If the plan caches
    the fetched q, k and v, they are saved too. They are as large as the call's own q, k and v. Use
    ``make_plan(strategy=Strategy(cache_qkv=False))`` to avoid that.

    With transformers: ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})``.
    """
    kept = torch.ops.burst_attention
    return create_selective_checkpoint_contexts(
        [getattr(kept, x).default for x in ("attend", "choose", "choose_between", "attend_chosen")]
    )
