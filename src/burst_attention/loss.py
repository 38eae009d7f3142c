"""Next-token loss over shards: exact, chunked, and shared out so that gradients sum to the one-device gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from .planning import Plan

CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True)
class _Settings:
    plan: Plan
    ignore_index: int
    num_valid: float | None
    chunk_tokens: int | None


def next_token_loss(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor,
    plan: Plan,
    *,
    ignore_index: int = -100,
    num_valid: float | torch.Tensor | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """The cross entropy of ``hidden @ lm_head_weight.T`` against ``labels``, over the tokens of all ranks of ``plan``.

    Args:
        hidden: [B, S_local, E], this rank's shard, after the model's last norm; fp64, fp32, bf16 or fp16.
        lm_head_weight: [V, E], same dtype and device. It may be the tied embedding. Under FSDP it must be whole, so
            call this inside the root module's forward. What a model does to its logits after the product (a bias, a
            cap, a factor) is not part of this loss.
        labels: integers [B, S_local] in [0, V) or ``ignore_index``: already shifted, as ``plan.shard_labels`` gives
            them. ``labels`` shifted after sharding would lose a token at every border.
        ignore_index: the label of a token without a target.
        num_valid: what the sum is divided by, the same on all ranks. Default: the valid tokens of the plan's group.
            Pass the count over all groups and accumulation steps to normalise by those.
        chunk_tokens: how many tokens' logits exist at once. Default: about 2^22 logits, or as many as ``hidden`` has
            elements if that is more, and never more than a quarter of the shard's.

    Returns:
        A scalar, fp32 (fp64 for fp64): (sum over all ranks) / ``num_valid``, the same on every rank. Its backward
        gives this rank's share without communication: *summed* over ranks the gradients are the one-device gradient.
        A rank without a valid token gets gradients of zeros. Without a valid token in the whole group the value and
        all gradients are 0. Logits, their softmax and the sums are fp32 (fp64 for fp64), autocast or not.

    Raises:
        TypeError, ValueError: a bad argument, on every rank if it is bad on one.
    """
    _check_plan(plan)
    try:
        divisor = _divisor(num_valid)
        _check(hidden, lm_head_weight, labels, plan, ignore_index, chunk_tokens)
    except (TypeError, ValueError) as error:
        plan.refuse(error)
    settings = _Settings(plan=plan, ignore_index=ignore_index, num_valid=divisor, chunk_tokens=chunk_tokens)
    return _NextTokenLoss.apply(hidden, lm_head_weight, labels, settings)


@torch.no_grad()
def next_token_nll(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor,
    plan: Plan,
    *,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """The negative log-likelihood of each of this rank's labels: the very numbers that :func:`next_token_loss` sums.

    For evaluation: it has no gradient and exchanges nothing. ``plan.unshard(nll, 1)`` puts it in global order.

    Args:
        hidden, lm_head_weight, labels, ignore_index, chunk_tokens: as for :func:`next_token_loss`.

    Returns:
        [B, S_local] in nats, fp32 (fp64 for fp64); 0 where the label is ``ignore_index``.

    Raises:
        TypeError, ValueError: a bad argument; on the other ranks in their next call with this plan.
    """
    _check_plan(plan)
    try:
        _check(hidden, lm_head_weight, labels, plan, ignore_index, chunk_tokens)
    except (TypeError, ValueError) as error:
        plan.refuse(error)
    rows, _, lse, picked, _ = _likelihoods(hidden, lm_head_weight, labels, ignore_index, chunk_tokens)
    nll = torch.zeros(labels.numel(), dtype=lse.dtype, device=lse.device)
    nll[rows] = lse - picked
    return nll.view(labels.shape)


def _likelihoods(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignore_index: int, chunk_tokens: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """(rows, target, lse, picked, chunk): of the n valid tokens, where they are, their labels, the log-sum-exp of their
    logits and the logit of their label, each [n], computed ``chunk`` tokens at a time."""
    compute = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    flat, label = hidden.flatten(0, 1), labels.flatten()
    rows = (label != ignore_index).nonzero().squeeze(1)
    target = label[rows].long()
    lse = torch.empty(rows.shape, dtype=compute, device=hidden.device)
    picked = torch.empty_like(lse)
    chunk = chunk_tokens or _chunk_tokens(len(rows), *weight.shape)
    with torch.autocast(hidden.device.type, enabled=False):
        w = _operand(weight, compute)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            logits = _product(_operand(flat[rows[part]], compute), w.T, compute)
            lse[part] = torch.logsumexp(logits, 1)
            picked[part] = logits.gather(1, target[part, None]).squeeze(1)
    return rows, target, lse, picked, chunk


class _NextTokenLoss(torch.autograd.Function):
    """Ledger, for the n valid tokens of this rank (N = B * S_local tokens in all), chunk by chunk of them:

    h_nE = hidden[rows], W_VE, t_n = labels[rows]; c = 1 / num_valid
      forward   z_nV = h W^T      lse_n = logsumexp(z)     value = c * sum over ranks of sum(lse - z[t])
      backward  dz_nV = e^(z - lse) - onehot(t)            g = the gradient of the value
                dh_nE = g c dz W  (0 in the other rows)    dW_VE = g c dz^T h

    Saved: hidden and W (as given), rows, t and lse (n numbers each). z is computed again in the backward: it is the
    one tensor that would not fit. dW is summed over chunks in fp32 and rounded once. c is applied after the products,
    or it would flush dz to zero in fp16.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, settings: _Settings
    ) -> torch.Tensor:
        rows, target, lse, picked, ctx.chunk = _likelihoods(
            hidden, weight, labels, settings.ignore_index, settings.chunk_tokens
        )
        local = (lse - picked).sum(dtype=torch.float64).item()
        value, ctx.divisor = _mean(settings, local, len(rows))
        ctx.save_for_backward(hidden, weight, rows, target, lse)
        return torch.tensor(value, dtype=lse.dtype, device=hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, rows, target, lse = ctx.saved_tensors
        compute, flat = lse.dtype, hidden.flatten(0, 1)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dhidden = torch.zeros(flat.shape, dtype=flat.dtype, device=flat.device) if wants_hidden else None
        dweight = torch.zeros(weight.shape, dtype=compute, device=weight.device) if wants_weight else None
        factor = grad / ctx.divisor if ctx.divisor else torch.zeros_like(grad)
        with torch.autocast(hidden.device.type, enabled=False):
            w = _operand(weight, compute)
            for start in range(0, len(rows), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                h = _operand(flat[rows[part]], compute)
                dlogits = _product(h, w.T, compute).sub_(lse[part, None]).exp_()
                dlogits[torch.arange(len(h), device=h.device), target[part]] -= 1
                dlogits = dlogits.to(w.dtype)
                if dhidden is not None:
                    dhidden[rows[part]] = (_product(dlogits, w, compute) * factor).to(dhidden.dtype)
                if dweight is not None:
                    dweight += _product(dlogits.T, h, compute)
        if dhidden is not None:
            dhidden = dhidden.view(hidden.shape)
        if dweight is not None:
            # A rank without a valid token contributes exactly 0, also where the factor is not finite.
            dweight = (dweight.mul_(factor) if len(rows) else dweight).to(weight.dtype)
        return dhidden, dweight, None, None


def _mean(settings: _Settings, local_sum: float, local_count: int) -> tuple[float, float]:
    """(value, divisor), the same floats on every rank: one exchange, summed in rank order."""
    given = -1.0 if settings.num_valid is None else settings.num_valid
    ranks = settings.plan.exchange_small([local_sum, float(local_count), given])
    total, count = (sum(rank[i] for rank in ranks) for i in (0, 1))
    if any(rank[2] != ranks[0][2] for rank in ranks):
        told = ", ".join(f"rank {r}: {'None' if rank[2] < 0 else rank[2]}" for r, rank in enumerate(ranks))
        raise ValueError(f"num_valid differs over the ranks ({told}); pass the same number on all of them, or None")
    divisor = count if settings.num_valid is None else settings.num_valid
    if count and not divisor:
        raise ValueError(f"num_valid=0, but the group holds {count:.0f} valid tokens; pass their count, or None")
    return (total / divisor if count else 0.0), divisor


def _operand(x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """x as the products take it: as it is on CUDA (see ``_product``), else in the compute dtype."""
    return x if x.is_cuda else x.to(compute)


def _product(a: torch.Tensor, b: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """a @ b in the compute dtype. Products of two halves are exact in fp32, and CUDA sums and returns them in it."""
    return a @ b if a.dtype == compute else torch.mm(a, b, out_dtype=compute)


def _chunk_tokens(tokens: int, vocabulary: int, width: int) -> int:
    elements = max(CHUNK_ELEMENTS, tokens * width)
    return max(1, min(elements // max(vocabulary, 1), math.ceil(tokens / 4)))


def _divisor(num_valid: Any) -> float | None:
    if num_valid is None:
        return None
    if isinstance(num_valid, torch.Tensor) and num_valid.numel() == 1:
        num_valid = num_valid.item()
    if isinstance(num_valid, bool) or not isinstance(num_valid, (int, float)):
        raise TypeError(f"num_valid={num_valid!r} must be a number, a tensor of one number, or None")
    if not math.isfinite(num_valid) or num_valid < 0:
        raise ValueError(f"num_valid={num_valid} must be a count of tokens: finite and not negative")
    return float(num_valid)


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan={plan!r} must come from make_plan(seqlen, ...); of a mapping by window pass any one plan"
        )


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    plan: Plan,
    ignore_index: int,
    chunk_tokens: int | None,
) -> None:
    _check_tensors(hidden, weight, labels)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index={ignore_index!r} must be an integer")
    if chunk_tokens is not None and (type(chunk_tokens) is not int or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens={chunk_tokens!r} must be a positive integer, or None")
    if hidden.dim() != 3:
        raise ValueError(f"hidden has shape {list(hidden.shape)}; pass [batch, local tokens, width]")
    if hidden.shape[1] != plan.length:
        raise ValueError(
            f"hidden has {hidden.shape[1]} tokens, the plan gives this rank {plan.length} of {plan.seqlen}; "
            "pass the shard that plan.shard gave"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[2]:
        raise ValueError(f"lm_head_weight has shape {list(weight.shape)}; pass [vocabulary, {hidden.shape[2]}]")
    if labels.shape != hidden.shape[:2]:
        raise ValueError(
            f"labels has shape {list(labels.shape)}, not hidden's {list(hidden.shape[:2])}; pass plan.shard_labels"
        )
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= weight.shape[0]))
    if wrong.any():
        raise ValueError(
            f"labels holds {labels[wrong][0].item()}, neither in [0, {weight.shape[0]}) nor ignore_index={ignore_index}"
        )
    if plan.world > 1:
        plan.usage.check(labels)


def _check_tensors(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    for name, tensor in (("hidden", hidden), ("lm_head_weight", weight), ("labels", labels)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; pass a tensor")
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name} is a DTensor, a part of the whole; under FSDP call next_token_loss inside the root module's "
                "forward, where parameters are whole, and elsewhere pass full_tensor()"
            )
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}; put them on one device")
    if hidden.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"hidden has dtype {hidden.dtype}; pass fp64, fp32, bf16 or fp16")
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"lm_head_weight has dtype {weight.dtype}, hidden {hidden.dtype}; cast one of them, so that the precision "
            "of the logits is your choice"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels has dtype {labels.dtype}; pass int64 or int32, as plan.shard_labels gives them")
