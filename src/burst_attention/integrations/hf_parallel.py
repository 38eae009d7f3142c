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
from torch import nn
from transformers import PreTrainedModel

from burst_attention.attention.batch import SAME_BATCH, batch_fields, cut
from burst_attention.attention.plan import Plan, make_plan
from burst_attention.loss import LogitForm

from . import hf_head, hf_models
from .hf_answer import Call, Scaled, answer
from .hf_attention import register
from .hf_batch import PACKING, PlanCache, Rows, rows_of
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
        model: a causal language model of transformers, one for the classification of sequences (a reward model, whose
            last hidden states are gathered whole on every rank), or a PEFT model of one. Call this before DDP,
            ``fully_shard`` and ``torch.compile``. It is changed in place: its class becomes a subclass.
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
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    plan = make_plan(1, layout="zigzag" if layout == "auto" else layout, group=group, timeout=timeout)
    with plan.agreement.entering("parallelize"):
        if gradients not in get_args(Gradients):
            raise ValueError(f"gradients={gradients!r} is unknown; choose one of {', '.join(get_args(Gradients))}")
        if not isinstance(base, PreTrainedModel):
            raise TypeError(f"model is a {type(base).__name__}; pass a causal language model of transformers")
        if isinstance(base, _Parallel):
            raise ValueError(f"model is parallelized over {base._burst.plans.base.world} ranks already; do it once")
        form = None if _classifies(base) else hf_head.find_form(base)
        if plan.world > 1:
            hf_models.check_layers(base.config)
            hf_models.check_structure(base.base_model if form is None else base)
    plan.agreement.agree("parallelize", {"layout": layout, "gradients": gradients, "temperature": temperature})
    register()
    own = base.config._attn_implementation
    alone = "sdpa" if own == hf_models.NAME else own
    base.set_attn_implementation(hf_models.NAME)
    windows = hf_models.layer_windows(base.config.get_text_config(decoder=True))
    state = _Context(PlanCache(plan, windows), form, gradients, temperature, alone)
    vars(base).pop("forward", None)  # of TRL's fused head, which our own answers for
    spread: Any = base
    spread._burst = state
    spread.__class__ = _parallel_class(type(spread))  # type: ignore[arg-type]
    return model


def _classifies(model: Any) -> bool:
    """Whether it is one that makes a few scores of whole sequences, as reward models do."""
    return type(model).__name__.endswith("ForSequenceClassification")


@dataclass(eq=False)
class _Context:
    """What a parallelized model knows of its ranks."""

    plans: PlanCache
    form: LogitForm | None  # None: it classifies whole sequences
    gradients: Gradients
    temperature: float
    alone: str  # the attention of a rank by itself
    generating: bool = field(default=False, init=False)

    def __deepcopy__(self, _: Any) -> _Context:
        """Copies of a model share their ranks, which can't be copied."""
        return _Context(self.plans, self.form, self.gradients, self.temperature, self.alone)

    def share(self, whole: Any) -> Any:
        """The same value; its gradient as ``gradients`` asks for it. A rank's backward gives its share of the sum."""
        if whole is None or self.gradients == "sum":
            return whole
        return Scaled.apply(whole, float(self.plans.base.world))


class _Parallel:
    """What the class of a parallelized model has before its own methods."""

    _burst: _Context

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with _alone(self):
            return super().generate(*args, **kwargs)  # type: ignore[misc]


@functools.cache
def _parallel_class(kind: Any) -> Any:
    """A subclass of a model's class under its name, which is what model cards, checkpoints and trainers ask for."""

    @functools.wraps(kind.forward)  # trainers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._burst.generating:
            return kind.forward(self, *args, **kwargs)
        return _forward(self, _named(kind, self, args, kwargs))

    members = {
        "forward": forward,
        "stock_class": kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
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


def _named(kind: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument that is not None by its name."""
    names = [name for name in inspect.signature(kind.forward).parameters if name != "self"]
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: value for name, value in given.items() if value is not None}


def _forward(model: Any, given: Mapping[str, Any]) -> Any:
    """The forward of a parallelized model."""
    call = _agreed(model, given)
    asked = {name: given[name] for name in ("output_router_logits",) if name in given}
    ids, positions = call.shard["input_ids"], call.shard["position_ids"]
    body = model.base_model(input_ids=ids, position_ids=positions, plan=call.plans, use_cache=False, **asked)
    return answer(model, body, call)


@torch.compiler.disable
def _agreed(model: Any, given: Mapping[str, Any]) -> Call:
    state: _Context = model._burst
    base = state.plans.base
    with base.agreement.entering("the model"):
        _check_keywords(given)
        batch = {name: given.get(name) for name in _BATCH if name != "labels" or state.form is not None}
        rows = rows_of(batch, ranks=base.world)
        keep = int(given.get("logits_to_keep", 0))
        if rows.targets is None and not keep and state.form is not None:
            raise ValueError(
                "labels are missing: over ranks a model gives its loss, and logits only if logits_to_keep says of how "
                "many last positions; generate with model.generate"
            )
        plans = state.plans.get(rows.input_ids.shape[1], rows.cu_seqlens)
        plan = plans.one
        fields = _fields(plan, rows, given, keep)
    base.agreement.agree("the model", fields, remedy=SAME_BATCH)
    return Call(given, rows, keep, plans, plan, cut(rows.input_ids, rows.targets, plan))


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
    labels = given.get("labels") if rows.targets is None else rows.targets
    return {
        **batch_fields(plan, input_ids=rows.input_ids, labels=labels),
        "attention_mask's padding": None if rows.padding is None else rows.padding.tolist()[:32],
        "num_items_in_batch": None if items is None else float(items),
        "fused_lm_head": bool(given.get("fused_lm_head", False)),
        "logits_to_keep": keep,
        "gradients are wanted": torch.is_grad_enabled(),
    }
