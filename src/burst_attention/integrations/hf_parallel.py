"""A transformers model whose ranks together are one: the whole batch in on each of them, the whole loss out.

    parallelize(model, group)
    loss = model(input_ids=ids, labels=labels).loss  # ids and labels [B, S], the same on every rank

From outside the ranks of a group look like replicas that read the same batch, so loops and trainers stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import ModelOutput

from burst_attention.attention.batch import SAME_BATCH, batch_fields, cut
from burst_attention.attention.plan import Plan, make_plan
from burst_attention.loss import LogitForm, TokenLogProbs
from burst_attention.loss import next_token_loss as loss_of
from burst_attention.loss import token_log_probs as log_probs_of

from . import hf_head, hf_models
from .hf_attention import register
from .hf_batch import IGNORED, PACKING, Plans, Rows, rows_of
from .hf_checks import shown

Gradients = Literal["mean", "sum"]
Model = TypeVar("Model", bound=nn.Module)

_BATCH = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", *PACKING)
_ANSWERED = ("num_items_in_batch", "logits_to_keep", "fused_lm_head", "output_router_logits", "return_dict")
# What changes nothing that is asked for here.
_IGNORED = ("use_cache", "cache_position")
_REMEDIES = {
    "inputs_embeds": "pass input_ids; embeddings that are made outside of the model are not supported",
    "past_key_values": "a cache holds whole sequences; generate with model.generate, which runs on each rank by itself",
    "output_hidden_states": "hidden states are spread over the ranks; leave it out",
    "output_attentions": "the attention weights are never formed; leave it out",
}


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


def parallelize(
    model: Model,
    group: Any = None,
    *,
    layout: str = "auto",
    gradients: Gradients = "mean",
    temperature: float = 1.0,
    timeout: float | timedelta | None = None,
) -> Model:
    """Spread each sequence that ``model`` is called with over the ranks of ``group``. Every rank must call it.

    After it ``model(input_ids=..., labels=...)`` takes the whole batch on every rank, and returns a
    :class:`ParallelOutput` with the one-device loss. Documents come from ``position_ids`` that restart,
    ``cu_seq_lens_q``, ``seq_idx`` or ``sequence_ids``; padding from ``attention_mask``; ``num_items_in_batch`` is what
    the loss is divided by. ``model.generate`` runs on each rank by itself, as before.

    Args:
        model: a causal language model of transformers, or a PEFT model of one. Call this before DDP, ``fully_shard`` or
            ``torch.compile``, or after ``fully_shard``. It is changed in place: its class becomes a subclass of it.
        group: a ProcessGroup, one axis of a DeviceMesh, or None: as for :func:`burst_attention.make_plan`.
        layout: a layout's name, or ``auto``: zigzag, which is balanced under causal masks.
        gradients: ``mean``: the mean over all ranks is the one-device gradient, as DDP and FSDP take it. ``sum``: the
            sum over the ranks of ``group`` is.
        temperature: of the results per token that ``fused_lm_head=True`` asks for, as TRL does.
        timeout: as for :func:`burst_attention.make_plan`.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: the model can't be spread, or an argument is wrong; on every rank.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    plan = make_plan(1, layout="zigzag" if layout == "auto" else layout, group=group, timeout=timeout)
    with plan.agreement.entering("parallelize"):
        if gradients not in get_args(Gradients):
            raise ValueError(f"gradients={gradients!r} is unknown; choose one of {', '.join(get_args(Gradients))}")
        if not isinstance(base, PreTrainedModel):
            raise TypeError(f"model is a {type(base).__name__}; pass a causal language model of transformers")
        if isinstance(base, _Parallel):
            raise ValueError(f"model is parallelized over {base._burst.plans.base.world} ranks already; do it once")
        form = hf_head.find_form(base)
        if plan.world > 1:
            hf_models.check_layers(base.config)
            hf_models.check_structure(base)
    plan.agreement.agree("parallelize", {"layout": layout, "gradients": gradients, "temperature": temperature})
    register()
    own = base.config._attn_implementation
    alone = "sdpa" if own == hf_models.NAME else own
    base.set_attn_implementation(hf_models.NAME)
    windows = hf_models.layer_windows(base.config.get_text_config(decoder=True))
    state = _Context(type(base), Plans(plan, windows), form, gradients, temperature, alone)
    vars(base).pop("forward", None)  # of TRL's fused head, which our own answers for
    base._burst = state
    base.__class__ = _parallel_class(type(base))
    return model


@dataclass(eq=False)
class _Context:
    """What a parallelized model knows of its ranks."""

    kind: type[PreTrainedModel]
    plans: Plans
    form: LogitForm
    gradients: Gradients
    temperature: float
    alone: str  # the attention of a rank by itself
    generating: bool = field(default=False, init=False)

    def __deepcopy__(self, _: Any) -> _Context:
        """Copies of a model share their ranks, which can't be copied."""
        return _Context(self.kind, self.plans, self.form, self.gradients, self.temperature, self.alone)

    def share(self, whole: Tensor | None) -> Tensor | None:
        """The same value; its gradient as ``gradients`` asks for it. A rank's backward gives its share of the sum."""
        if whole is None or self.gradients == "sum":
            return whole
        return _Scaled.apply(whole, self.plans.base.world)


class _Scaled(torch.autograd.Function):
    """The value as it is, its gradient ``factor`` times as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.clone()  # trainers scale a loss in place, which a view forbids

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _Parallel:
    """What the class of a parallelized model has before its own methods."""

    _burst: _Context

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with _alone(self):
            return super().generate(*args, **kwargs)  # type: ignore[misc]


@functools.cache
def _parallel_class(kind: type) -> type:
    """A subclass of a model's class under its name, which is what model cards, checkpoints and trainers ask for."""

    @functools.wraps(kind.forward)  # trainers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._burst.generating:
            return kind.forward(self, *args, **kwargs)
        return _forward(self, _named(kind, self, args, kwargs))

    members = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Parallel, kind), members)


@contextmanager
def _alone(model: Any) -> Any:
    """Within it the model is one rank's own, with the attention that it had."""
    model._burst.generating = True
    model.set_attn_implementation(model._burst.alone)
    try:
        yield
    finally:
        model.set_attn_implementation(hf_models.NAME)
        model._burst.generating = False


def _named(kind: type, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument that is not None by its name."""
    names = [name for name in inspect.signature(kind.forward).parameters if name != "self"]
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: value for name, value in given.items() if value is not None}


def _forward(model: Any, given: Mapping[str, Any]) -> ParallelOutput | tuple[Any, ...]:
    """The forward of a parallelized model."""
    state: _Context = model._burst
    base = state.plans.base
    with base.agreement.entering("the model"):
        _check_keywords(given)
        rows = rows_of({name: given.get(name) for name in _BATCH}, ranks=base.world)
        keep = int(given.get("logits_to_keep", 0))
        if rows.targets is None and not keep:
            raise ValueError(
                "labels are missing: over ranks a model gives its loss, and logits only if logits_to_keep says of how "
                "many last positions; generate with model.generate"
            )
        plans = state.plans.get(rows.input_ids.shape[1], rows.cu_seqlens)
        plan = next(iter(plans.values()))
        fields = _fields(plan, rows, given, keep)
    base.agreement.agree("the model", fields, remedy=SAME_BATCH)
    shard = cut(rows.input_ids, rows.targets, plan)
    body = _run_body(model, shard, plans, given)
    out = _results(model, body[0], shard, plan, rows, given)
    if keep:
        out.logits = _last_logits(model, body[0], plan, rows, keep)
    if given.get("output_router_logits", getattr(model.config.get_text_config(), "output_router_logits", False)):
        _add_router_loss(model, body, out, plan, rows, given)
    return out if given.get("return_dict", True) else out.to_tuple()


def _check_keywords(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in (*_BATCH, *_ANSWERED, *_IGNORED) or value is False:
            continue
        remedy = _REMEDIES.get(name, "what it would do over ranks is not known; leave it out")
        raise ValueError(f"{name}={shown(value)} is refused: {remedy}")
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"logits_to_keep={shown(keep)} must be a number of last positions, 0 for none")


def _fields(plan: Plan, rows: Rows, given: Mapping[str, Any], keep: int) -> dict[str, Any]:
    """What all ranks must be called with alike."""
    items = given.get("num_items_in_batch")
    return {
        **batch_fields(plan, input_ids=rows.input_ids, labels=rows.targets),
        "attention_mask's padding": None if rows.padding is None else rows.padding.tolist()[:32],
        "num_items_in_batch": None if items is None else float(items),
        "fused_lm_head": bool(given.get("fused_lm_head", False)),
        "logits_to_keep": keep,
        "gradients are wanted": torch.is_grad_enabled(),
    }


def _run_body(model: Any, shard: dict[str, Tensor], plans: dict[int | None, Plan], given: Mapping[str, Any]) -> Any:
    """What the model's body makes of this rank's shard."""
    asked = {name: given[name] for name in ("output_router_logits",) if name in given}
    return model.base_model(
        input_ids=shard["input_ids"],
        position_ids=shard["position_ids"],
        plan=plans,
        use_cache=False,
        **asked,
    )


def _results(
    model: Any, hidden: Tensor, shard: dict[str, Tensor], plan: Plan, rows: Rows, given: Mapping[str, Any]
) -> ParallelOutput:
    """The loss, or all that is asked for of each token."""
    if rows.targets is None:
        return ParallelOutput()
    state: _Context = model._burst
    head = hf_head.find_head(model, state.form)
    items, labels = given.get("num_items_in_batch"), shard["shift_labels"]
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
    out.label_mask = restored((rows.targets != IGNORED)[:, :-1])
    out.log_probs, out.entropy = state.share(out.log_probs), state.share(out.entropy)
    divisor = out.label_mask.sum().clamp(min=1) if items is None else items
    out.loss = -out.log_probs.sum() / divisor
    return out


def _last_logits(model: Any, hidden: Tensor, plan: Plan, rows: Rows, keep: int) -> Tensor:
    """[B, keep, V] of each row's last positions."""
    with torch.no_grad():
        whole = rows.restore(plan.unshard(hidden.detach(), 1))[:, -keep:]
        head = hf_head.find_head(model, model._burst.form)
        return head.logits(_for_head(whole, head.weight))


def _for_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """As mixed precision gives it to a head: FSDP may hold the weight in fewer bits than the body gave out."""
    return hidden.to(weight.dtype) if weight.dtype.itemsize < hidden.dtype.itemsize else hidden


def _add_router_loss(
    model: Any, body: Any, out: ParallelOutput, plan: Plan, rows: Rows, given: Mapping[str, Any]
) -> None:
    """The loss of a mixture's router over the tokens of all ranks, as the model's own forward makes it, added once."""
    state: _Context = model._burst
    layers = [plan.unshard(logits.unflatten(0, (len(rows.input_ids), -1)), 1) for logits in body.router_logits]
    whole = tuple(rows.restore(logits).flatten(0, 1) for logits in layers)
    aux = _router_loss(model, whole, given.get("attention_mask"))
    out.aux_loss = state.share(aux)
    if out.loss is not None and out.aux_loss is not None:
        out.loss = out.loss + model.router_aux_loss_coef * out.aux_loss.to(out.loss)


def _router_loss(model: Any, logits: tuple[Tensor, ...], attention_mask: Tensor | None) -> Tensor:
    """What the model's own forward makes of its routers' logits, each [tokens, experts] of the whole batch."""
    twin = object.__new__(model._burst.kind)
    twin.__dict__.update(model.__dict__)
    head = next(name for name, child in model.named_children() if child is model.get_output_embeddings())
    body = MoeModelOutputWithPast(last_hidden_state=logits[0].new_zeros(1, 1, 1), router_logits=logits)
    stands_in = {model.base_model_prefix: lambda **_: body, head: lambda hidden: hidden}
    twin.__dict__["_modules"] = {n: m for n, m in model._modules.items() if n not in stands_in}
    twin.__dict__.update(stands_in)
    return twin.forward(input_ids=None, attention_mask=attention_mask, output_router_logits=True).aux_loss
