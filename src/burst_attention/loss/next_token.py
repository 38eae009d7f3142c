"""Exact, chunked next-token loss over shards, whose gradients sum over ranks to the one-device gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..attention.passes import check_batches, check_transforms, differentiable_once
from ..attention.plan import Plan
from .checks import check_arguments, check_plan, divisor_of, fields_of_axis
from .head import Head, LogitForm, entering
from .tokens import Measurement, measure


def next_token_loss(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor,
    plan: Plan,
    *,
    bias: torch.Tensor | None = None,
    factor: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    num_valid: float | torch.Tensor | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Return the cross entropy of a head's logits against ``labels``, over the tokens of all ranks.

    The logits are y = ``factor * (hidden @ lm_head_weight.T + bias)``. With a cap they are
    ``softcap * tanh(y / softcap)``. For a transformers model,
    :func:`burst_attention.integrations.hf.next_token_loss` finds these arguments itself.

    Args:
        hidden: [B, S_local, E], this rank's shard, after the model's last norm; fp64, fp32, bf16 or fp16.
        lm_head_weight: [V, E], same dtype and device. It may be the tied embedding. Under FSDP it must be whole, so
            call this inside the root module's forward. Under tensor parallelism: a DTensor on the axis "tp" of a
            mesh, cut by the vocabulary (``Shard(0)``), as is ``bias``; its ranks pass equal hidden states and labels.
        labels: integers [B, S_local] in [0, V) or ``ignore_index``, already shifted: the result of
            ``plan.shard_labels``, on the device of ``hidden``, or on the CPU, which spares a GPU's host a wait.
            Shifting after sharding would lose one token per shard border.
        plan: the plan that sharded the sequence.
        bias: [V], dtype and device as ``hidden``; it gets a gradient too. Default: no bias.
        factor: the number that the model multiplies its logits by, finite and not 0, the same on all ranks. A model
            that divides them by 8 has the factor 1 / 8.
        softcap: the bound that the model caps its logits at, greater than 0, the same on all ranks. Default: no cap.
        ignore_index: the label of a token without a target.
        num_valid: the divisor of the sum, the same on all ranks. Default: the number of valid tokens in the plan's
            group. To normalise over all groups and gradient accumulation steps, pass the count over all of them.
        chunk_tokens: how many tokens' logits exist at the same time. Default: about 2^22 logits, or a quarter as many
            as the labelled tokens' hidden states have elements, whichever is more. It is at most a quarter of these
            tokens. A cap needs the same memory again in the backward.

    Returns:
        A scalar, fp32 (fp64 for fp64): (sum over all ranks) / ``num_valid``, the same on every rank. Its backward
        gives this rank's share without communication. *Summed* over ranks, the gradients are the one-device gradient.
        A rank without a valid token gets gradients of zeros. If the whole group has no valid token, the value and all
        gradients are 0. Logits, their softmax and the sums are fp32 (fp64 for fp64), with or without autocast.

    Raises:
        TypeError, ValueError: an argument is bad on some rank. Every rank raises.
    """
    check_plan(plan)
    with plan.agreement.entering("next_token_loss"):
        with entering("next_token_loss", lm_head_weight):
            head = Head.of(lm_head_weight, bias, LogitForm(factor, softcap))
            divisor = divisor_of(num_valid)
            here = check_arguments(hidden, head, labels, plan, ignore_index, chunk_tokens)
            check_transforms("next_token_loss", hidden=hidden, lm_head_weight=lm_head_weight, bias=bias)
        measurement = Measurement("next_token_loss", head.form, chunk_tokens=chunk_tokens)
        head.agree("next_token_loss", fields_of_axis(hidden, head, here, ignore_index, measurement, num_valid=divisor))
        _, log_probs = measure(hidden, head, here, ignore_index, measurement)
    bias_length = None if bias is None else len(bias)
    same = {"num_valid": divisor, "factor": factor, "softcap": softcap, "the length of bias": bias_length}
    return _Mean.apply(log_probs, plan, same)


@torch.no_grad()
def next_token_nll(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor,
    plan: Plan,
    *,
    bias: torch.Tensor | None = None,
    factor: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Return the negative log-likelihood of each of this rank's labels.

    These are the numbers that :func:`next_token_loss` sums. Use it for evaluation: it has no gradient and exchanges
    nothing. ``plan.unshard(nll, 1)`` puts the result in global order.

    Args:
        hidden, lm_head_weight, labels, plan, bias, factor, softcap, ignore_index, chunk_tokens: as for
            :func:`next_token_loss`.

    Returns:
        [B, S_local] in nats, fp32 (fp64 for fp64); 0 where the label is ``ignore_index``.

    Raises:
        TypeError, ValueError: an argument is bad. The other ranks raise in their next call with this plan, if they
            compare it, and otherwise at the deadline.
    """
    check_plan(plan)
    with plan.agreement.entering("unshard", once=True):  # where ranks meet next
        with entering("next_token_nll", lm_head_weight):
            head = Head.of(lm_head_weight, bias, LogitForm(factor, softcap))
            here = check_arguments(hidden, head, labels, plan, ignore_index, chunk_tokens)
            check_transforms("next_token_nll", hidden=hidden, lm_head_weight=lm_head_weight, bias=bias)
        measurement = Measurement("next_token_nll", head.form, chunk_tokens=chunk_tokens)
        head.agree("next_token_nll", fields_of_axis(hidden, head, here, ignore_index, measurement))
        rows, log_probs = measure(hidden, head, here, ignore_index, measurement)
        nll = torch.zeros(labels.numel(), dtype=log_probs.dtype, device=log_probs.device)
        nll[rows] = -log_probs[0]
    return nll.view(labels.shape)


class _Mean(torch.autograd.Function):
    """Ledger. in l, the log-probability of each of this rank's n labels; c = 1 / num_valid.

    forward   value = -c * sum over ranks of sum(l)        backward  dl_n = -c * the gradient of the value

    Saved: only c. The ranks exchange their sums in the forward; the backward moves nothing.
    """

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, plan: Plan, same: Mapping[str, float | int | None]) -> torch.Tensor:
        """Sum over all ranks, divide and return the mean. ``same``: what all ranks must pass equally."""
        ctx.shape = log_probs.shape
        if plan.world == 1:  # nothing is read
            ctx.divisor = _divisor(same, log_probs.numel())
            total = -log_probs.sum(dtype=torch.float64)
            return (total / ctx.divisor if log_probs.numel() else total.zero_()).to(log_probs.dtype)
        with plan.agreement.entering("next_token_loss"):
            local = -log_probs.sum(dtype=torch.float64).item()
        value, ctx.divisor = _mean(plan, same, local, log_probs.numel())
        return log_probs.new_full((), value)

    @staticmethod
    @differentiable_once("next_token_loss")
    def backward(ctx: Any, saved: tuple[torch.Tensor, ...], grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of this rank's log-probabilities."""
        check_transforms("the backward of next_token_loss", grad=grad)
        check_batches("the backward of next_token_loss", grad)
        return (-grad / ctx.divisor).expand(ctx.shape), None, None  # strides of 0: a mean's need not be read


def _mean(plan: Plan, same: Mapping[str, float | None], local_sum: float, local_count: int) -> tuple[float, float]:
    """Return (value, divisor), the same floats on every rank. One exchange; sums are in rank order."""
    divisors = [math.inf if value is None else value for value in same.values()]  # each is finite, or None
    ranks = plan.exchange_small([local_sum, float(local_count), *divisors])
    total, count = (sum(rank[i] for rank in ranks) for i in (0, 1))
    for i, name in enumerate(same, 2):
        if any(rank[i] != ranks[0][i] for rank in ranks):
            text = ", ".join(f"rank {r}: {'None' if rank[i] == math.inf else rank[i]}" for r, rank in enumerate(ranks))
            remedy = "pass the same number on all of them" + (", or None" if name != "factor" else "")
            raise ValueError(f"{name} differs over the ranks ({text}); {remedy}")
    divisor = _divisor(same, count)
    return (total / divisor if count else 0.0), divisor


def _divisor(same: Mapping[str, float | None], count: float) -> float:
    """Return what a sum over ``count`` labels is divided by."""
    divisor = count if same["num_valid"] is None else same["num_valid"]
    if count and not divisor:
        raise ValueError(f"num_valid=0, but the group holds {count:.0f} valid tokens; pass their count, or None")
    return divisor
