"""Cut a whole batch into this rank's shard, and hold the plans of one call.

A call has one plan for each sliding window among its layers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch

from ..plan.layout import BALANCED
from ..plan.mask import Mask
from .plan import Plan


class Chunked(NamedTuple):
    """Chunked attention (Llama 4): each query sees the earlier keys of the same chunk."""

    size: int  # tokens; chunks are counted from the start of each document


Reach: TypeAlias = int | Chunked | None  # what layers see: a sliding window, a chunk, or everything before
PlanArgument: TypeAlias = Plan | Mapping[Reach, Plan]  # one plan for all layers, or one per reach

_Documents: TypeAlias = tuple[int, tuple[int, ...] | None, Mask | None]  # tokens; their documents' borders, or a mask

MOST_AHEAD = 4  # batches
PADDING = "a padding mask (zeros in attention_mask)"
SAME_BATCH = (
    "Every rank of a group needs the same whole batch. Give their samplers the same seed, and give the loader one "
    "share of the data per group, not one per rank"
)


class Plans(Mapping[Reach, Plan]):
    """The plans of one call, one for each reach of its layers, over the same ranks; one without chunks first."""

    def __init__(self, by_window: Mapping[Reach, Plan]) -> None:
        self._by_window = dict(by_window)

    @classmethod
    def of(cls, plan: Any) -> Plans:
        """Wrap a caller's ``plan`` argument: one plan for all layers, or a mapping by window."""
        if isinstance(plan, Plans):
            return plan
        if plan is None:
            raise ValueError(
                "plan is missing: call hf.parallelize(model), then the model, or its body inside of hf.shards. A model "
                "that does not pass keyword arguments on to its attention can't be used"
            )
        plans = plan if isinstance(plan, Mapping) else {None: plan}
        if not plans or not all(isinstance(each, Plan) for each in plans.values()):
            raise TypeError(
                f"plan={plan!r} must be a Plan, or a mapping such as {{None: full_plan, 4096: windowed_plan}}"
            )
        return cls(plans)

    @classmethod
    def by_windows(cls, plan: Plan, windows: Iterable[Reach], mask: Mask) -> Plans:
        """Return ``plan`` for each window and chunk size, within ``mask``, in one layout. Exchanges nothing."""
        distinct = dict.fromkeys(windows)
        if all(isinstance(each, Chunked) for each in distinct):  # positions and labels need the documents alone
            distinct = {None: None, **distinct}
        distinct = dict.fromkeys(sorted(distinct, key=lambda reach: isinstance(reach, Chunked)))
        if plan.schedule.layout.by_mask:
            plan = plan.with_mask(within(mask, widest_of(distinct), plan.seqlen), seqlen=plan.seqlen)
        plans = cls({reach: plan.with_mask(within(mask, reach, plan.seqlen)) for reach in distinct})
        for member in plans.values():
            member.decide_splits()
        return plans

    @property
    def one(self) -> Plan:
        """Return any one of the plans, to shard with or to report errors through."""
        return next(iter(self._by_window.values()))

    def __getitem__(self, window: Reach) -> Plan:
        return self._by_window[window]

    def __iter__(self) -> Iterator[Reach]:
        return iter(self._by_window)

    def __len__(self) -> int:
        return len(self._by_window)


class PlanCache:
    """A least-recently-used cache of plans, by sequence length, documents and layer window."""

    def __init__(self, base: Plan, windows: Iterable[Reach], *, causal: bool = True, kept: int = 16) -> None:
        self.base, self.causal = base, causal
        self._windows = list(dict.fromkeys(windows))
        self._kept = kept
        self._plans: OrderedDict[_Documents, Plans] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._coming: dict[_Documents, Future[Plans]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_thread": None, "_coming": {}}

    @property
    def joins_rows(self) -> bool:
        """Whether the rows of a batch become documents of one row: the layout ``balanced`` places documents."""
        return self.base.layout == BALANCED

    def with_windows(self, windows: Iterable[Reach]) -> PlanCache:
        """Return a cache for layers with other windows; itself if they are the same."""
        made = PlanCache(self.base, windows, causal=self.causal, kept=self._kept)
        return self if made._windows == self._windows else made

    def get(self, seqlen: int, cu_seqlens: tuple[int, ...] | None, mask: Mask | None = None) -> Plans:
        """Return the plans for ``seqlen`` tokens and these documents, or a mask in their place. Exchanges nothing."""
        key = seqlen, cu_seqlens, mask
        coming = self._coming.pop(key, None)
        if coming is not None and coming.exception() is None:
            self._plans[key] = coming.result()
        if key not in self._plans:
            self._plans[key] = self._make(*key)
        self._plans.move_to_end(key)
        while len(self._plans) > self._kept:
            self._plans.popitem(last=False)
        return self._plans[key]

    def ahead(self, seqlen: int, cu_seqlens: tuple[int, ...] | None) -> None:
        """Let a thread make what a later :meth:`get` returns, with the programs of calls like those so far."""
        key = seqlen, cu_seqlens, None
        if key in self._plans or key in self._coming:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "burst-plans")
        while len(self._coming) >= MOST_AHEAD:
            self._coming.pop(next(iter(self._coming))).cancel()
        self._coming[key] = self._thread.submit(self._make_ready, *key)

    def _make(self, seqlen: int, cu_seqlens: tuple[int, ...] | None, mask: Mask | None) -> Plans:
        first, mask = self.base, Mask(self.causal, cu_seqlens=cu_seqlens) if mask is None else mask
        if seqlen != first.seqlen:  # else the layout stays
            first = first.with_mask(mask, seqlen=seqlen)
        return Plans.by_windows(first, self._windows, mask)

    def _make_ready(self, *key: Any) -> Plans:
        plans = self._make(*key)
        for plan in plans.values():
            plan.make_ready()
        return plans


def widest_of(reaches: Iterable[Reach]) -> int | None:
    """Return the widest window, whose layers a layout by the mask follows; None if some layer has no window."""
    windows = [each for each in reaches if not isinstance(each, Chunked)]
    return None if None in windows else max((each for each in windows if each is not None), default=None)


def mask_of(reach: Reach, seqlen: int, cu_seqlens: Sequence[int] | None, *, causal: bool = True) -> Mask:
    """Return the mask of layers with this reach."""
    return within(Mask(causal, cu_seqlens=cu_seqlens), reach, seqlen)


def within(mask: Mask, reach: Reach, seqlen: int) -> Mask:
    """Return a mask for layers with this reach; a chunk is like a document. Of two windows the smaller one holds.

    Raises:
        ValueError: layers with a window or chunks can't have this mask.
    """
    if reach is None:
        return mask
    if not isinstance(reach, Chunked):
        if mask.prefix is not None:
            raise ValueError(f"mask={mask!r} for layers with a window of {reach} tokens: pass a mask without prefix")
        return replace(mask, window=reach if mask.window is None else min(reach, mask.window))
    if mask != Mask(mask.causal, cu_seqlens=mask.cu_seqlens):
        raise ValueError(f"mask={mask!r} for layers of chunks of {reach.size} tokens: pass a mask of documents alone")
    documents = itertools.pairwise((0, seqlen) if mask.cu_seqlens is None else mask.cu_seqlens)
    starts = [at for start, stop in documents for at in range(start, stop, reach.size)]
    return Mask(mask.causal, cu_seqlens=[*starts, seqlen])


def shard_batch(batch: Mapping[str, Any], plan: PlanArgument, *, ignore_index: int = -100) -> dict[str, torch.Tensor]:
    """See :func:`burst_attention.integrations.hf.shard_batch`."""
    base = Plans.of(plan).one
    with base.agreement.entering("shard_batch"):
        check_tokens(base)
        _check_batch(batch, base)
        ids, labels = batch["input_ids"], batch.get("labels")
        targets = None if labels is None else base.shift_labels(labels, ignore_index=ignore_index)
        fields = {} if base.world == 1 else batch_fields(base, input_ids=ids, labels=targets)
    base.agreement.agree("shard_batch", fields, remedy=SAME_BATCH)
    shard = shard_tokens(ids, targets, base)
    base.usage.mark_sharded(shard["position_ids"], shard.get("shift_labels"))
    return shard


def shard_tokens(
    ids: torch.Tensor,
    targets: torch.Tensor | None,
    plan: Plan,
    *,
    device: torch.device | None = None,
    **others: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Cut ids, shifted labels and ``others`` [B, S], equal on all ranks; return this rank's parts by name.

    Labels stay where they are; the rest goes to ``device``, without a wait. Default: that of the ids.
    """
    device = ids.device if device is None else device
    shard = {"position_ids": plan.document_positions_on(device).repeat(ids.shape[0], 1)}  # unless others have them
    shard |= {name: plan.shard(x, 1).to(device, non_blocking=True) for name, x in {"input_ids": ids, **others}.items()}
    if targets is not None:
        shard["shift_labels"] = plan.shard(targets, 1)
    return shard


def batch_fields(plan: Plan, **tensors: torch.Tensor | None) -> dict[str, Any]:
    """Return what ranks compare before they compute on a batch: its documents, and a digest of each tensor."""
    here = on_host({name: x for name, x in tensors.items() if x is not None})
    digests = {f"the digest of {name}": digest_of(here[name]) if name in here else None for name in tensors}
    return {"documents": plan.schedule.description["mask"], **digests}


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors on the CPU; a GPU's integers and flags as int64, copied together: the host waits once."""
    away = [name for name, x in tensors.items() if x.device.type != "cpu" and not x.is_floating_point()]
    here = {name: x.detach().cpu() for name, x in tensors.items() if name not in away}
    if away:
        first = tensors[away[0]].device
        together = torch.cat([tensors[name].flatten().long().to(first) for name in away]).cpu()
        parts = together.split([tensors[name].numel() for name in away])
        here |= {name: part.view(tensors[name].shape) for name, part in zip(away, parts, strict=True)}
    return here


def digest_of(x: torch.Tensor) -> str:
    """Return a digest of a tensor's values and shape; integers by value, whatever their dtype."""
    values = x.detach().cpu()
    values = values if values.is_floating_point() else values.long()
    number = hashlib.blake2b(values.contiguous().view(torch.uint8).numpy().data, digest_size=8).hexdigest()
    return f"{number} {list(x.shape)}"


def digest_text(values: Mapping[Any, Any]) -> str:
    """Return a digest of settings: names and values."""
    return hashlib.blake2b(repr(sorted(values.items(), key=str)).encode(), digest_size=8).hexdigest()


@torch.no_grad()
def weight_samples(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return a digest of a few values of each tensor by name, except those that a rank may not have whole."""
    whole = {
        name: x
        for name, x in weights
        if type(x) in (torch.nn.Parameter, torch.Tensor) and not x.is_meta and x.numel() and not x.is_complex()
    }
    # Copies: FSDP2 could not free a weight that numpy had seen.
    few = {name: x.flatten()[:: max(1, x.numel() // 8)][:8].to(torch.float64, copy=True) for name, x in whole.items()}
    return {name: digest_of(values) for name, values in few.items()}


def check_tokens(plan: Plan) -> None:
    """Raise ValueError if some rank has no token: transformers models can't run on an empty shard."""
    if plan.seqlen < plan.world:
        raise ValueError(
            f"the sequence has {plan.seqlen} tokens for {plan.world} ranks, so some rank would have none, and models "
            f"can't run on an empty shard; use at most {plan.seqlen} ranks, or pack short documents into one sequence"
        )


def mask_refusal(what: str) -> ValueError:
    """Return the error for a mask that a plan can't express."""
    return ValueError(
        f"attention_mask: {what} is not supported; only the plan's mask applies. "
        "Pack documents with Mask(cu_seqlens=...) instead of padding them, and leave attention_mask out"
    )


def _check_batch(batch: Any, plan: Plan) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is a {type(batch).__name__}; pass a mapping with input_ids")
    unknown = [key for key in batch if key not in ("input_ids", "labels", "attention_mask")]
    if unknown:
        raise ValueError(
            f"batch has {unknown}, which can't be sharded here; pass input_ids, labels (not shifted) and at most an "
            "attention_mask of ones. Position ids come from the plan"
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
        raise ValueError(f"{key} has {value.shape[0]} rows, input_ids {rows}; pass the same number of rows")
