"""Compute the output of a parallelized model from the hidden states of each rank's shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import ModelOutput

from burst_attention.attention.batch import Plans
from burst_attention.attention.plan import Plan
from burst_attention.loss import Head, TokenLogProbs
from burst_attention.loss import next_token_loss as loss_of
from burst_attention.loss import token_log_probs as log_probs_of
from burst_attention.loss.head import is_cut

from ..layers.converted import pooled
from ..reading import forwards
from ..tensor.parts import Scaled
from . import heads, stub_forward
from .rows import IGNORED, PACKING, BatchRows


@dataclass
class ParallelOutput(ModelOutput):
    """The output of a parallelized model, equal on all ranks. Fields that were not requested hold None.

    ``fused_lm_head=True`` requests the fields from ``log_probs`` to ``label_mask``; a name, or several with
    ``log_probs`` among them, requests only these and ``label_mask``. Each is [B, S - 1] ([B, S] with
    ``shift_labels``) in the order of the batch, and 0 where there is no label.

    Attributes:
        loss: the one-device loss, a scalar in fp32 (fp64 for fp64).
        logits: with ``logits_to_keep=n``: [B, n, V], logits of each row's last positions, without a gradient. With
            ``logits="gather"``: [B, S, V], all logits, differentiable.
        hidden_states: with ``output_hidden_states``: as from transformers, each [B, S, E], differentiable.
        log_probs: log-probabilities of the labels, in nats, differentiable.
        entropy: entropies of the distributions that predict the labels, in nats, differentiable.
        mean_logits: the mean of the logits over the vocabulary.
        is_top1: bool, whether the label is the most likely token.
        log_sum_sq_probs: the logarithm of the sum of squared probabilities.
        label_mask: bool, whether there is a label.
        aux_loss: the router loss of a mixture of experts, a scalar; ``loss`` already includes it.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor | None, ...] | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the model that all ranks have agreed on."""

    inputs: Mapping[str, Any]
    rows: BatchRows
    plans: Plans
    items: float | None = None  # num_items_in_batch
    keep: int = 0  # logits_to_keep
    whole: bool = False  # whether the caller wants the logits of all tokens
    states: Any = False  # the hidden states that the caller wants: all (True), none (False), or by their numbers
    router: bool = False  # whether the caller wants the router loss of a mixture of experts
    own: bool = False  # whether a custom forward or loss of the model runs on whole hidden states
    shard: dict[str, Tensor] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """One of the plans; they differ only in their windows."""
        return self.plans.one


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return a copy, whose gradient is multiplied by ``factor``."""
    whole: Tensor = Scaled.apply(x, factor).clone()  # trainers scale a loss in place, which autograd forbids for a view
    return whole


@torch.compiler.disable
def answer(model: Any, body: Any, call: Call) -> Any:
    """Return the model's output, computed from the body's output for this rank's shard."""
    if model._burst.form is None:
        return around(model, lambda: body, call)
    state = model._burst
    out = _results(model, body[0], call)
    if call.keep or call.whole:
        out.logits = _logits(model, body[0], call)
    if call.states is not False:
        out.hidden_states = _whole_states(model, body, call, state.share)
    if call.router:
        aux = stub_forward.router_loss(model, _whole_routers(body, call), call.inputs.get("attention_mask"))
        out.aux_loss = state.share(aux)
        if out.loss is not None and out.aux_loss is not None:
            out.loss = out.loss + model.router_aux_loss_coef * out.aux_loss.to(out.loss)
    wanted = call.inputs.get("return_dict", getattr(model.config, "return_dict", True))
    return _in_turn(model, out if wanted else out.to_tuple())


def wanted_fields(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields per token that ``fused_lm_head`` asks for: True for all, or their names."""
    wanted, fields = inputs.get("fused_lm_head", False), tuple(TokenLogProbs.__dataclass_fields__)
    if isinstance(wanted, bool):
        return fields if wanted else ()
    names = wanted if isinstance(wanted, (list, tuple)) else (wanted,)
    if "log_probs" not in names or any(name not in fields for name in names):
        raise ValueError(f"fused_lm_head={wanted!r} must be True, or names with log_probs, of {', '.join(fields)}")
    return tuple(names)


def _results(model: Any, hidden: Tensor, call: Call) -> ParallelOutput:
    """Return the loss; with ``fused_lm_head`` also the fields per token."""
    inputs, rows, plan = call.inputs, call.rows, call.plan
    if rows.targets is None:
        return ParallelOutput()
    state = model._burst
    head = _head_of(model)
    items, labels = call.items, call.shard["shift_labels"]
    hidden = heads.for_head(hidden, head.weight)
    if not inputs.get("fused_lm_head"):
        loss = loss_of(hidden, head.weight, labels, plan, **head.options, num_valid=items)
        return ParallelOutput(loss=state.share(loss))
    fields = wanted_fields(inputs)
    tokens = log_probs_of(
        hidden, head.weight, labels, plan, **head.options, temperature=state.temperature, outputs=fields
    )
    shifted = inputs.get("shift_labels") is not None

    def restored(per_token: Tensor) -> Tensor:
        whole = rows.restore(nn.functional.pad(per_token, (0, 1)))
        return whole if shifted else whole[:, :-1]

    values: dict[str, Any] = {name: restored(getattr(tokens, name)) for name in fields}
    out = ParallelOutput(**values)
    mask = restored((rows.targets != IGNORED)[:, :-1]).to(hidden.device, non_blocking=True)
    log_probs, entropy = state.share(out.log_probs), state.share(out.entropy)
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items or 1.0)
    return replace(out, loss=loss, log_probs=log_probs, entropy=entropy, label_mask=mask)


@dataclass
class _WholeOutput(MoeModelOutputWithPast):
    hidden_states: Any = None  # here also those that the caller left out, as None
    cache_params: Any = None  # the cache in Mamba models, until transformers 5.23
    pooler_output: Tensor | None = None
    cross_attentions: Any = None

    def lack(self, made: Any) -> None:
        """Have the fields that a body's own output has and leaves empty (Gemma 4's keys for other models)."""
        for name in vars(made) if isinstance(made, ModelOutput) else ():
            if getattr(made, name) is None and not hasattr(self, name):
                setattr(self, name, None)


@torch.compiler.disable
def around(model: Any, body: Callable[[], Any], call: Call) -> Any:
    """Run the model's own forward on each rank, on the whole hidden states of the parallel body."""
    # Each rank then has whole gradients of other parts (the head, say), but its shard's share of the body's. ``scaled``
    # multiplies that share by the number of ranks, so that a mean over the ranks is right.
    world, whole, head = float(call.plan.world), _WholeOutput(), model.get_output_embeddings()

    def results() -> Any:
        made = body()
        whole.lack(made)
        hidden = made[0] if head is None else heads.for_head(made[0], head.weight)
        whole.last_hidden_state = scaled(_gathered(hidden, call), world)
        if call.states is not False:
            whole.hidden_states = _whole_states(model, made, call, lambda x: scaled(x, world))
        whole.pooler_output = pooled(forwards.body_of(model), whole.last_hidden_state)
        if call.router:
            routers: Any = tuple(scaled(each, world) for each in _whole_routers(made, call))
            whole.router_logits = routers
        return whole

    names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", *PACKING)
    around = stub_forward.Around(model, call.inputs, names, router=call.router)
    out = around.run(results, lambda: call.plan.agreement.entering("the model"))
    labels = call.inputs.get("labels")
    of_tokens = model._burst.form is not None or (labels is not None and labels.dim() == 2)
    if call.rows.real is not None and of_tokens:
        _check_padding(model, around, out, whole, call.rows.real)
    if model._burst.gradients == "sum":
        out = stub_forward.mapped(out, lambda x: scaled(x, 1 / world))
    return _in_turn(model, out)


def _in_turn(model: Any, out: Any) -> Any:
    """Return the output; before a backward from it exchanges anything over a tensor-parallel axis, ranks compare."""
    begin = model._burst.meeting.turn()
    if begin is not None:
        for x in stub_forward.tensors_of(out):
            if x.grad_fn is not None:  # a hook runs before the node that made the tensor
                x.register_hook(begin)
    return out


@torch.no_grad()
def _check_padding(model: Any, around: stub_forward.Around, out: Any, whole: Any, real: Tensor) -> None:
    """Refuse a loss that depends on the hidden states of padding, which differ from those on one device."""
    hidden = whole.last_hidden_state
    other = _WholeOutput(last_hidden_state=torch.where(real.to(hidden.device)[..., None], hidden, 1 - 2 * hidden))
    other.lack(whole)
    other.pooler_output = whole.pooler_output
    other.router_logits = whole.router_logits
    again = around.run(lambda: other, nullcontext, keep=False)
    for first, second in zip(stub_forward.tensors_of(out), stub_forward.tensors_of(again), strict=True):
        if first.dim() == 0 and not torch.allclose(first, second, rtol=1e-6, atol=0.0, equal_nan=True):
            raise ValueError(
                f"the loss of {type(model).__name__} depends on the logits of padding, which differ from one device's; "
                "exclude tokens with label -100 from the loss, or pass batches without padding"
            )


def _head_of(model: Any) -> Head:
    """Return the model's head with its whole weight."""
    head = heads.find_head(model, model._burst.form)
    cut = is_cut(head.weight)  # over a tensor-parallel axis, which the loss takes
    if isinstance(head.weight, DTensor) and not cut and isinstance(model.get_output_embeddings(), FSDPModule):
        raise TypeError(
            "model's head has an FSDP group to itself, so its weight is not whole in the model's forward; shard the "
            "norm and the head as one group: fully_shard([model.model.norm, model.lm_head])"
        )
    return head


def _logits(model: Any, hidden: Tensor, call: Call) -> Tensor:
    """Return logits [B, keep, V] of last positions; or those of all tokens, whose gradient is as in :func:`around`."""
    world, head = float(call.plan.world), _head_of(model)
    if call.keep:
        with torch.no_grad():
            last = _last_of_rows(hidden.detach(), call)
        return head.local().logits(heads.for_head(last, head.weight))
    hidden = scaled(heads.for_head(hidden, head.weight), world)
    logits = head.local().differentiable_logits(_gathered(hidden, call))
    return logits if model._burst.gradients == "mean" else scaled(logits, 1 / world)


def _whole_states(
    model: Any, body: Any, call: Call, scaled: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, ...] | None:
    """Return the hidden states [B, S, E] that the caller wants; None for those that it left out."""
    states, shape = getattr(body, "hidden_states", None), [len(call.rows.input_ids), call.plan.length]
    with call.plan.agreement.entering("the model"):
        odd = [x.shape for x in states or () if x is not None and (x.dim() != 3 or [*x.shape[:2]] != shape)]
        if states is None or odd:
            what = f"{[*odd[0]]} from a layer, not [batch, sequence, hidden]" if odd else "none"
            kind = type(model).__name__
            raise ValueError(f"output_hidden_states is refused: {kind} returns {what}; leave it out")
        wrong = [] if call.states is True else [n for n in call.states if not -len(states) <= n < len(states)]
        if wrong:
            raise ValueError(
                f"output_hidden_states={call.states!r} has {wrong[0]}, but {type(model).__name__} has states 0 (of the "
                f"embeddings) to {len(states) - 1}; leave it out"
            )
    return tuple(None if each is None else _gathered(scaled(each), call) for each in states)


def _last_of_rows(shard: Tensor, call: Call) -> Tensor:
    """Return the last ``logits_to_keep`` tokens of each of the batch's rows [B, keep, ...]; only they are sent."""
    rows, tokens = call.rows.input_ids.shape
    places = call.rows.restore(torch.arange(rows * tokens).view(rows, tokens))[:, -call.keep :]
    at, where = torch.unique(places % tokens, return_inverse=True)
    gathered = call.plan.unshard(shard, 1, at=at.tolist())
    return gathered[(places // tokens).to(shard.device), where.to(shard.device)]


def _gathered(shard: Tensor, call: Call) -> Tensor:
    """Return values of all tokens [B, S, ...] in the order of the batch, from this rank's [R, T_local, ...]."""
    return call.rows.restore(call.plan.unshard(shard, 1))


def _whole_routers(body: Any, call: Call) -> tuple[Tensor, ...]:
    """Return each layer's router logits [tokens, experts] of the whole batch, in the batch's order."""
    rows = call.rows
    layers = [call.plan.unshard(logits.unflatten(0, (len(rows.input_ids), -1)), 1) for logits in body.router_logits]
    return tuple(rows.restore(logits).flatten(0, 1) for logits in layers)
