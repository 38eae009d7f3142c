"""One call of a parallelized model: read its arguments, agree on it with the other ranks, run the body on shards."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from burst_attention.attention.batch import SAME_BATCH, batch_fields, digest_text, shard_tokens
from burst_attention.attention.plan import Plan
from burst_attention.loss.checks import divisor_of
from burst_attention.plan.mask import Mask

from .. import settings
from ..reading import forwards, structure
from ..reading.parts import text_of
from ..running import RunningPlans, running
from ..tensor import axis
from . import arguments, heads, stub_forward, vision
from .outputs import Call, wanted_fields
from .rows import IGNORED, BatchRows, rows_of

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
        inputs = arguments.named(model, args, kwargs)
        arguments.check_keywords(model, inputs)
        arguments.check_weights(model)
        state.check_parts(model)
        structure.check_implementations(model, state.layers)
        own = arguments.runs_its_own(model, inputs)
        rows = rows_for(model, inputs)
        items = divisor_of(inputs.get("num_items_in_batch"), "num_items_in_batch")
        keep = int(inputs.get("logits_to_keep", 0))
        arguments.check_labels(model, inputs, rows)
        arguments.check_rows(model, inputs, rows, items, keep)
        _warn_of_labels(model, rows)
        if vision.language_model_of(model) is not None:
            vision.check_call(model, inputs, rows)
        plans = state.plans.get(rows.input_ids.shape[1], rows.cu_seqlens)
        wants = {"states": arguments.wanted_states(model, inputs), "whole": inputs.pop("logits", None) == "gather"}
        wants["router"] = arguments.wants_router(model, inputs)
        call = Call(inputs, rows, plans, items=items, keep=keep, own=own, **wants)
        fields, outer, inner = _fields(model, call)
    details = {} if state.settings is None else state.settings.details()
    remedies = {"remedy": SAME_BATCH, "remedies": _REMEDIES}
    state.meeting.agree("the model", fields, outer=outer, inner=inner, details=details, **remedies)
    state.compared = True
    call.shard.update(shard_tokens(rows.input_ids, rows.targets, plans.one, device=rows.device, **rows.others))
    return call


def rows_for(model: Any, inputs: Mapping[str, Any]) -> BatchRows:
    """Return a batch as rows for a parallelized model's plans."""
    plans = model._burst.plans
    batch = {name: inputs.get(name) for name in arguments.BATCH if name != "labels" or model._burst.form is not None}
    kinds: dict[str, Any] = {"causal": plans.causal, "join": vision.joins_rows(model) or plans.joins_rows}
    if model._burst.form is not None and forwards.has_stock_forward(model) and forwards.has_stock_loss(model):
        weight = heads.find_linear(model).weight
        kinds["vocabulary"] = weight.shape[0] if weight.dim() == 2 else None  # FSDP1 flattens what it shards
    return rows_of(batch, ranks=plans.base.world, others=arguments.of_tokens(model, inputs), **kinds)


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
    inputs, rows, state, cut = call.inputs, call.rows, model._burst, axis.cut_of(model)
    labels = inputs.get("labels") if rows.targets is None else rows.targets
    tensors = {"input_ids": rows.input_ids, "labels": labels, "attention_mask": rows.real, **rows.others}
    device = model.device.type
    fields = {
        **({} if state.meeting.alone else batch_fields(call.plan, **tensors) | state.settings.fields()),
        **vision.digests(model, inputs),
        "num_items_in_batch": call.items,
        "fused_lm_head": wanted_fields(inputs),
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
    if vision.language_model_of(model) is not None:
        return vision.run(model, call)
    options: dict[str, Any] = {"output_router_logits": True} if call.router else {}
    if call.states is not False:
        options |= {"output_hidden_states": call.states, "return_dict": True}
    inputs = _of_body(call)
    with running(inputs["plan"]):
        return stub_forward.run_body(text_of(model), **inputs, **options)


def _of_body(call: Call) -> dict[str, Any]:
    """Return the arguments of a model's body for this rank's shard, with the plans of the call."""
    plans = RunningPlans(call.plans, positions=call.shard["position_ids"])
    ids = "inputs_embeds" if "inputs_embeds" in call.shard else "input_ids"
    tokens = {name: call.shard[name] for name in (ids, "position_ids", *arguments.TOKENS) if name in call.shard}
    return {**tokens, "plan": plans, "use_cache": False}


class Shard(dict[str, Any]):
    """This rank's arguments of a model's body, as :func:`shards` cuts them from a batch.

    Attributes:
        plan: how tokens are dealt over the ranks, for losses and for ``plan.shard`` and ``plan.unshard`` of other
            values of each token. Of layers with windows it has the mask without them.
        labels: int [B, S_local], the label of each token's next token; None if the batch has no labels.
    """

    plan: Plan
    labels: torch.Tensor | None


@contextmanager
def shards(model: nn.Module, batch: Mapping[str, Any], *, mask: Mask | None = None) -> Iterator[Shard]:
    """Cut a batch; inside of this context, the body of a parallelized model runs on this rank's shard.

        with hf.shards(model, batch, mask=Mask(prefix=100)) as shard:
            hidden = model.model(**shard)[0]  # [B, S_local, E]
        loss = hf.next_token_loss(model, hidden, shard.labels, shard.plan)

    For masks that a batch can't describe, and for losses of each rank's own hidden states. Every rank calls it with the
    same batch, and the body in the same order. A backward may run later. A gradient is this rank's share: add up those
    of all ranks, whatever ``gradients`` of ``parallelize`` says.

    Args:
        model: the result of ``parallelize``, not wrapped.
        batch: the whole batch: ``input_ids`` [B, S] or ``inputs_embeds`` [B, S, E]; optionally ``labels`` [B, S], not
            shifted, or ``shift_labels``; ``token_type_ids``; and what describes documents and padding, as for the
            model's call. Rows must have the same documents, and padding must be behind the tokens.
        mask: which keys each query sees, in place of documents and padding of the batch. Layers with a window see that
            much of it; recurrent layers and convolutions keep its documents apart and stay causal. No label crosses a
            document's border.

    Raises:
        DisagreementError: on every rank, if batches or masks differ between ranks.
        TypeError, ValueError: the model is not parallelized or has no body on shards, or an argument is wrong; on every
            rank.
    """
    base: Any = heads.base_of(model)
    state = getattr(base, "_burst", None)
    if state is None:
        raise TypeError(f"model is a {type(model).__name__} that is not parallelized; call hf.parallelize first")
    call = _agreed_on_shards(base, batch, mask)
    inputs = _of_body(call)
    shard = Shard(stub_forward.taken(text_of(base), inputs))
    shard.plan, shard.labels = call.plan, call.shard.get("shift_labels")
    with running(inputs["plan"]):
        yield shard


@torch.compiler.disable
def _agreed_on_shards(model: Any, batch: Any, mask: Mask | None) -> Call:
    """Check the arguments of :func:`shards`, agree on them with the other ranks, and return them as a call."""
    state = model._burst
    with state.meeting.entering("hf.shards"):
        inputs = arguments.by_hand(model, batch, mask)
        arguments.check_weights(model)
        state.check_parts(model)
        structure.check_implementations(model, state.layers)
        rows = rows_for(model, inputs)
        arguments.check_rows(model, inputs, rows, None, 0)
        if rows.input_ids.shape != rows.shape or (rows.padding is not None and bool(rows.padding.any())):
            raise ValueError(
                f"batch of shape {list(rows.shape)} must be rearranged: its rows have other documents, padding in "
                "front, or fewer tokens than ranks; make rows alike and pad behind the tokens, or call the model itself"
            )
        plans = state.plans.get(rows.shape[1], rows.cu_seqlens, mask)
        if mask is not None and inputs.get("labels") is not None and inputs.get("shift_labels") is None:
            rows = replace(rows, targets=plans.one.shift_labels(inputs["labels"].cpu(), ignore_index=IGNORED))
        call = Call(inputs, rows, plans)
        fields, _, _ = _fields(model, call)
    details = {} if state.settings is None else state.settings.details()
    state.meeting.agree("hf.shards", fields, details=details, remedy=SAME_BATCH, remedies=_REMEDIES)
    state.compared = True
    call.shard.update(shard_tokens(rows.input_ids, rows.targets, plans.one, device=rows.device, **rows.others))
    if "shift_labels" in call.shard:
        call.shard["shift_labels"] = call.shard["shift_labels"].to(rows.device, non_blocking=True)
    return call


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
