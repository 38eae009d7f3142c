"""The public call."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .checks import caches_results, check_types, split_heads
from .derivatives import check_transforms
from .operator import FORMULA_VERSION, attend, gradients_wanted
from .plan import Plan


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
