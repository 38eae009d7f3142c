"""Next-token loss over shards: exact, chunked, and shared out so that gradients sum to the one-device gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..attention.derivatives import check_batches, check_transforms, differentiable_once
from ..attention.plan import Plan
from .checks import check_arguments, check_logits, check_plan, divisor_of

CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True)
class LogitForm:
    """What a model makes of its head's product: ``factor * product``, with a cap softcap * tanh(that / softcap).

    Attributes:
        factor: 1.0 for none.
        softcap: what no logit passes; None for no cap.
    """

    factor: float = 1.0
    softcap: float | None = None

    def apply_(self, product: torch.Tensor) -> torch.Tensor:
        """Logits of the product, in its place."""
        if self.factor != 1.0:
            product.mul_(self.factor)
        return product if self.softcap is None else product.div_(self.softcap).tanh_().mul_(self.softcap)


@dataclass(frozen=True, eq=False)
class Head:
    """How a model makes logits [..., V] of hidden states [..., E]: ``form`` of ``hidden @ weight.T + bias``.

    Attributes:
        weight: [V, E].
        bias: [V]; None for none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    form: LogitForm = LogitForm()

    @property
    def options(self) -> dict[str, Any]:
        """All but the weight, as keywords of :func:`next_token_loss` and :func:`next_token_nll`."""
        return {"bias": self.bias, "factor": self.form.factor, "softcap": self.form.softcap}

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] of hidden [..., E] in its dtype, all at once and without a gradient: for a few tokens."""
        return self.form.apply_(F.linear(hidden, self.weight, self.bias))

    def chunk(self, hidden: torch.Tensor, weight: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """[n, V] in the compute dtype, of hidden [n, E] and the weight as ``_product`` takes them."""
        product = _product(hidden, weight.T, compute)
        return self.form.apply_(product if self.bias is None else product.add_(self.bias))


@dataclass(frozen=True)
class _Settings:
    plan: Plan
    form: LogitForm
    bias_length: int | None
    ignore_index: int
    num_valid: float | None
    chunk_tokens: int | None


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
    """The cross entropy of a head's logits against ``labels``, over the tokens of all ranks of ``plan``.

    The logits are ``factor * (hidden @ lm_head_weight.T + bias)`` and, with a cap, ``softcap * tanh(that / softcap)``.
    :func:`burst_attention.integrations.hf.next_token_loss` finds all of it in a transformers model.

    Args:
        hidden: [B, S_local, E], this rank's shard, after the model's last norm; fp64, fp32, bf16 or fp16.
        lm_head_weight: [V, E], same dtype and device. It may be the tied embedding. Under FSDP it must be whole, so
            call this inside the root module's forward.
        labels: integers [B, S_local] in [0, V) or ``ignore_index``: already shifted, as ``plan.shard_labels`` gives
            them. ``labels`` shifted after sharding would lose a token at every border.
        bias: [V], dtype and device as ``hidden``; it gets its gradient too. Default: none.
        factor: what the model multiplies its logits by, finite and not 0, the same on all ranks. A model that divides
            them by 8 has the factor 1 / 8.
        softcap: what the model caps its logits at, greater than 0, the same on all ranks. Default: no cap.
        ignore_index: the label of a token without a target.
        num_valid: what the sum is divided by, the same on all ranks. Default: the valid tokens of the plan's group.
            Pass the count over all groups and accumulation steps to normalise by those.
        chunk_tokens: how many tokens' logits exist at once. Default: about 2^22 logits, or as many as ``hidden`` has
            elements if that is more, and never more than a quarter of the shard's. A cap holds as many numbers again
            in the backward.

    Returns:
        A scalar, fp32 (fp64 for fp64): (sum over all ranks) / ``num_valid``, the same on every rank. Its backward
        gives this rank's share without communication: *summed* over ranks the gradients are the one-device gradient.
        A rank without a valid token gets gradients of zeros. Without a valid token in the whole group the value and
        all gradients are 0. Logits, their softmax and the sums are fp32 (fp64 for fp64), autocast or not.

    Raises:
        TypeError, ValueError: a bad argument, on every rank if it is bad on one.
    """
    check_plan(plan)
    with plan.agreement.entering("next_token_loss"):
        divisor = divisor_of(num_valid)
        check_arguments(hidden, lm_head_weight, labels, plan, ignore_index, chunk_tokens)
        check_logits(hidden, lm_head_weight, bias, factor, softcap)
        check_transforms("next_token_loss", hidden=hidden, lm_head_weight=lm_head_weight, bias=bias)
    settings = _Settings(
        plan=plan,
        form=LogitForm(factor, softcap),
        bias_length=None if bias is None else len(bias),
        ignore_index=ignore_index,
        num_valid=divisor,
        chunk_tokens=chunk_tokens,
    )
    return _NextTokenLoss.apply(hidden, lm_head_weight, bias, labels, settings)


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
    """The negative log-likelihood of each of this rank's labels: the very numbers that :func:`next_token_loss` sums.

    For evaluation: it has no gradient and exchanges nothing. ``plan.unshard(nll, 1)`` puts it in global order.

    Args:
        hidden, lm_head_weight, labels, bias, factor, softcap, ignore_index, chunk_tokens: as for
            :func:`next_token_loss`.

    Returns:
        [B, S_local] in nats, fp32 (fp64 for fp64); 0 where the label is ``ignore_index``.

    Raises:
        TypeError, ValueError: a bad argument; on the other ranks in their next call with this plan.
    """
    check_plan(plan)
    with plan.agreement.entering("next_token_nll"):
        check_arguments(hidden, lm_head_weight, labels, plan, ignore_index, chunk_tokens)
        check_logits(hidden, lm_head_weight, bias, factor, softcap)
        check_transforms("next_token_nll", hidden=hidden, lm_head_weight=lm_head_weight, bias=bias)
        head = Head(lm_head_weight, bias, LogitForm(factor, softcap))
        rows, _, lse, picked, _ = _likelihoods(hidden, head, labels, ignore_index, chunk_tokens)
        nll = torch.zeros(labels.numel(), dtype=lse.dtype, device=lse.device)
        nll[rows] = lse - picked
    return nll.view(labels.shape)


def _likelihoods(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, ignore_index: int, chunk_tokens: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """(rows, target, lse, picked, chunk): of the n valid tokens, where they are, their labels, the log-sum-exp of their
    logits and the logit of their label, each [n], computed ``chunk`` tokens at a time."""
    compute = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    flat, label = hidden.flatten(0, 1), labels.flatten()
    rows = (label != ignore_index).nonzero().squeeze(1)
    target = label[rows].long()
    lse = torch.empty(rows.shape, dtype=compute, device=hidden.device)
    picked = torch.empty_like(lse)
    chunk = chunk_tokens or _chunk_tokens(len(rows), *head.weight.shape)
    with torch.autocast(hidden.device.type, enabled=False):
        w = _operand(head.weight, compute)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            logits = head.chunk(_operand(flat[rows[part]], compute), w, compute)
            lse[part] = torch.logsumexp(logits, 1)
            picked[part] = logits.gather(1, target[part, None]).squeeze(1)
    return rows, target, lse, picked, chunk


class _NextTokenLoss(torch.autograd.Function):
    """Ledger, for the n valid tokens of this rank (N = B * S_local tokens in all), chunk by chunk of them:

    h_nE = hidden[rows], W_VE, b_V = bias or 0, t_n = labels[rows]; f = factor, k = softcap; c = 1 / num_valid
      forward   y_nV = f (h W^T + b)                       z_nV = k tanh(y / k), y without a cap
                lse_n = logsumexp(z)                       value = c * sum over ranks of sum(lse - z[t])
      backward  dz_nV = e^(z - lse) - onehot(t)            dy_nV = dz (1 - (z / k)^2), dz without a cap
                g = the gradient of the value              dh_nE = g c f dy W  (0 in the other rows)
                dW_VE = g c f dy^T h                       db_V = g c f sum over n of dy

    Saved: hidden, W and b (as given), rows, t and lse (n numbers each). z is computed again in the backward: it is
    the one tensor that would not fit. dW and db are summed over chunks in fp32 and rounded once. c and f are applied
    after the products, or c would flush dy to zero in fp16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        settings: _Settings,
    ) -> torch.Tensor:
        with settings.plan.agreement.entering("next_token_loss"):
            head = Head(weight, bias, settings.form)
            rows, target, lse, picked, ctx.chunk = _likelihoods(
                hidden, head, labels, settings.ignore_index, settings.chunk_tokens
            )
            local = (lse - picked).sum(dtype=torch.float64).item()
        value, ctx.divisor = _mean(settings, local, len(rows))
        ctx.form = settings.form
        ctx.save_for_backward(hidden, weight, bias, rows, target, lse)
        return torch.tensor(value, dtype=lse.dtype, device=hidden.device)

    @staticmethod
    @differentiable_once("next_token_loss")
    def backward(ctx: Any, saved: tuple[torch.Tensor, ...], grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_transforms("the backward of next_token_loss", grad=grad)
        check_batches("the backward of next_token_loss", grad)
        hidden, weight, bias, rows, target, lse = saved
        compute, flat = lse.dtype, hidden.flatten(0, 1)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dhidden = torch.zeros(flat.shape, dtype=flat.dtype, device=flat.device) if wants_hidden else None
        dweight = torch.zeros(weight.shape, dtype=compute, device=weight.device) if wants_weight else None
        dbias = torch.zeros(bias.shape, dtype=compute, device=bias.device) if wants_bias else None
        scale = grad * ctx.form.factor / ctx.divisor if ctx.divisor else torch.zeros_like(grad)
        head = Head(weight, bias, ctx.form)
        with torch.autocast(hidden.device.type, enabled=False):
            w = _operand(weight, compute)
            for start in range(0, len(rows), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                h = _operand(flat[rows[part]], compute)
                dproduct = _dproduct(ctx.form.softcap, head.chunk(h, w, compute), lse[part], target[part])
                if dbias is not None:
                    dbias += dproduct.sum(0)
                dproduct = dproduct.to(w.dtype)
                if dhidden is not None:
                    dhidden[rows[part]] = (_product(dproduct, w, compute) * scale).to(dhidden.dtype)
                if dweight is not None:
                    dweight += _product(dproduct.T, h, compute)
        if dhidden is not None:
            dhidden = dhidden.view(hidden.shape)
        # A rank without a valid token contributes exactly 0, also where the scale is not finite.
        for total in (dweight, dbias):
            if total is not None and len(rows):
                total.mul_(scale)
        return dhidden, _rounded(dweight, weight), _rounded(dbias, bias), None, None


def _dproduct(softcap: float | None, logits: torch.Tensor, lse: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The ledger's dy [n, V] of z [n, V], which it overwrites."""
    slope = None if softcap is None else (logits / softcap).square_().neg_().add_(1)
    dlogits = logits.sub_(lse[:, None]).exp_()
    dlogits[torch.arange(len(target), device=target.device), target] -= 1
    return dlogits if slope is None else dlogits.mul_(slope)


def _rounded(total: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    return None if total is None or like is None else total.to(like.dtype)


def _mean(settings: _Settings, local_sum: float, local_count: int) -> tuple[float, float]:
    """(value, divisor), the same floats on every rank: one exchange, summed in rank order."""
    same = {
        "num_valid": settings.num_valid,
        "factor": settings.form.factor,
        "softcap": settings.form.softcap,
        "the length of bias": settings.bias_length,
    }
    given = [math.inf if value is None else value for value in same.values()]  # each is finite, or None
    ranks = settings.plan.exchange_small([local_sum, float(local_count), *given])
    total, count = (sum(rank[i] for rank in ranks) for i in (0, 1))
    for i, name in enumerate(same, 2):
        if any(rank[i] != ranks[0][i] for rank in ranks):
            told = ", ".join(f"rank {r}: {'None' if rank[i] == math.inf else rank[i]}" for r, rank in enumerate(ranks))
            remedy = "pass the same number on all of them" + (", or None" if name != "factor" else "")
            raise ValueError(f"{name} differs over the ranks ({told}); {remedy}")
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
