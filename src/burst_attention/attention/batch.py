"""A whole batch in, this rank's shard out; and the plans of one call, by the window of the layers that take them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..plan.mask import Mask
from .plan import Plan

PlanArgument: TypeAlias = Plan | Mapping[int | None, Plan]  # one for all layers, or by a layer's sliding window

PADDING = "a padding mask (zeros in attention_mask)"
SAME_BATCH = (
    "Every rank of a group must hold the same whole batch: give their samplers one seed, and their loader one share of "
    "the data for the group, not one for each rank"
)


class Plans(Mapping[int | None, Plan]):
    """The plans of one call, by the window of the layers that take them.

    Args:
        by_window: at least one; they speak for the same ranks and differ in their masks' windows alone.
        positions: the position ids that the caller passes with them, if it has checked the model and cut them itself:
            an attention that is given this very tensor need not compare it, nor look for the model. A compiler can
            trace that, and no comparison.
    """

    def __init__(self, by_window: Mapping[int | None, Plan], *, positions: torch.Tensor | None = None) -> None:
        self._by_window = dict(by_window)
        self.positions = positions

    @classmethod
    def of(cls, plan: Any) -> Plans:
        """What a caller passes as ``plan``: one for all layers, or a mapping.

        Raises:
            TypeError, ValueError: it is neither; there is no plan yet to refuse it through.
        """
        if isinstance(plan, Plans):
            return plan
        if plan is None:
            raise ValueError(
                "plan is missing: call model(..., plan=plan), with plan = make_plan(seqlen, ...). "
                "A model that does not hand keywords on to its attention can't be used"
            )
        plans = plan if isinstance(plan, Mapping) else {None: plan}
        if not plans or not all(isinstance(each, Plan) for each in plans.values()):
            raise TypeError(
                f"plan={plan!r} must be a Plan, or a mapping such as {{None: full_plan, 4096: windowed_plan}}"
            )
        return cls(plans)

    @classmethod
    def by_windows(cls, plan: Plan, windows: Iterable[int | None], cu_seqlens: Sequence[int] | None) -> Plans:
        """``plan`` under each of the windows and these documents; nothing is exchanged.

        A layout that goes by the mask is cut anew, for the layers that see furthest, and is one for all of them.
        """
        distinct = dict.fromkeys(windows)
        if plan.schedule.layout.by_mask:
            furthest = None if None in distinct else max(filter(None, distinct))
            plan = plan.with_mask(Mask(window=furthest, cu_seqlens=cu_seqlens), seqlen=plan.seqlen)
        return cls({window: plan.with_mask(Mask(window=window, cu_seqlens=cu_seqlens)) for window in distinct})

    @property
    def one(self) -> Plan:
        """Any of them: to shard with, to refuse through."""
        return next(iter(self._by_window.values()))

    def __getitem__(self, window: int | None) -> Plan:
        return self._by_window[window]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._by_window)

    def __len__(self) -> int:
        return len(self._by_window)


def shard_batch(batch: Mapping[str, Any], plan: PlanArgument, *, ignore_index: int = -100) -> dict[str, torch.Tensor]:
    """This rank's shard of a global batch. Every rank must call it with the same batch: digests of it are compared.

    Args:
        batch: ``input_ids`` [B, S]; optionally ``labels`` [B, S], *not* shifted; optionally ``attention_mask``
            [B, S] of ones only. It is left out of the result: it says nothing, and documents and windows are the
            plan's. Any other key is refused, for nothing here knows how to shard it.
        plan: as for ``model(..., plan=plan)``.
        ignore_index: the label of a token without a target.

    Returns:
        ``input_ids`` and ``position_ids`` (restarting at each document) [B, S_local] and, when there are labels,
        ``shift_labels`` [B, S_local], shifted over the whole sequence before sharding, as the loss wants
        them. (``model(labels=...)`` would shift them within the shard, and lose a token at every border.)

    Raises:
        DisagreementError: on every rank, if their batches, or their documents, differ.
        TypeError, ValueError: naming the key, or a sequence with fewer tokens than ranks; on every rank.
    """
    one = Plans.of(plan).one
    with one.agreement.entering("shard_batch"):
        check_tokens(one)
        _check_batch(batch, one)
        ids, labels = batch["input_ids"], batch.get("labels")
        targets = None if labels is None else one.shift_labels(labels, ignore_index=ignore_index)
        fields = batch_fields(one, input_ids=ids, labels=targets)
    one.agreement.agree("shard_batch", fields, remedy=SAME_BATCH)
    return cut(ids, targets, one)


def cut(ids: torch.Tensor, targets: torch.Tensor | None, plan: Plan) -> dict[str, torch.Tensor]:
    """What :func:`shard_batch` returns, of ids and shifted labels [B, S] that all ranks have alike."""
    positions = plan.document_positions.to(ids.device)
    shard = {"input_ids": plan.shard(ids, 1), "position_ids": positions.repeat(ids.shape[0], 1)}
    if targets is not None:
        shard["shift_labels"] = plan.shard(targets, 1)
    plan.usage.give_out(shard["position_ids"], shard.get("shift_labels"))
    return shard


def batch_fields(plan: Plan, **tensors: torch.Tensor | None) -> dict[str, Any]:
    """What ranks compare before they compute on one batch: its documents, and a digest of each tensor."""
    if plan.world == 1:
        return {}
    digests = {f"the digest of {name}": None if x is None else digest_of(x) for name, x in tensors.items()}
    return {"documents": plan.schedule.description["mask"], **digests}


def digest_of(x: torch.Tensor) -> str:
    """Of integers by their values, whatever their dtype and device; of other numbers as they are."""
    values = x.detach().cpu()
    values = values if values.is_floating_point() else values.long()
    number = hashlib.blake2b(values.contiguous().view(torch.uint8).numpy().data, digest_size=8).hexdigest()
    return f"{number} {list(x.shape)}"


def check_tokens(plan: Plan) -> None:
    """Refuse a plan by which some rank has no token: models of transformers can't run on an empty shard."""
    if plan.seqlen < plan.world:
        raise ValueError(
            f"the sequence has {plan.seqlen} tokens for {plan.world} ranks, so some rank would have none, and models "
            f"can't run on nothing; use at most {plan.seqlen} ranks, or pack short documents into one sequence"
        )


def mask_refusal(what: str) -> ValueError:
    """The error for a mask that a plan's can't hold."""
    return ValueError(
        f"attention_mask: {what} is not supported; what is seen is the plan's mask. "
        "Pack documents with Mask(cu_seqlens=...) instead of padding them, and leave attention_mask out"
    )


def _check_batch(batch: Any, plan: Plan) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is a {type(batch).__name__}; pass a mapping with input_ids")
    unknown = [key for key in batch if key not in ("input_ids", "labels", "attention_mask")]
    if unknown:
        raise ValueError(
            f"batch has {unknown}, which can't be sharded here; pass input_ids, labels (not shifted) and at most an "
            "attention_mask of ones. Positions are the plan's"
        )
    if batch.get("input_ids") is None:
        raise ValueError("batch has no input_ids; pass token ids [batch, sequence]")
    for key, value in batch.items():
        if value is not None:
            _check_entry(key, value, len(batch["input_ids"]), plan.seqlen)
    if batch.get("attention_mask") is not None and not batch["attention_mask"].all():
        raise mask_refusal(PADDING)


def _check_entry(key: str, value: Any, rows: int, seqlen: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{key} is a {type(value).__name__}; pass a tensor [batch, sequence]")
    if value.dim() != 2 or value.shape[1] != seqlen:
        raise ValueError(f"{key} has shape {list(value.shape)}; pass [batch, {seqlen}], the plan's whole sequence")
    if value.shape[0] != rows:
        raise ValueError(f"{key} has {value.shape[0]} rows, input_ids {rows}; pass as many")
