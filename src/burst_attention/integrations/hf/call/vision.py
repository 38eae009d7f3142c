"""Vision-language models of transformers, over the ranks of a sequence.

Embeddings, vision tower and their merging run whole on each rank. The seam is the language model's forward: it gets
whole hidden states, cuts this rank's tokens, and runs on them. Each rank's backward reaches the vision tower through
its own tokens, so its gradients are shares of a sum, like those of all other parameters. Where the tokens of an image
see each other both ways, the model makes its masks from the whole batch; they become masks of the plans.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from burst_attention.attention.batch import PADDING, Chunked, Plans, Reach, digest_of
from burst_attention.attention.plan import Plan

from ..classes import become, stock_class
from ..layers.checks import MaskRequest, shown
from ..reading import Kind, read
from ..reading.known import CACHES
from ..reading.parts import around_language, language_model_of
from ..running import RunningPlans, running
from .outputs import Call
from .rows import BatchRows
from .stub_forward import Output, StandIn, tensors_of, twin_of

_BOTH_WAYS = {"create_masks_for_vision_model", "block_sequence_ids"}  # in the code of a forward
_OWN_POSITIONS = ("get_rope_index", "compute_3d_position_ids")  # methods of models that compute their positions
_CALL = "_burst_call"
_UNUSED = ("use_cache", "cache_position", "input_ids", "return_dict", "logits_to_keep")
# Arguments of a model's body that are not the vision tower's.
_OF_TEXT = {"self", "labels", "attention_mask", "position_ids", "inputs_embeds", *CACHES, *_UNUSED}
_OF_TEXT |= {"output_attentions", "output_hidden_states", "output_router_logits"}
_PER_TOKEN = ("per_layer_inputs", "moe_mm_token_type_ids", "ple_input_ids")  # [B, S, ...] of a language model
# Where the image tokens are, [B, S] or [B, S, E], and rows to be added there, [image tokens, E] of each layer.
_ADDED = {"visual_pos_masks": "deepstack_visual_embeds", "vision_mask": "deepstack_features"}


def whole_arguments(model: Any) -> frozenset[str]:
    """Return the names of arguments that stay whole: those of the vision tower, and of what merges its results."""
    around, _ = around_language(model)
    if around is None:
        return frozenset()
    named = inspect.signature(stock_class(around).forward).parameters
    return frozenset(name for name, each in named.items() if each.kind is not each.VAR_KEYWORD) - _OF_TEXT


def convert(model: Any) -> None:
    """Make the language model of a vision-language model cut its tokens. Changes its class in place."""
    inner = language_model_of(model)
    if inner is not None:
        become(inner, Seam)


def joins_rows(model: Any) -> bool:
    """Return whether rows of a batch may need different masks, so that they have to be one row of documents."""
    around, _ = around_language(model)
    if around is None:
        return False
    code = inspect.unwrap(stock_class(around).forward).__code__
    tuples = [each for each in code.co_consts if isinstance(each, tuple)]
    return any(not _BOTH_WAYS.isdisjoint(words) for words in (code.co_names, code.co_consts, *tuples))


def check_call(model: Any, inputs: Mapping[str, Any], rows: BatchRows) -> None:
    """Refuse batches of a vision-language model that would have to be rearranged, and positions that it can't take."""
    given = inputs.get("position_ids") is not None
    if given and (why := _reason_against_positions(model)):
        raise ValueError(f"position_ids are refused: {type(model).__name__} {why}; leave them out")
    packed = rows.cu_seqlens is not None and not (rows.joined or given)
    if packed or (rows.shifted and rows.padding is not None and bool(rows.padding.any())):
        what = "packed documents" if packed else "padding in front of the tokens"
        remedy = "pass position_ids that restart at 0" if packed else "pad behind the tokens of each row"
        raise ValueError(f"{what}: not supported for vision-language models; {remedy}")
    if rows.input_ids.numel() != rows.shape[0] * rows.shape[1]:
        raise ValueError(f"input_ids has {rows.shape[1]} tokens, fewer than there are ranks; use fewer ranks")


def _reason_against_positions(model: Any) -> str | None:
    """Return why a vision-language model does not take positions, and so documents, of a batch; None if it does."""
    around, _ = around_language(model)
    if any(hasattr(around, name) for name in _OWN_POSITIONS):
        return "computes its own, in time and space"
    if joins_rows(model):
        return "makes masks from the images of a row"
    if read(language_model_of(model)).of(Kind.MIXER):
        return "has recurrent layers, which pass their state on to the next document in transformers"
    return None


def digests(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ranks compare of the arguments that stay whole."""
    names = sorted(whole_arguments(model) | {"position_ids"}) if language_model_of(model) is not None else ()
    whole = {name: inputs[name] for name in names if inputs.get(name) is not None}
    return {name: [digest_of(x) for x in tensors_of(value)] or repr(value) for name, value in whole.items()}


def run(model: Any, call: Call) -> Any:
    """Run the body of a vision-language model; its language model runs on this rank's shard."""
    around, name = around_language(model)
    inner, inputs = language_model_of(model), call.inputs
    whole = {each: inputs[each] for each in whole_arguments(model) if each in inputs}
    batch = {"input_ids": inputs["input_ids"], "attention_mask": inputs.get("attention_mask"), "use_cache": False}
    batch |= {"position_ids": inputs["position_ids"]} if "position_ids" in inputs else {}
    setattr(inner, _CALL, call)
    try:
        if around is not model:
            return around(**batch, **whole, **({"output_router_logits": True} if call.router else {}))
        twin = twin_of(model, {name: StandIn(getattr(model, name), lambda **inputs: Output(inner(**inputs)[0]))})
        return Output(twin.forward(**batch, **whole).logits)
    finally:
        delattr(inner, _CALL)


class Seam(nn.Module):
    """A language model that gets the embeddings of the whole sequence and runs on this rank's tokens."""

    stock_class: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = vars(self).get(_CALL)
        if call is None:
            return super().forward(*args, **kwargs)
        with call.plan.agreement.entering("burst_attention", once=True):
            inputs = _whole(call, args, kwargs)
            plans, mask = with_groups(call.plans, inputs.pop("attention_mask", None), call.rows)
            shard = _cut(call.plan, inputs)
        with running(plans):
            return super().forward(**shard, attention_mask=mask, plan=plans, use_cache=False)


def _whole(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a language model's forward, their rows joined as the plan's are."""
    inputs = {name: value for name, value in kwargs.items() if value is not None and name not in _UNUSED}
    embeds, (batch, length) = inputs.get("inputs_embeds"), call.rows.shape
    if args or not isinstance(embeds, Tensor) or embeds.shape[:2] != (batch, length):
        raise ValueError(f"inputs_embeds={shown(embeds)} of the language model is not the whole batch's embeddings")
    # [1 or B, S], or [3 or 4, B, S] of rotary positions in time and space.
    positions = inputs.setdefault("position_ids", torch.arange(length, device=embeds.device)[None])
    given = call.inputs.get("position_ids")
    if given is not None and positions is not given and not torch.equal(positions, given):
        raise ValueError("position_ids do not reach the language model as they were given; leave them out")
    if len(call.rows.input_ids) < batch:
        inputs["position_ids"] = positions.expand(*positions.shape[:-2], batch, length).flatten(-2).unsqueeze(-2)
        for name in inputs.keys() & {"inputs_embeds", *_PER_TOKEN, *_ADDED}:
            inputs[name] = inputs[name].flatten(0, 1)[None]
    return inputs


def _cut(plan: Plan, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of the arguments of a language model's forward."""
    at = torch.from_numpy(plan.schedule.layout.places(plan.rank)).to(inputs["inputs_embeds"].device, non_blocking=True)
    names = [name for name in ("inputs_embeds", *_PER_TOKEN) if name in inputs]
    shard = {name: inputs.pop(name).index_select(1, at) for name in names}
    positions = inputs.pop("position_ids")
    shard["position_ids"] = positions.index_select(positions.dim() - 1, at.to(positions.device))
    for name, added in _ADDED.items():
        if name in inputs:
            where = inputs.pop(name)
            shard[name] = where.index_select(1, at)
            if added in inputs:
                shard[added] = _own_rows(inputs.pop(added), where, at)
    for name, value in inputs.items():
        if isinstance(value, (Tensor, list, tuple, dict)):
            raise ValueError(f"{name}={shown(value)} of the language model: how to cut it is unknown")
    return shard | inputs


def _own_rows(added: Any, where: Tensor, at: Tensor) -> Any:
    """Return each layer's additions to this rank's image tokens; ``added`` has those of all rows, row by row."""
    seen = where if where.dim() == 2 else where[..., 0]
    numbers = (seen.flatten().cumsum(0) - 1).view(seen.shape)
    rows = numbers.index_select(1, at)[seen.index_select(1, at)]
    if isinstance(added, Mapping):
        return {layer: each.index_select(0, rows) for layer, each in added.items()}
    return [each.index_select(0, rows) for each in added]


def with_groups(plans: Plans, mask: Any, rows: BatchRows) -> tuple[RunningPlans, Any]:
    """Return the plans with the groups of tokens that ``attention_mask`` asks for, and that mask without them."""
    requests = mask if isinstance(mask, Mapping) else {"": mask}
    requests = {kind: each for kind, each in requests.items() if isinstance(each, MaskRequest)}
    for kind, each in requests.items():  # padding is behind the tokens, where no token sees it
        requests[kind] = replace(each, foreign=tuple(part for part in each.foreign if part != PADDING))
    groups: dict[Reach, torch.Tensor | None] = {}
    for each in requests.values():
        reach = each.window if each.chunk is None else Chunked(each.chunk)
        together = None if each.together is None else _numbers(each.together, rows)
        group = groups.setdefault(reach, together)
        if group is not together and (group is None or together is None or not torch.equal(group, together)):
            raise ValueError(f"attention_mask: layers of one window {reach} ask for different groups; use one rank")
    made: dict[Reach, Plan] = dict(plans)
    for reach, together in groups.items():
        if together is not None and reach in made:
            made[reach] = made[reach].with_mask(replace(made[reach].mask, together=together))
    for kind, each in requests.items():  # groups must not see each other farther than the window, unless it covers them
        if each.together is not None and each.window is not None and each.beyond:
            longest = made[each.window].mask.together.reach
            if longest > each.window:
                raise ValueError(
                    f"attention_mask: {kind or 'a layer'} asks for {longest} tokens that see each other, beyond its "
                    f"sliding_window={each.window}; use a model with a larger window"
                )
    masked = RunningPlans(made, positions=None, masked=any(each is not None for each in groups.values()))
    if not isinstance(mask, Mapping):
        return masked, None
    return masked, {**mask, **{kind: replace(each, together=None) for kind, each in requests.items()}}


def _numbers(together: torch.Tensor, rows: BatchRows) -> torch.Tensor:
    """Return each token's group as one row on the CPU; -1 for padding. Joined rows have different numbers."""
    groups = together.cpu()
    if rows.real is not None:
        groups = torch.where(rows.real.cpu(), groups, -1)
    if not rows.joined:
        if not (groups == groups[:1]).all():
            raise ValueError("attention_mask: rows of a batch ask for different groups of tokens; pass one row each")
        return groups[0]
    first = torch.arange(len(groups))[:, None] * (groups.max() + 1)  # models number the groups of each row from 0
    return torch.where(groups < 0, groups, groups + first).flatten()
