"""DeepSpeed-Ulysses (arXiv 2309.14509): a differentiable reshard, tokens to heads and back, around whole attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from burst_attention.attention.derivatives import check_batches, check_transforms, differentiable_once
from burst_attention.attention.plan import Plan, lone_plan

from .contract import Heads
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
    trade = _Trade(plan, plan.transport.health.next_call())
    q, k, v = _ToHeads.apply(trade, q, k, v)
    out = whole_attention(q, k, v, lone_plan(plan.seqlen, mask=plan.mask), scale=scale)
    return _ToTokens.apply(replace(trade, number=plan.transport.health.next_call()), out)


def ulysses_sent(plan: Plan, heads: Heads, batch: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that this rank sends in a forward (q, k, v there and out back) and in a backward (their gradients)."""
    own, others = plan.length, plan.seqlen - plan.length
    per_head = batch * heads.head_dim * dtype.itemsize
    away = plan.world - 1
    inputs, outputs = heads.q_heads + 2 * heads.kv_heads, heads.q_heads
    tokens_out, tokens_back = own * away, others  # rows of one head group
    forward = (inputs * tokens_out + outputs * tokens_back) // plan.world
    backward = (outputs * tokens_out + inputs * tokens_back) // plan.world
    return per_head * forward, per_head * backward


@dataclass(frozen=True, eq=False)
class _Trade:
    plan: Plan
    number: int

    def to_heads(self, tensors: Sequence[Tensor], phase: str) -> tuple[Tensor, ...]:
        """[B, H, S_local, D] each, all heads, to [B, H / W, S, D]: one exchange for all of them."""
        plan = self.plan
        groups = [x.chunk(plan.world, 1) for x in tensors]
        lengths = plan.schedule.layout.lengths
        arriving = [[part[0].new_empty(*part[0].shape[:2], n, part[0].shape[3]) for n in lengths] for part in groups]
        self._exchange(groups, arriving, phase)
        return tuple(torch.cat(parts, 2) for parts in arriving)

    def to_tokens(self, tensors: Sequence[Tensor], phase: str) -> tuple[Tensor, ...]:
        """[B, H / W, S, D] each to [B, H, S_local, D]."""
        plan = self.plan
        groups = [x.split(list(plan.schedule.layout.lengths), 2) for x in tensors]
        arriving = [[part[plan.rank].new_empty(part[plan.rank].shape) for _ in part] for part in groups]
        self._exchange(groups, arriving, phase)
        return tuple(torch.cat(parts, 1) for parts in arriving)

    def _exchange(self, leaving: Sequence[Sequence[Tensor]], arriving: Sequence[list[Tensor]], phase: str) -> None:
        rank = self.plan.rank
        for parts, places in zip(leaving, arriving, strict=True):
            places[rank].copy_(parts[rank])
        by_rank = (list(zip(*tensors, strict=True)) for tensors in (leaving, arriving))
        self.plan.transport.all_to_all(*by_rank, label=f"the all-to-all of ulysses' {phase}")

    def agree(self, *grads: Tensor) -> None:
        """Backwards in different orders on different ranks would trade one call's gradients for another's."""
        name = "the backward of ulysses_attention"
        with self.plan.agreement.entering(name):
            check_transforms(name, **{f"gradient {n}": grad for n, grad in enumerate(grads)})
            check_batches(name, *grads)
        self.plan.agreement.agree(name, {"call number": self.number})


class _ToHeads(torch.autograd.Function):
    """Ledger. in q, k, v [B, H, S_local, D]; out the same [B, H / W, S, D]; saved nothing; back as _ToTokens."""

    @staticmethod
    def forward(ctx: Any, trade: _Trade, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.trade = trade
        return trade.to_heads(tensors, "forward")

    @staticmethod
    @differentiable_once("ulysses_attention")
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trade.agree(*grads)
        return None, *ctx.trade.to_tokens(grads, "backward")


class _ToTokens(torch.autograd.Function):
    """Ledger. in out [B, H / W, S, D]; out the same [B, H, S_local, D]; saved nothing; back as _ToHeads."""

    @staticmethod
    def forward(ctx: Any, trade: _Trade, out: Tensor) -> Tensor:
        ctx.trade = trade
        return trade.to_tokens([out], "forward")[0]

    @staticmethod
    @differentiable_once("ulysses_attention")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[None, Tensor]:
        ctx.trade.agree(grad)
        return None, ctx.trade.to_heads([grad], "backward")[0]
