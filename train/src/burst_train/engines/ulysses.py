"""DeepSpeed-Ulysses (arXiv 2309.14509): an all-to-all before and after attention over all tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from burst_attention.attention.checks import check_types
from burst_attention.attention.derivatives import check_transforms
from burst_attention.attention.new_plan import single_rank_plan
from burst_attention.attention.plan import Plan

from .contract import Heads
from .trade import Trade, to_heads, to_tokens, traded_bytes
from .whole import whole_attention


def check_ulysses(heads: Heads, world: int) -> None:
    """Raise ValueError if ``world`` ranks can't share the heads equally."""
    for name, count in (("query", heads.q_heads), ("key-value", heads.kv_heads)):
        if count % world:
            raise ValueError(
                f"--engine ulysses gives each rank whole heads, but the model has {count} {name} heads for {world} "
                "ranks; use a number of ranks that divides them, or another engine"
            )


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor:
    """Compute exact attention over shards of a contiguous layout.

    Args:
        q: this rank's queries [B, Hq, S_local, D].
        k, v: this rank's keys and values [B, Hkv, S_local, D].

    Raises:
        ValueError: the ranks don't divide the heads, the layout is not contiguous, or the ranks disagree. All ranks
            raise it.
    """
    with plan.agreement.entering("ulysses_attention"):
        scale, _ = check_types(q, k, v, scale, "auto")
        check_transforms("ulysses_attention", q=q, k=k, v=v)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4 or x.shape[2] != plan.length:
                right = f"[batch, heads, {plan.length}, head dim], with this rank's tokens in dim 2"
                raise ValueError(f"{name} has shape {list(x.shape)}; it must be {right}")
        sizes = Heads(q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3], hidden=0, intermediate=0)
        check_ulysses(sizes, plan.world)
        if plan.layout != "contiguous" and plan.world > 1:
            raise ValueError(f"ulysses_attention needs a plan with layout='contiguous', not {plan.layout!r}")
        shapes = {name: [*x.shape[:2], x.shape[3]] for name, x in (("q", q), ("k", k), ("v", v))}
        fields = {**plan.schedule.description, **shapes, "dtype": str(q.dtype), "scale": scale}
    plan.agreement.agree("ulysses_attention", fields)
    number, lengths = plan.transport.health.next_call(), plan.schedule.layout.lengths
    trade = Trade("ulysses_attention", plan.transport, plan.agreement, lengths, number)
    q, k, v = to_heads(trade, q, k, v)
    out = whole_attention(q, k, v, single_rank_plan(plan.seqlen, mask=plan.mask), scale=scale)
    return to_tokens(replace(trade, number=plan.transport.health.next_call()), out)


def ulysses_sent(plan: Plan, heads: Heads, batch: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that this rank sends in (forward, backward), as :func:`traded_bytes` does."""
    return traded_bytes(plan.length, plan.seqlen, plan.world, heads, batch, dtype)
