"""Vision-language models of transformers, over the ranks of a sequence.

Embeddings, vision tower and their merging run whole on each rank. The seam is the language model's forward: it gets
whole hidden states, cuts this rank's tokens, and runs on them. Each rank's backward reaches the vision tower through
its own tokens, so its gradients are shares of a sum, like those of all other parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burst_attention.attention.batch import Plans, digest_of
from burst_attention.attention.plan import Plan

from . import recurrent
from .batch import BatchRows
from .checks import shown
from .stub_forward import body_of
from .token_chunks import subclass

# Arguments of the vision tower, and of the code that merges its results. They stay whole on each rank.
WHOLE = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_attention_mask",
    "image_grid_thw",
    "image_sizes",
    "mm_token_type_ids",
    "second_per_grid_ts",
    "token_type_ids",
    "video_grid_thw",
    "vision_feature_layer",
    "vision_feature_select_strategy",
)
_PLANS = "_burst_whole_plans"
_UNUSED = ("use_cache", "cache_position", "input_ids", "return_dict")


def language_model_of(model: Any) -> Any:
    """Return the language model inside a vision-language model; None for other models."""
    inner = getattr(body_of(model), "language_model", None)
    return inner if isinstance(inner, PreTrainedModel) and inner is not model else None


def text_of(model: Any) -> Any:
    """Return the part that runs on shards: the language model, or the body of a model without vision."""
    inner = language_model_of(model)
    return body_of(model) if inner is None else inner


def convert(model: Any) -> None:
    """Make the language model of a vision-language model cut its tokens. Changes its class in place."""
    inner = language_model_of(model)
    if inner is not None and not isinstance(inner, _Seam):
        kind: Any = type(inner)
        inner.__class__ = subclass(_Seam, kind)


def restore(model: Any) -> None:
    """Undo :func:`convert`."""
    inner = language_model_of(model)
    if isinstance(inner, _Seam):
        inner.__class__ = inner.stock_class


def check_call(given: Mapping[str, Any], rows: BatchRows) -> None:
    """Refuse batches of a vision-language model that would have to be rearranged.

    Raises:
        ValueError: documents are packed, padding is in front, or positions are given.
    """
    if given.get("position_ids") is not None:
        raise ValueError(
            "position_ids are refused: a vision-language model computes them from the whole batch; leave them out"
        )
    if rows.cu_seqlens is not None or (rows.shifted and rows.padding is not None and bool(rows.padding.any())):
        what = "packed documents" if rows.cu_seqlens is not None else "padding in front of the tokens"
        raise ValueError(f"{what}: not supported for vision-language models; pad behind the tokens of each row")
    if rows.input_ids.shape != rows.shape:
        raise ValueError(f"input_ids has {rows.shape[1]} tokens, fewer than there are ranks; use fewer ranks")


def digests(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ranks compare of the arguments that stay whole."""
    return {
        name: digest_of(given[name]) if isinstance(given[name], Tensor) else repr(given[name])
        for name in WHOLE
        if given.get(name) is not None
    }


@contextmanager
def running(model: Any, plans: Plans) -> Iterator[None]:
    """Let the language model cut its tokens inside this context."""
    inner = language_model_of(model)
    setattr(inner, _PLANS, plans)
    try:
        yield
    finally:
        delattr(inner, _PLANS)


class _Seam(nn.Module):
    """A language model that gets the embeddings of the whole sequence and runs on this rank's tokens."""

    stock_class: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plans = vars(self).get(_PLANS)
        if plans is None:
            return super().forward(*args, **kwargs)
        with plans.one.agreement.entering("the model"):
            shard = _cut(plans.one, args, kwargs)
        plans = Plans(plans, positions=shard["position_ids"], rotary=True)
        with recurrent.running(self, plans):
            return super().forward(**shard, plan=plans, use_cache=False)


def _cut(plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's part of the arguments of a language model's forward.

    Raises:
        ValueError: an argument is not among those that are known.
    """
    given = {name: value for name, value in kwargs.items() if value is not None and name not in _UNUSED}
    embeds = given.pop("inputs_embeds", None)
    if args or not isinstance(embeds, Tensor) or embeds.shape[1] != plan.seqlen:
        raise ValueError(f"inputs_embeds={shown(embeds)} of the language model is not the whole sequence's embeddings")
    at = plan.positions.to(embeds.device)
    shard: dict[str, Any] = {"inputs_embeds": embeds.index_select(1, at)}
    positions = given.pop("position_ids", None)  # [B, S], or [3 or 4, B, S] of rotary positions in time and space
    if positions is None:
        positions = torch.arange(plan.seqlen, device=embeds.device)[None]
    shard["position_ids"] = positions.index_select(positions.dim() - 1, at)
    mask = given.pop("attention_mask", None)
    if isinstance(mask, Mapping):  # by kind of layer; the attention compares each with its plan
        shard["attention_mask"] = mask
    visual = given.pop("visual_pos_masks", None)
    if visual is not None:
        seen = visual if visual.dim() == 2 else visual[..., 0]
        numbers = (seen.flatten().cumsum(0) - 1).view(seen.shape)  # of each visual token among all, row by row
        own = seen.index_select(1, at)
        rows = numbers.index_select(1, at)[own]
        shard["visual_pos_masks"] = visual.index_select(1, at)
        deepstack = given.pop("deepstack_visual_embeds", None)
        if deepstack is not None:
            shard["deepstack_visual_embeds"] = [each.index_select(0, rows) for each in deepstack]
    for name, value in given.items():
        if isinstance(value, (Tensor, list, tuple, dict)):
            raise ValueError(f"{name}={shown(value)} of the language model: how to cut it is unknown")
    return shard | given
