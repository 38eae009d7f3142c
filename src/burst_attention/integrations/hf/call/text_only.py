"""Text alone through a vision-language model: whether its language model gets just embeddings and plain positions.

A cache over ranks calls the language model itself. That is exact if the model around it does nothing else with text.
A call of that code without weights shows it, on every token of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from burst_attention.attention.batch import Chunked

from ..layers.checks import MaskRequest, mask_request, shown
from ..layers.dealt import ON_ONE_RANK
from ..reading.attached import called, hooks_of
from ..reading.configs import layer_windows
from ..reading.forwards import body_name
from ..reading.parts import around_language, language_model_of
from .stub_forward import StandIn, twin_of
from .vision import whole_arguments

_PLACEHOLDER = re.compile(r"(image|img_context|video|audio|media_placeholder)_token_(id|index)")
_TYPES = "token_type_ids"
_FEATURES = "mm_encoder_outputs"  # generate passes an empty one
_OFFSETS = "rope_deltas"
_TAKEN = ("inputs_embeds", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep")


def check_arguments(model: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a vision-language model without types of text tokens; refuse those of images."""
    whole, kept = whole_arguments(model), dict(values)
    for name in sorted(whole & values.keys()):
        value = kept.pop(name)
        types = name.endswith(_TYPES) and isinstance(value, Tensor) and not bool(value.any())
        if value is not None and not (name == _FEATURES and value == {}) and not types:
            raise ValueError(f"{name}={shown(value)}: images in the prompt have no cache over ranks; {ON_ONE_RANK}")
    return kept


def check_ids(model: Any, ids: Tensor) -> None:
    """Refuse a prompt [B, n] with tokens that stand for images."""
    for name, token in vars(model.config).items():
        if _PLACEHOLDER.fullmatch(name) and isinstance(token, int) and bool((ids == token).any()):
            raise ValueError(
                f"input_ids holds {token}, the configuration's {name}: images in the prompt have no cache over ranks; "
                f"leave it out, or {ON_ONE_RANK}"
            )


@contextmanager
def positions_of_text(model: Any) -> Iterator[None]:
    """Let ``generate`` count positions of text alone; afterwards the model has again what its last call left in it.

    Models with axes of positions keep how far those of the last call differ from its columns (5.24). They add it to the
    positions of any later turn, also of another conversation.
    """
    around = around_language(model)[0]
    kept = {name: value for name, value in vars(around).items() if name == _OFFSETS}
    for name in kept:
        setattr(around, name, None)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(around, name, value)


def axes_of_positions(model: Any) -> int | None:
    """Return how many axes of equal positions the language model gets with text; None for positions [B, n].

    Exchanges nothing, and computes with no weight.

    Raises:
        ValueError: the model does more with text than to embed it, or something is attached to it.
    """
    kind, (around, name) = type(model).__name__, around_language(model)
    if around is model or getattr(around, name) is not language_model_of(model):
        raise ValueError(f"{kind} is a vision-language model around one with a head, which has no cache over ranks")
    _check_attached(model, around)
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None) or language_model_of(model).config.vocab_size
    ids = torch.arange(rows, device=model.device)[None]  # an adapter names no rows
    names = whole_arguments(model)
    types: dict[str, Any] = {each: torch.zeros_like(ids) for each in names if each.endswith(_TYPES)}
    types |= {each: {} for each in names & {_FEATURES}}
    axes: set[int | None] = set()
    for given in ({}, types):
        try:
            axes.add(_axes(model, around, name, ids, given))
        except Exception as error:
            why = str(error) if isinstance(error, _OtherError) else f"raises {type(error).__name__}: {error}"
            raise ValueError(
                f"{kind} is a vision-language model that has no cache over ranks: with text alone it {why}; "
                f"{ON_ONE_RANK}"
            ) from error
    if len(axes) > 1:
        raise ValueError(
            f"{kind} has other positions with {sorted(types)}, which has no cache over ranks; {ON_ONE_RANK}"
        )
    return axes.pop()


def _check_attached(model: Any, around: Any) -> None:
    """Refuse what is attached to the modules around the language model, which a cache does not call."""
    for name, part in model.named_modules():
        holds = part is not model and any(each is around for each in part.modules())
        hook = next(iter(hooks_of(part)), vars(part).get("forward")) if holds else None
        if hook is not None:
            raise ValueError(
                f"{name} ({type(part).__name__}) has the hook or forward {called(hook)}, which a cache over ranks "
                f"would leave out; remove it, or {ON_ONE_RANK}"
            )


class _OtherError(Exception):
    """What a model does with text beside embedding it."""


def _axes(model: Any, around: Any, name: str, ids: Tensor, given: Mapping[str, Any]) -> int | None:
    """Run the code around the language model on each token of the vocabulary; check what that gets."""
    hidden, calls, outs = torch.ones(*ids.shape, 1, device=ids.device), list[Any](), list[Any]()

    def embed(tokens: Tensor) -> Tensor:
        return tokens[..., None] + 0.5

    def inner(*args: Any, **kwargs: Any) -> Any:
        calls.append(
            (args, {each: value for each, value in kwargs.items() if value is not None and value is not False})
        )
        return MoeModelOutputWithPast(last_hidden_state=hidden)

    def body(*args: Any, **kwargs: Any) -> Any:
        outs.append(twin.forward(*args, **kwargs))
        return outs[-1]

    table = StandIn(model.get_input_embeddings(), embed)
    embedding = {"get_input_embeddings": lambda: table}
    language = StandIn(getattr(around, name), inner)
    vars(language).update(embedding, embed_tokens=table)
    twin = twin_of(around, {name: language, **embedding})
    head = next(each for each, child in model.named_children() if child is model.get_output_embeddings())
    parts = {body_name(model): StandIn(around, body), head: StandIn(getattr(model, head), lambda features: features)}
    outer, mask = twin_of(model, parts | embedding), torch.ones_like(ids)
    positions = outer._prepare_position_ids_for_generation(ids, {"input_ids": ids, "attention_mask": mask, **given})
    outer.forward(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **given)
    if len(calls) != 1 or len(outs) != 1 or calls[0][0] or outs[0][0] is not hidden:
        raise _OtherError("does more than to run its language model once")
    got = calls[0][1]
    if not _equal(got.get("inputs_embeds"), embed(ids)):
        raise _OtherError("changes embeddings")
    places = got.get("position_ids")
    if not isinstance(places, Tensor) or places.dim() not in (2, 3) or not bool((places == ids).all()):
        raise _OtherError(f"passes position_ids={shown(places)}")
    _check_masks(model, got.get("attention_mask"), mask)
    other = [each for each in got if each not in _TAKEN]
    if other:
        raise _OtherError(f"passes {other[0]}={shown(got[other[0]])}")
    return len(places) if places.dim() == 3 else None


def _equal(got: Any, right: Tensor) -> bool:
    return isinstance(got, Tensor) and got.dtype == right.dtype and torch.equal(got, right)


def _check_masks(model: Any, masks: Any, given: Tensor) -> None:
    """Refuse other masks than those that the language model makes itself of the mask ``given``."""
    if isinstance(masks, Tensor) and _equal(masks, given):
        return
    text = language_model_of(model).config
    reaches = layer_windows(text)
    every = dict(zip(getattr(text, "layer_types", None) or (), reaches, strict=False))
    if not isinstance(masks, Mapping):
        every, masks = dict.fromkeys((None,)), {None: masks}
        if any(reach is not None for reach in reaches):
            raise _OtherError("passes one mask to layers with windows")
    for kind, reach in every.items():
        mask = masks.get(kind)
        if isinstance(mask, MaskRequest) and mask.together is not None and not bool((mask.together >= 0).any()):
            mask = replace(mask, together=None)
        request = mask_request(mask)
        asked = None if request is None else request.window if request.chunk is None else Chunked(request.chunk)
        if asked != reach or (request is not None and not request.causal):
            raise _OtherError(f"masks its {kind} layers by {shown(mask)}")
