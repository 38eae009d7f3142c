"""What a parallelized model returns of what its body made of each rank's shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from burst_attention.attention.batch import Plans
from burst_attention.attention.plan import Plan
from burst_attention.loss import TokenLogProbs
from burst_attention.loss import next_token_loss as loss_of
from burst_attention.loss import token_log_probs as log_probs_of

from . import heads, stub_forward
from .batch import IGNORED, Rows


@dataclass
class ParallelOutput(ModelOutput):
    """What a parallelized model returns; what was not asked for is None. Everything is equal on all ranks.

    The fields from ``log_probs`` on are asked for by ``fused_lm_head=True``; each is [B, S - 1] ([B, S] with
    ``shift_labels``) in the order of the batch, and 0 where there is no label.

    Attributes:
        loss: the one-device loss, a scalar in fp32 (fp64 for fp64).
        logits: [B, logits_to_keep, V] of each row's last positions, without a gradient.
        log_probs: of the labels, differentiable.
        entropy: of the distributions that foretell the labels, differentiable.
        mean_logits: the mean over the vocabulary of the logits.
        is_top1: bool, whether the label is the most likely token.
        log_sum_sq_probs: the logarithm of the sum of squared probabilities.
        label_mask: bool, whether there is a label.
        aux_loss: the loss of a mixture's router, a scalar; it is in ``loss`` already.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """One call that all ranks have agreed on."""

    given: Mapping[str, Any]
    rows: Rows
    items: float | None  # num_items_in_batch
    keep: int  # logits asked for, of each row
    router: bool  # whether the loss of a mixture's router is
    plans: Plans
    shard: dict[str, Tensor] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """Any of the plans."""
        return self.plans.one


class Scaled(torch.autograd.Function):
    """The value as it is, its gradient ``factor`` times as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()  # trainers scale a loss in place, which a view forbids

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@torch.compiler.disable
def answer(model: Any, body: Any, call: Call) -> Any:
    """What the caller gets, of what the body made of this rank's shard."""
    given = call.given
    if model._burst.form is None:
        return _classified(model, body[0], call)
    out = _results(model, body[0], call)
    if call.keep:
        out.logits = _last_logits(model, body[0], call)
    if call.router:
        _add_router_loss(model, body, out, call)
    return out if given.get("return_dict", True) else out.to_tuple()


def _results(model: Any, hidden: Tensor, call: Call) -> ParallelOutput:
    """The loss, or all that is asked for of each token."""
    given, rows, plan = call.given, call.rows, call.plan
    if rows.targets is None:
        return ParallelOutput()
    state = model._burst
    head = heads.find_head(model, state.form)
    items, labels = call.items, call.shard["shift_labels"]
    hidden = _for_head(hidden, head.weight)
    if not given.get("fused_lm_head"):
        loss = loss_of(hidden, head.weight, labels, plan, **head.options, num_valid=items)
        return ParallelOutput(loss=state.share(loss))
    fields = tuple(TokenLogProbs.__dataclass_fields__)
    tokens = log_probs_of(
        hidden, head.weight, labels, plan, **head.options, temperature=state.temperature, outputs=fields
    )
    shifted = given.get("shift_labels") is not None

    def restored(per_token: Tensor) -> Tensor:
        whole = rows.restore(nn.functional.pad(per_token, (0, 1)))
        return whole if shifted else whole[:, :-1]

    out = ParallelOutput(**{name: restored(getattr(tokens, name)) for name in fields})
    mask = restored((rows.targets != IGNORED)[:, :-1])
    log_probs, entropy = state.share(out.log_probs), state.share(out.entropy)
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items or 1.0)
    return replace(out, loss=loss, log_probs=log_probs, entropy=entropy, label_mask=mask)


def _classified(model: Any, hidden: Tensor, call: Call) -> Any:
    """What the model's own forward returns, its classifier run by each rank on whole hidden states.

    The classifier's gradients are whole on every rank, those of the hidden states a rank's share.
    """
    state, world = model._burst, float(call.plan.world)
    whole = Scaled.apply(call.rows.restore(call.plan.unshard(hidden, 1)), world)
    out = stub_forward.classified(model, whole, call.given)
    if state.gradients == "mean":
        return out
    for name in ("loss", "logits"):
        if out.get(name) is not None:
            out[name] = Scaled.apply(out[name], 1 / world)
    return out


def _last_logits(model: Any, hidden: Tensor, call: Call) -> Tensor:
    """[B, keep, V] of each row's last positions."""
    with torch.no_grad():
        whole = call.rows.restore(call.plan.unshard(hidden.detach(), 1))[:, -call.keep :]
        head = heads.find_head(model, model._burst.form)
        return head.logits(_for_head(whole, head.weight))


def _for_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """As mixed precision gives it to a head: FSDP may hold the weight in fewer bits than the body gave out."""
    return hidden.to(weight.dtype) if weight.dtype.itemsize < hidden.dtype.itemsize else hidden


def _add_router_loss(model: Any, body: Any, out: ParallelOutput, call: Call) -> None:
    """The loss of a mixture's router over the tokens of all ranks, as the model's own forward makes it, added once."""
    state = model._burst
    rows = call.rows
    layers = [call.plan.unshard(logits.unflatten(0, (len(rows.input_ids), -1)), 1) for logits in body.router_logits]
    whole = tuple(rows.restore(logits).flatten(0, 1) for logits in layers)
    aux = stub_forward.router_loss(model, whole, call.given.get("attention_mask"))
    out.aux_loss = state.share(aux)
    if out.loss is not None and out.aux_loss is not None:
        out.loss = out.loss + model.router_aux_loss_coef * out.aux_loss.to(out.loss)
