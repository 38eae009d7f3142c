"""DeepSpeed-Ulysses (arXiv 2309.14509): an exchange of tokens for heads, and back, around whole attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from burst_attention.attention.checks import check_types
from burst_attention.attention.derivatives import check_transforms
from burst_attention.attention.plan import Plan, lone_plan

from .contract import Heads
from .trade import Trade, to_heads, to_tokens, traded_bytes
from .whole import whole_attention


def check_ulysses(heads: Heads, world: int) -> None:
    """Raise ValueError if ``world`` ranks can't have whole heads each."""
    for name, count in (("query", heads.q_heads), ("key-value", heads.kv_heads)):
        if count % world:
            raise ValueError(
                f"--engine ulysses gives each rank whole heads, but the model has {count} {name} heads for {world} "
                "ranks; use ranks that divide them, or another engine"
            )


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor:
    """Exact attention over shards of a contiguous layout: q [B, Hq, S_local, D], k and v [B, Hkv, S_local, D].

    Raises:
        ValueError: the heads don't divide by the ranks, the layout is another, or the ranks disagree: on all of them.
    """
    with plan.agreement.entering("ulysses_attention"):
        scale = check_types(q, k, v, scale, "query", "auto")
        check_transforms("ulysses_attention", q=q, k=k, v=v)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4 or x.shape[2] != plan.length:
                right = f"[batch, heads, {plan.length}, head dim], with this rank's tokens in dim 2"
                raise ValueError(f"{name} has shape {list(x.shape)}; it must be {right}")
        sizes = Heads(q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3], hidden=0, intermediate=0)
        check_ulysses(sizes, plan.world)
        if plan.layout != "contiguous" and plan.world > 1:
            raise ValueError(f"ulysses_attention wants layout='contiguous', the plan has {plan.layout!r}")
        shapes = {name: [*x.shape[:2], x.shape[3]] for name, x in (("q", q), ("k", k), ("v", v))}
        fields = {**plan.schedule.description, **shapes, "dtype": str(q.dtype), "scale": scale}
    plan.agreement.agree("ulysses_attention", fields)
    number, lengths = plan.transport.health.next_call(), plan.schedule.layout.lengths
    trade = Trade("ulysses_attention", plan.transport, plan.agreement, lengths, number)
    q, k, v = to_heads(trade, q, k, v)
    out = whole_attention(q, k, v, lone_plan(plan.seqlen, mask=plan.mask), scale=scale)
    return to_tokens(replace(trade, number=plan.transport.health.next_call()), out)


def ulysses_sent(plan: Plan, heads: Heads, batch: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that this rank sends in a forward (q, k, v there and out back) and in a backward (their gradients)."""
    return traded_bytes(plan.length, plan.seqlen, plan.world, heads, batch, dtype)
