"""The public call."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .checks import check_types, cut
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
        scale: of the scores; 1 / sqrt(D) if None. Any finite number (numpy's and 0-d tensors too), also zero or
            negative; other sizes must be normal numbers of fp32 (fp64 for fp64 inputs), in which scores are computed.
        travels: which tensors are sent from rank to rank. ``query``: keys and values in the forward; in the backward
            queries and what belongs to them, and dQ comes home (arXiv 2403.09347, algorithm 2). ``key-value``: keys
            and values in both; in the backward dK and dV come home (RingAttention). ``either``: of each pair of shards
            the one whose way to the other is less than half a ring, in both; partial results of the forward come home
            over the wire, too. A contiguous layout under a causal mask is balanced then, within 1 / world, with a
            quarter fewer bytes than zigzag (without grouped queries). ``blocks``: both sides of square blocks of pairs,
            in both; the fewest bytes for many ranks, more memory. Where heads are cut it is context slices in place of
            shards that travel. ``auto``: ``either`` if that leaves the busiest
            rank less to compute, else that of the other two whose backward sends fewer bytes.
        kernel: ``auto``, or a name of :data:`burst_attention.kernels.KERNELS`;
            :func:`burst_attention.kernels.explain` tells what ``auto`` takes, and why.
        return_lse: also return the log-sum-exp of each row's scores.

    Returns:
        out [B, Hq, S_local, Dv] in q's dtype; with ``return_lse`` also lse [B, Hq, S_local] in fp32 (fp64 for fp64).
        Both are differentiable, once. A query that sees nothing gives out 0, lse -inf and gradient 0.

    Raises:
        TypeError, ValueError: an argument can't be used, here or on another rank, or the ranks disagree: the same
            class on every rank, before anything moves.
        PeerError: another rank failed on its way into the call, with an error of its own; nothing was moved.
        ExchangeError: a peer is gone or stuck.

    A call without a plan, or with a plan that is gone, can be told to nobody: it raises on this rank alone.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r} must come from make_plan(seqlen, ...)")
    with plan.agreement.entering("burst_attention"):
        number = check_types(q, k, v, scale, travels, kernel)
        check_transforms("burst_attention", q=q, k=k, v=v)
        wanted = gradients_wanted(q, k, v)
        heads, kept_rows = cut(q, k, v, plan, travels)
    out, lse, *_ = attend(
        q,
        k,
        v,
        handle=plan.handle,
        scale=number,
        travels=travels,
        kernel=kernel,
        heads=heads,
        kept_rows=kept_rows if wanted else 0,
        wanted=wanted,
        return_lse=bool(return_lse),
        formula_version=FORMULA_VERSION,
    )
    return (out, lse) if return_lse else out
