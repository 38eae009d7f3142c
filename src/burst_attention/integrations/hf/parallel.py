"""A transformers model whose ranks together are one: the whole batch in on each of them, the whole loss out.

    parallelize(model, group)
    loss = model(input_ids=ids, labels=labels).loss  # ids and labels [B, S], the same on every rank

From outside the ranks of a group look like replicas that read the same batch, so loops and trainers stay as they are.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from burst_attention.attention.batch import SAME_BATCH, Plans, batch_fields, cut, digest_of
from burst_attention.attention.plan import make_plan
from burst_attention.loss import LogitForm
from burst_attention.loss.checks import divisor_of

from . import heads, models, parts, stub_forward
from .adapters import check_added_losses
from .attention import register, sizes_to_come
from .batch import IGNORED, PACKING, PlanCache, Rows, rows_of
from .checks import check_rope, shown
from .outputs import Call, Scaled, answer, answer_by_own

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
_WEIGHTS = "a sample of the weights"
_SAME_WEIGHTS = (
    "Every rank must hold the same weights: set one seed before the model is made, load them from one checkpoint, or "
    "broadcast rank 0's"
)


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
        layout: a layout's name, or ``auto``: what is predicted to be fastest for a batch, as for
            :func:`burst_attention.make_plan`; a forward counts once, be layers recomputed or not.
        gradients: ``mean``: the mean over all ranks is the one-device gradient, as DDP and FSDP take it. ``sum``: the
            sum over the ranks of ``group`` is.
        temperature: of the results per token that ``fused_lm_head=True`` asks for, as TRL does.
        timeout: as for :func:`burst_attention.make_plan`.

    Returns:
        ``model``.

    A ``loss_function`` or a forward that is not transformers' runs as it is, on each rank, on the hidden states of the
    whole batch: its logits are formed whole, and what it returns is returned.

    Weights must be equal on all ranks, as those of any replicas: DDP and FSDP see to it, and a sample of them is
    compared in the first call. A batch without any label has the loss 0 and no gradient (transformers gives NaN).

    Raises:
        TypeError, ValueError: the model can't be spread, or an argument is wrong; on every rank.
    """
    wrapper = _wrapper(model)
    base: Any = model.get_base_model() if not wrapper and hasattr(model, "get_base_model") else model  # type: ignore
    plan = make_plan(1, layout=layout, group=group, timeout=timeout, **sizes_to_come(base))
    with plan.agreement.entering("parallelize"):
        if gradients not in get_args(Gradients):
            raise ValueError(f"gradients={gradients!r} is unknown; choose one of {', '.join(get_args(Gradients))}")
        if wrapper:
            raise TypeError(
                f"model is wrapped by {wrapper} already; parallelize it first: model = hf.parallelize(model), then "
                f"{wrapper}(model)"
            )
        if not isinstance(base, PreTrainedModel):
            raise TypeError(f"model is a {type(base).__name__}; pass a causal language model of transformers")
        if isinstance(base, _Parallel):
            raise ValueError(f"model is parallelized over {base._burst.plans.base.world} ranks already; do it once")
        form = _form_of(base)
        _check_own_forward(base)
        if plan.world > 1:
            models.check_layers(base.config)
            check_rope(base.config.get_text_config(decoder=True))
            parts.check_structure(base.base_model)
            parts.check_hooks(base, root=False)
            parts.check_randomness(base.base_model)
    plan.agreement.agree("parallelize", {"layout": layout, "gradients": gradients, "temperature": temperature})
    register()
    own = base.config._attn_implementation
    alone = "sdpa" if own == parts.NAME else own
    _switch(base, parts.NAME)
    windows = models.layer_windows(base.config.get_text_config(decoder=True))
    layers = parts.attention_configs(base)
    absolute = models.places_absolutely(base)
    state = _Context(PlanCache(plan, windows), form, gradients, temperature, alone, layers, absolute)
    vars(base).pop("forward", None)  # of TRL's fused head, which our own answers for
    spread: Any = base
    spread._burst = state
    spread.__class__ = _parallel_class(type(spread))  # type: ignore[arg-type]
    return model


def unparallelize(model: Model) -> Model:
    """Undo :func:`parallelize`: the model's own class and attention again, with the same weights. Exchanges nothing.

    Args:
        model: what :func:`parallelize` returned, not wrapped. It is changed in place.

    Returns:
        ``model``, which can be pickled again, by ``torch.save`` for example.

    Raises:
        ValueError: ``model`` is not parallelized.
    """
    wrapped = not isinstance(model, _Parallel) and hasattr(model, "get_base_model")
    base: Any = model.get_base_model() if wrapped else model  # type: ignore[operator]
    if not isinstance(base, _Parallel):
        raise ValueError(f"model is a {type(base).__name__} that is not parallelized; leave out hf.unparallelize")
    alone = base._burst.alone
    spread: Any = base
    del spread._burst
    spread.__class__ = spread.stock_class
    spread.set_attn_implementation(alone)
    return model


def _wrapper(model: Any) -> str | None:
    """Return the name of what wraps a model of transformers: DDP, FSDP1, a compiler."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        return "torch.compile"
    inner = getattr(model, "module", None) if isinstance(model, nn.Module) else None
    wrapped = not isinstance(model, PreTrainedModel) and isinstance(inner, nn.Module)
    return type(model).__name__ if wrapped else None


def _check_own_forward(model: Any) -> None:
    """Refuse a forward set on the model, except TRL's fused head, whose results our own forward gives."""
    own = vars(model).get("forward")
    if own is not None and not stub_forward.is_fused_by_trl(model, own):
        raise ValueError(
            f"model has a forward of its own, {getattr(own, '__qualname__', own)}, over its class's, which would be "
            "lost; parallelize the model before it is wrapped"
        )


def _form_of(model: Any) -> LogitForm | None:
    """Return the form of the model's logits; None if it makes a few scores of whole sequences, as reward models do."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return None
    if stub_forward.has_stock_forward(model):
        return heads.find_form(model)
    heads.check_untouched(model)
    return LogitForm()  # never applied: a forward that is not transformers' makes its logits itself


@dataclass(eq=False)
class _Context:
    """What a parallelized model knows of its ranks."""

    plans: PlanCache
    form: LogitForm | None  # None: it classifies whole sequences
    gradients: Gradients
    temperature: float
    alone: str  # the attention of a rank by itself
    layers: list[Any]  # the configurations by which the layers choose their attention
    absolute: bool  # more than the distance of two tokens matters
    generating: bool = field(default=False, init=False)
    compared: bool = field(default=False, init=False)  # the ranks' weights
    found_right: Any = field(default=None, init=False)  # the classes of the parts that were checked, and their mode

    def __deepcopy__(self, memo: dict[int, Any]) -> _Context:
        """Copies of a model share their ranks, which can't be copied; their layers have configurations of their own."""
        return replace(self, layers=copy.deepcopy(self.layers, memo))

    def check_parts(self, model: Any) -> None:
        """Refuse what was attached to the model since the last call: adapters, hooks, another attention."""
        if self.plans.base.world == 1:
            return
        body = model.base_model
        parts.check_hooks(body)
        found = model.training, *map(type, body.modules())
        if found != self.found_right:
            parts.check_structure(body)
            parts.check_randomness(body)
            if self.gradients == "sum":
                check_added_losses(body)
            self.layers, self.found_right = parts.attention_configs(model), found

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a parallelized {type(self).__name__} can't be pickled, for it holds a group of ranks; save "
            "model.state_dict(), call model.save_pretrained(folder), or pickle hf.unparallelize(model)"
        )

    def __copy__(self) -> Any:
        return self._copied(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = new = self._copied({})
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def _copied(self, members: dict[str, Any]) -> Any:
        """Return another model of this class; by default copies are made as pickles are, which are refused."""
        new = object.__new__(type(self))
        new.__dict__.update(members)
        return new


@functools.cache
def _parallel_class(kind: Any) -> Any:
    """A subclass of a model's class under its name, which is what model cards, checkpoints and trainers ask for."""

    @functools.wraps(kind.forward)  # trainers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._burst.generating:
            return kind.forward(self, *args, **kwargs)
        return _forward(self, args, kwargs)

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
    _switch(model, model._burst.alone)
    try:
        yield
    finally:
        _switch(model, parts.NAME)
        model._burst.generating = False


def _switch(model: Any, implementation: str) -> None:
    """Have all layers use this attention, those too that hold a copy of the model's configuration."""
    model.set_attn_implementation(implementation)
    for config in parts.attention_configs(model):
        config._attn_implementation = implementation


def _named(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument that is not None by its name."""
    kind = type(model).__name__
    names = [name for name in inspect.signature(model.stock_class.forward).parameters if name != "self"]
    if len(args) > len(names):
        raise TypeError(f"{kind} takes at most {len(names)} arguments by place, {len(args)} were given; name them")
    placed = dict(zip(names, args, strict=False))
    twice = sorted(placed.keys() & kwargs.keys())
    if twice:
        raise TypeError(f"{twice[0]} was given to {kind} by place and by name; give it once")
    return {name: value for name, value in (placed | dict(kwargs)).items() if value is not None}


def _forward(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The forward of a parallelized model."""
    call = _agreed(model, args, kwargs)
    if call.own:
        return answer_by_own(model, lambda: _body(model, call), call)
    return answer(model, _body(model, call), call)


def _body(model: Any, call: Call) -> Any:
    """Return what the body makes of this rank's shard."""
    ids, positions = call.shard["input_ids"], call.shard["position_ids"]
    plans = Plans(call.plans, positions=positions)
    asked = {"output_router_logits": True} if call.router else {}
    return model.base_model(input_ids=ids, position_ids=positions, plan=plans, use_cache=False, **asked)


@torch.compiler.disable
def _agreed(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call, once all ranks are known to make it alike."""
    state: _Context = model._burst
    base = state.plans.base
    with base.agreement.entering("the model"):
        given = _named(model, args, kwargs)
        _check_keywords(model, given)
        own = _runs_its_own(model, given)
        parts.check_implementations(model, state.layers)
        state.check_parts(model)
        if state.form is not None:
            heads.check_untouched(model)
        batch = {name: given.get(name) for name in _BATCH if name != "labels" or state.form is not None}
        rows = rows_of(batch, ranks=base.world)
        items, keep = divisor_of(given.get("num_items_in_batch")), int(given.get("logits_to_keep", 0))
        _check_rows(model, given, rows, items, keep)
        plans = state.plans.get(rows.input_ids.shape[1], rows.cu_seqlens)
        call = Call(given, rows, items, keep, _wants_router(model, given), own, plans)
        fields = _fields(model, call)
    base.agreement.agree("the model", fields, remedy=SAME_BATCH, remedies={_WEIGHTS: _SAME_WEIGHTS})
    state.compared = True
    call.shard.update(cut(rows.input_ids, rows.targets, plans.one))
    return call


def _runs_its_own(model: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a causal model's own forward must run: ours knows transformers' forwards and loss alone."""
    if model._burst.form is None:
        return False
    labeled = any(given.get(name) is not None for name in ("labels", "shift_labels"))
    if stub_forward.has_stock_forward(model) and (not labeled or stub_forward.has_stock_loss(model)):
        return False
    wrong = "fused_lm_head" if given.get("fused_lm_head") else "logits_to_keep"
    if given.get(wrong) and (labeled or wrong == "fused_lm_head"):
        raise ValueError(
            f"{wrong}={shown(given[wrong])} is refused: {type(model).__name__} has a forward or a loss_function that "
            f"is not transformers', and it would not be asked; leave {wrong} out"
        )
    return True


def _check_keywords(model: Any, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in (*_BATCH, *_ANSWERED, *_IGNORED) or value is False:
            continue
        remedy = _REMEDIES.get(name, "what it would do over ranks is not known; leave it out")
        raise ValueError(f"{name}={shown(value)} is refused: {remedy}")
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(model.config, name, False) and given.get(name) is not False:
            raise ValueError(f"{name}=True of the configuration is refused: {_REMEDIES[name]}")
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"logits_to_keep={shown(keep)} must be a number of last positions, 0 for none")
    for name in ("logits_to_keep", "fused_lm_head"):
        if given.get(name) and model._burst.form is None:
            raise ValueError(f"{name}={given[name]} is refused: {type(model).__name__} has no logits of tokens")


def _check_rows(model: Any, given: Mapping[str, Any], rows: Rows, items: float | None, keep: int) -> None:
    """Refuse a batch that this model can't be called with."""
    if rows.targets is None and not keep and model._burst.form is not None and stub_forward.has_stock_forward(model):
        raise ValueError(
            "labels are missing: over ranks a model gives its loss, and logits only if logits_to_keep says of how "
            "many last positions; generate with model.generate"
        )
    labels = rows.targets if given.get("labels") is None else given["labels"]
    if labels is not None and not isinstance(labels, torch.Tensor):
        raise TypeError(f"labels is a {type(labels).__name__}; pass a tensor")
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    low, high = (int(x) for x in rows.input_ids.aminmax())
    if known is not None and (low < 0 or high >= known):
        wrong = low if low < 0 else high
        raise ValueError(f"input_ids holds {wrong}, outside of the model's {known} tokens; resize its embeddings")
    if items == 0 and rows.targets is not None and (rows.targets != IGNORED).any():
        raise ValueError("num_items_in_batch=0, but the batch has labels; pass their count, or leave it out")
    if keep and rows.real is not None and not rows.real[:, -keep:].all():
        raise ValueError(f"logits_to_keep={keep} reaches into padding behind a row's tokens; pad in front of them")
    if rows.shifted and model._burst.absolute:
        raise ValueError(
            f"position_ids, or padding in front, put a row's first token at another position than 0, which matters to "
            f"{type(model).__name__}; pad behind the tokens, or pass position_ids that begin with 0"
        )


def _wants_router(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether the loss of a mixture's router is asked for."""
    config = model.config.get_text_config()
    wanted = bool(given.get("output_router_logits", getattr(config, "output_router_logits", False)))
    if wanted and not hasattr(model, "router_aux_loss_coef"):
        raise ValueError(f"output_router_logits=True is refused: {type(model).__name__} adds no loss of a router")
    return wanted


def _fields(model: Any, call: Call) -> dict[str, Any]:
    """What all ranks must be called with alike."""
    given, rows = call.given, call.rows
    labels = given.get("labels") if rows.targets is None else rows.targets
    fields = {
        **batch_fields(call.plan, input_ids=rows.input_ids, labels=labels, attention_mask=rows.real),
        "num_items_in_batch": call.items,
        "fused_lm_head": bool(given.get("fused_lm_head", False)),
        "logits_to_keep": call.keep,
        "output_router_logits": call.router,
        "gradients are wanted": torch.is_grad_enabled(),
        "a forward or a loss of the model's own": call.own,
    }
    if call.plan.world > 1 and not model._burst.compared:
        fields[_WEIGHTS] = _sample(model)
    return fields


@torch.no_grad()
def _sample(model: Any) -> str:
    """A digest of a few numbers of each parameter and buffer that is whole here; sharded ones are left out."""
    every = (*model.parameters(), *model.buffers())
    kinds = (nn.Parameter, torch.Tensor)
    whole = [p for p in every if type(p) in kinds and p.device.type != "meta" and p.numel() and not p.is_complex()]
    few = [p.flatten()[:: max(1, p.numel() // 8)][:8].double().cpu() for p in whole]
    return digest_of(torch.cat(few)) if few else ""
