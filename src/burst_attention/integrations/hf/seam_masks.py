"""Masks of vision-language models in which the tokens of an image see each other both ways.

Such a model makes its masks from the whole batch, before its language model runs. They become masks of the plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import CodeType
from typing import Any

import torch

from burst_attention.attention.batch import PADDING, Chunked, Plans, Reach

from .batch import BatchRows
from .checks import MaskRequest

_BOTH_WAYS = {"create_masks_for_vision_model", "block_sequence_ids"}


def sees_both_ways(module: Any) -> bool:
    """Return whether the code of a module's forward may ask for groups of tokens that see each other both ways."""
    forward = getattr(module, "stock_class", type(module)).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return not _BOTH_WAYS.isdisjoint(_words(forward.__code__))


def _words(code: CodeType) -> Iterator[str]:
    """Yield the names and the strings in a function's code."""
    yield from code.co_names
    for constant in code.co_consts:
        yield from [constant] if isinstance(constant, str) else constant if isinstance(constant, tuple) else ()


def with_groups(plans: Plans, mask: Any, rows: BatchRows) -> tuple[Plans, Any]:
    """Return the plans with the groups of tokens that the model's masks ask for, and masks without them.

    Args:
        plans: the plans of the call.
        mask: what the language model got as ``attention_mask``: requests by kind of layer, one request, or anything.
        rows: the batch.

    Raises:
        ValueError: a mask can't be expressed.
    """
    asked = mask if isinstance(mask, Mapping) else {"": mask}
    asked = {kind: _without_padding(each) for kind, each in asked.items() if isinstance(each, MaskRequest)}
    groups: dict[Reach, torch.Tensor | None] = {}
    for kind, each in asked.items():
        reach = each.window if each.chunk is None else Chunked(each.chunk)
        together = None if each.together is None else _numbers(each.together, rows)
        known = groups.setdefault(reach, together)
        if known is not together and (known is None or together is None or not torch.equal(known, together)):
            raise ValueError(
                f"attention_mask: layers with the same window {reach} ask for different groups of tokens, one of them "
                f"{kind}; this is not supported"
            )
    made = {reach: _with_group(reach, each, groups.get(reach)) for reach, each in plans.items()}
    for kind, each in asked.items():
        _check_reach(kind, each, made)
    masked = Plans(made, masked=any(each is not None for each in groups.values()))
    if not isinstance(mask, Mapping):
        return masked, None
    return masked, {**mask, **{kind: replace(each, together=None) for kind, each in asked.items()}}


def _with_group(reach: Reach, plan: Any, together: torch.Tensor | None) -> Any:
    if together is None:
        return plan
    return plan.with_mask(replace(plan.mask, together=together))


def _without_padding(request: MaskRequest) -> MaskRequest:
    """Leave out the padding, which is behind the tokens, where no token sees it."""
    return replace(request, foreign=tuple(each for each in request.foreign if each != PADDING))


def _numbers(together: torch.Tensor, rows: BatchRows) -> torch.Tensor:
    """Return each token's group as one row on the CPU; -1 for padding. Joined rows have different numbers.

    Raises:
        ValueError: rows that share a mask have different groups.
    """
    groups = together.cpu()
    if rows.real is not None:
        groups = torch.where(rows.real.cpu(), groups, -1)
    if not rows.joined and not (groups == groups[:1]).all():
        raise ValueError(
            "attention_mask: rows of the batch ask for different groups of tokens, which is not supported for this "
            "model; pass one row in each batch"
        )
    if not rows.joined:
        return groups[0]
    first = torch.arange(len(groups))[:, None] * (groups.max() + 1)  # models number the groups of each row from 0
    return torch.where(groups < 0, groups, groups + first).flatten()


def _check_reach(kind: str, request: MaskRequest, plans: Mapping[Reach, Any]) -> None:
    """Refuse groups that see each other farther than the window, unless the window covers them."""
    if request.together is None or request.window is None or not request.beyond:
        return
    longest = plans[request.window].mask.together.reach
    if longest > request.window:
        raise ValueError(
            f"attention_mask: {kind or 'a layer'} asks for {longest} tokens that see each other, beyond its "
            f"sliding_window={request.window}; use a model with a larger window"
        )
