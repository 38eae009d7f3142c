"""One call of a parallelized model: read its arguments, agree on it with the other ranks, run the body on shards."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

from burst_attention.attention.batch import SAME_BATCH, Plans, batch_fields, digest_text, shard_tokens
from burst_attention.loss.checks import divisor_of

from . import arguments, heads, settings, stub_forward, tensor_axis, vision
from .batch import IGNORED, BatchRows, rows_of
from .checks import running
from .outputs import Call, wanted_fields
from .reading import structure

Batch = TypeVar("Batch", bound=Mapping[str, Any])
_WEIGHTS = "a sample of the weights"
_PART = "a sample of this rank's parts of the weights"
_GRAD = "gradients are wanted"
_AUTOCAST = "autocast"
_ASKED = ("fused_lm_head", "logits_to_keep", "logits", "output_hidden_states", "output_router_logits")
_SAME_WEIGHTS = (
    "All ranks need equal weights: set one seed before you build the model, load one checkpoint, or broadcast rank 0's "
    "weights"
)
_REMEDIES = {
    **settings.REMEDIES,
    **dict.fromkeys((_WEIGHTS, _PART), _SAME_WEIGHTS),
    _GRAD: "Use torch.no_grad() on all ranks of the group, or on none",
    _AUTOCAST: "Use torch.autocast with one dtype on all ranks of the group, or on none",
    **dict.fromkeys(("num_items_in_batch", *_ASKED), "Pass the same on every rank of the group"),
}


@torch.compiler.disable
def agreed(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Check the arguments, agree on the call with the other ranks, and return it."""
    state = model._burst
    with state.meeting.entering("the model"):
        given = arguments.named(model, args, kwargs)
        arguments.check_keywords(model, given)
        state.check_parts(model)
        structure.check_implementations(model, state.layers)
        own = arguments.runs_its_own(model, given)
        rows = rows_for(model, given)
        items = divisor_of(given.get("num_items_in_batch"), "num_items_in_batch")
        keep = int(given.get("logits_to_keep", 0))
        arguments.check_rows(model, given, rows, items, keep)
        _warn_of_labels(model, rows)
        if vision.language_model_of(model) is not None:
            vision.check_call(given, rows)
        plans = state.plans.get(rows.input_ids.shape[1], rows.cu_seqlens)
        states = arguments.wanted_states(model, given)
        whole = given.pop("logits", None) == "gather"
        call = Call(given, rows, items, keep, whole, states, arguments.wants_router(model, given), own, plans)
        fields, outer, inner = _fields(model, call)
    details = {} if state.settings is None else state.settings.details()
    remedies = {"remedy": SAME_BATCH, "remedies": _REMEDIES}
    state.meeting.agree("the model", fields, outer=outer, inner=inner, details=details, **remedies)
    state.compared = True
    call.shard.update(shard_tokens(rows.input_ids, rows.targets, plans.one, device=rows.device, **rows.others))
    return call


def rows_for(model: Any, given: Mapping[str, Any]) -> BatchRows:
    """Return a batch as rows for a parallelized model's plans."""
    plans = model._burst.plans
    batch = {name: given.get(name) for name in arguments.BATCH if name != "labels" or model._burst.form is not None}
    kinds: dict[str, Any] = {"causal": plans.causal, "join": vision.joins_rows(model) or plans.joins_rows}
    if model._burst.form is not None and stub_forward.has_stock_forward(model) and stub_forward.has_stock_loss(model):
        weight = heads.find_linear(model).weight
        kinds["vocabulary"] = weight.shape[0] if weight.dim() == 2 else None  # FSDP1 flattens what it shards
    return rows_of(batch, ranks=plans.base.world, others=arguments.of_tokens(model, given), **kinds)


def _warn_of_labels(model: Any, rows: BatchRows) -> None:
    """Warn once that no label of a whole batch counts: the loss is then 0, where transformers' is NaN."""
    if rows.unlabeled and not model._burst.warned:
        model._burst.warned = True
        warnings.warn(
            f"no label of this batch of {model.stock_class.__name__} counts (all are {IGNORED}, or were shifted "
            "out), so its loss is 0 and it trains nothing; check the collator",
            stacklevel=2,
        )


def _fields(model: Any, call: Call) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what all ranks compare, those that share a sequence alone, and those of a tensor-parallel axis alone.

    This is the list of what the ranks of a call must have alike, except what :func:`parallelize` has compared once and
    what a layer's attention compares (``shared_fields``). The meeting adds which model it is, and the order of calls.
    """
    given, rows, state, cut = call.given, call.rows, model._burst, tensor_axis.cut_of(model)
    labels = given.get("labels") if rows.targets is None else rows.targets
    tensors = {"input_ids": rows.input_ids, "labels": labels, "attention_mask": rows.real, **rows.others}
    device = model.device.type
    fields = {
        **({} if state.meeting.alone else batch_fields(call.plan, **tensors) | state.settings.fields()),
        **vision.digests(model, given),
        "num_items_in_batch": call.items,
        "fused_lm_head": wanted_fields(given),
        "logits_to_keep": call.keep,
        "logits": "gather" if call.whole else None,
        "output_hidden_states": call.states,
        "output_router_logits": call.router,
        _GRAD: torch.is_grad_enabled(),
        _AUTOCAST: str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None,
        "a forward or a loss of the model's own": call.own,
    }
    outer, inner = {}, {}
    if cut is not None:
        inner["the plan"] = call.plan.schedule.description
    if not (state.meeting.alone or state.compared):
        fields[_WEIGHTS] = digest_text(settings.weights_of(model))
        if cut is not None and call.plan.world > 1:
            outer[_PART] = digest_text(settings.weights_of(model, of=cut.mesh))
    return fields, outer, inner


def run_body(model: Any, call: Call) -> Any:
    """Run the model's body on this rank's shard."""
    positions = call.shard["position_ids"]
    if vision.language_model_of(model) is not None:
        return vision.run(model, call)
    plans = Plans(call.plans, positions=positions)
    asked: dict[str, Any] = {"output_router_logits": True} if call.router else {}
    if call.states is not False:
        asked |= {"output_hidden_states": call.states, "return_dict": True}
    given = "inputs_embeds" if "inputs_embeds" in call.shard else "input_ids"
    asked |= {name: call.shard[name] for name in (given, *arguments.TOKENS) if name in call.shard}
    with running(plans):
        body = vision.text_of(model)
        return stub_forward.run_body(body, position_ids=positions, plan=plans, use_cache=False, **asked)


def ahead(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches; while a step runs, a thread plans for the next batch, whose documents may be new.

    Without it, the model's forward does this first: for packed documents it takes up to half a second.

    Args:
        model: a parallelized model, or a wrapper of one, such as DDP.
        batches: mappings of the model's arguments, such as a DataLoader's.

    Raises:
        TypeError: no part of ``model`` is parallelized.
    """
    spread: Any = next((each for each in model.modules() if "_burst" in vars(each)), None)
    if spread is None:
        raise TypeError(f"model is a {type(model).__name__} without a parallelized part; call hf.parallelize first")
    waiting: list[Batch] = []
    for batch in batches:
        with suppress(TypeError, ValueError):  # the model's forward raises it, on every rank
            named = (*arguments.BATCH, *arguments.TOKENS)
            rows = rows_for(spread, {name: batch[name] for name in named if batch.get(name) is not None})
            spread._burst.plans.ahead(rows.input_ids.shape[1], rows.cu_seqlens)
        if waiting:
            yield waiting.pop()
        waiting.append(batch)
    yield from waiting
