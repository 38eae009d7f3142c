"""Plans that a caller passes to a model by keyword, ``model(..., plan=plan)``: the checks that ``parallelize`` makes.

:func:`.call.shards` replaces them. This spelling and :func:`shard_batch` leave with the next release; then this file
serves ``compat.ring_flash_attn`` alone, whose models nobody parallelizes.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from burst_attention.attention import batch as batches
from burst_attention.attention.batch import PlanArgument
from burst_attention.attention.plan import Plan

from ..reading import attached, configs, read, structure
from . import converted

_LEAVES = (
    "plan= of a model's call and hf.shard_batch leave with the next release; call hf.parallelize(model, plan=plan) "
    "once, then the model's body inside of `with hf.shards(model, batch, mask=plan.mask) as shard:`"
)


def shard_batch(batch: Mapping[str, Any], plan: PlanArgument, *, ignore_index: int = -100) -> dict[str, torch.Tensor]:
    """Return this rank's shard of a global batch. Deprecated: :func:`.call.shards` also checks the model.

    Every rank must call this with the same batch. The ranks compare digests of it.

    Args:
        batch: ``input_ids`` [B, S]; optionally ``labels`` [B, S], *not* shifted; optionally ``attention_mask``
            [B, S] of ones only.
        plan: as for ``model(..., plan=plan)``.
        ignore_index: the label of a token without a target.

    Returns:
        ``input_ids`` and ``position_ids`` (restarting at each document) [B, S_local]. With labels also
        ``shift_labels`` [B, S_local], shifted over the whole sequence before sharding, as the loss needs them.

    Raises:
        DisagreementError: on every rank, if batches or documents differ between ranks.
        TypeError, ValueError: on every rank, for a bad key (named) or a sequence with fewer tokens than ranks.
    """
    warnings.warn(_LEAVES, FutureWarning, stacklevel=2)
    return batches.shard_batch(batch, plan, ignore_index=ignore_index)


class ByHand:
    """Checks of the layers of models that are not parallelized."""

    def __init__(self, names: Sequence[str], *, warns: bool) -> None:
        self._names, self._warns = names, warns
        self._right: tuple[weakref.ref, int | None, list[weakref.ref]] | None = None
        # Of each model that was checked: whether it was in training mode, and its layers' configurations.
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, tuple[bool, list[Any]]] = weakref.WeakKeyDictionary()

    def check(self, module: torch.nn.Module, query: torch.Tensor, position_ids: Any, plan: Plan) -> None:
        """Refuse a model that can't run on shards, and positions other than the plan's."""
        configs.check_rope(getattr(module, "config", None))
        self._check_model(module, plan)
        self._check_positions(position_ids, query, plan)

    @torch.compiler.disable
    def _check_model(self, module: torch.nn.Module, plan: Plan) -> None:
        """Refuse the model that calls this layer if it can't run on shards. One rank may run any model."""
        if plan.world == 1:
            return
        configs.check_layers(getattr(module, "config", None))
        model = _running_model()
        if model is None:  # a checkpointed layer is recomputed: its configuration alone can be checked
            return
        known = self._models.get(model)
        if known is None and self._warns:
            warnings.warn(_LEAVES, FutureWarning, stacklevel=2)
        if known is None or known[0] != model.training:
            reading = read(model)
            structure.check_structure(reading)
            converted.check_converted(reading)
            attached.check_hooks(reading)
            attached.check_random(reading)
            known = self._models[model] = model.training, structure.attention_configs(reading)
        structure.check_implementations(model, known[1], self._names)

    def _check_positions(self, position_ids: Any, query: torch.Tensor, plan: Plan) -> None:
        remedy = "pass position_ids=plan.document_positions, one row for each sequence of the batch"
        if not isinstance(position_ids, torch.Tensor):
            raise ValueError(f"position_ids={position_ids!r} did not reach the attention; {remedy}")
        # An inference tensor has no version counter that shows writes, so it is compared in every layer.
        version = None if position_ids.is_inference() else position_ids._version
        known = self._right
        if known is None or known[0]() is not position_ids or known[1] != version:
            known = (weakref.ref(position_ids), version, [])
        elif any(right() is plan for right in known[2]):
            return
        if position_ids.dim() != 2 or position_ids.shape[0] not in (1, query.shape[0]):
            raise ValueError(f"position_ids has shape {list(position_ids.shape)}; {remedy}")
        # Rotary angles depend only on differences within a document, so restarting and global positions both work.
        right = (x.to(position_ids.device, non_blocking=True) for x in (plan.document_positions, plan.positions))
        if not any(position_ids.shape[1] == len(row) and bool((position_ids == row).all()) for row in right):
            where = f"the plan's tokens on rank {plan.rank}"
            raise ValueError(f"position_ids differ from the positions of {where}; {remedy}")
        if version is not None:
            self._right = (*known[:2], [*known[2], weakref.ref(plan)])


@torch.compiler.disable
def mark_attended(plans: PlanArgument, position_ids: Any) -> None:
    """Record in the plans of a call that an attention used them."""
    for each in batches.Plans.of(plans).values():
        each.usage.note(position_ids)


def check_running() -> None:
    """Refuse the running model if a layer of it has another attention, which would ignore its plan."""
    model = _running_model()
    if model is not None and not hasattr(model, "_burst"):
        structure.check_attention_is_ours(read(model))


@torch.compiler.disable
def _running_model() -> PreTrainedModel | None:
    """Return the outermost transformers model on this thread's call stack, or None: layers have no reference to it."""
    methods, frame = [], inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            methods.append(frame)
        frame = frame.f_back
    owners = (frame.f_locals.get("self") for frame in reversed(methods))  # f_locals copies a frame, so read few of them
    return next((owner for owner in owners if isinstance(owner, PreTrainedModel)), None)
