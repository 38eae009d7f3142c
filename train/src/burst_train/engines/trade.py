"""A differentiable all-to-all that exchanges tokens for heads among some ranks, and its reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burst_attention.attention.derivatives import check_batches, check_transforms, differentiable_once
from burst_attention.comm.agreement import Agreement
from burst_attention.comm.transport import Transport

from .contract import Heads


def traded_bytes(
    own: int, all_tokens: int, ranks: int, heads: Heads, batch: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Return the bytes that a rank sends in (forward, backward).

    The forward sends q, k, v one way and out back. The backward sends their gradients.

    Args:
        own: number of this rank's tokens, out of the ``all_tokens`` of these ranks.
    """
    per_head = batch * heads.head_dim * dtype.itemsize
    inputs, outputs = heads.q_heads + 2 * heads.kv_heads, heads.q_heads
    tokens_out, tokens_back = own * (ranks - 1), all_tokens - own  # rows of one head group
    forward = (inputs * tokens_out + outputs * tokens_back) // ranks
    backward = (outputs * tokens_out + inputs * tokens_back) // ranks
    return per_head * forward, per_head * backward


@dataclass(frozen=True, eq=False)
class Trade:
    """The all-to-alls of one attention call.

    Attributes:
        call: name of the public call.
        transport: connects the ranks that exchange tokens for heads.
        agreement: the agreement of all ranks that make the call.
        lengths: number of tokens of each rank of ``transport``.
        number: number of the call, the same on all ranks.
    """

    call: str
    transport: Transport
    agreement: Agreement
    lengths: Sequence[int]
    number: int

    def to_heads(self, tensors: Sequence[Tensor], phase: str) -> tuple[Tensor, ...]:
        """Exchange tensors [B, H, S_local, D] of all heads for [B, H / ranks, S, D], in one all-to-all."""
        groups = [x.chunk(self.transport.world, 1) for x in tensors]
        arriving = [
            [part[0].new_empty(*part[0].shape[:2], n, part[0].shape[3]) for n in self.lengths] for part in groups
        ]
        self._exchange(groups, arriving, phase)
        return tuple(torch.cat(parts, 2) for parts in arriving)

    def to_tokens(self, tensors: Sequence[Tensor], phase: str) -> tuple[Tensor, ...]:
        """Exchange tensors [B, H / ranks, S, D] for [B, H, S_local, D], in one all-to-all."""
        groups, rank = [x.split(list(self.lengths), 2) for x in tensors], self.transport.rank
        arriving = [[part[rank].new_empty(part[rank].shape) for _ in part] for part in groups]
        self._exchange(groups, arriving, phase)
        return tuple(torch.cat(parts, 1) for parts in arriving)

    def _exchange(self, leaving: Sequence[Sequence[Tensor]], arriving: Sequence[list[Tensor]], phase: str) -> None:
        rank = self.transport.rank
        for parts, places in zip(leaving, arriving, strict=True):
            places[rank].copy_(parts[rank])
        by_rank = (list(zip(*tensors, strict=True)) for tensors in (leaving, arriving))
        self.transport.all_to_all(*by_rank, label=f"the all-to-all of {self.call}'s {phase}")

    def agree(self, *grads: Tensor) -> None:
        """Check that all ranks run this call's backward; otherwise they would mix gradients of different calls."""
        name = f"the backward of {self.call}"
        with self.agreement.entering(name):
            check_transforms(name, **{f"gradient {n}": grad for n, grad in enumerate(grads)})
            check_batches(name, *grads)
        self.agreement.agree(name, {"call number": self.number})


def to_heads(trade: Trade, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchange tokens for heads, differentiably: tensors [B, H, S_local, D] to [B, H / ranks, S, D]."""
    return _ToHeads.apply(trade, *tensors)


def to_tokens(trade: Trade, x: Tensor) -> Tensor:
    """Exchange heads for tokens, differentiably: [B, H / ranks, S, D] to [B, H, S_local, D]."""
    return _ToTokens.apply(trade, x)


class _ToHeads(torch.autograd.Function):
    """The autograd function of :func:`to_heads`.

    Input: q, k, v [B, H, S_local, D]. Output: the same [B, H / ranks, S, D]. Nothing is saved. The backward exchanges
    heads for tokens, like the forward of ``_ToTokens``.
    """

    @staticmethod
    def forward(ctx: Any, trade: Trade, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange tokens for heads."""
        ctx.trade = trade
        return trade.to_heads(tensors, "forward")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange the gradients' heads for tokens."""
        return differentiable_once(ctx.trade.call)(_back_to_tokens)(ctx, *grads)


class _ToTokens(torch.autograd.Function):
    """The autograd function of :func:`to_tokens`.

    Input: out [B, H / ranks, S, D]. Output: the same [B, H, S_local, D]. Nothing is saved. The backward exchanges
    tokens for heads, like the forward of ``_ToHeads``.
    """

    @staticmethod
    def forward(ctx: Any, trade: Trade, out: Tensor) -> Tensor:
        """Exchange heads for tokens."""
        ctx.trade = trade
        return trade.to_tokens([out], "forward")[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange the gradient's tokens for heads."""
        return differentiable_once(ctx.trade.call)(_back_to_heads)(ctx, *grads)


def _back_to_tokens(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:
    ctx.trade.agree(*grads)
    return None, *ctx.trade.to_tokens(grads, "backward")


def _back_to_heads(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    ctx.trade.agree(grad)
    return None, ctx.trade.to_heads([grad], "backward")[0]
