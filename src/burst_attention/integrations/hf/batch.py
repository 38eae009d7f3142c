"""Convert a trainer's batch into rows that fit one plan, and results back into the batch's order.

Batches describe documents and padding in several ways: positions that restart, cumulative lengths, sequence ids, zeros
in ``attention_mask``. All of them become documents of one mask. If rows differ in their documents, they are
concatenated into one row. Padding moves behind the tokens, where no causal query sees it. Under a mask that is not
causal, a row's padding becomes a document.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from burst_attention.attention.batch import Plans, Reach
from burst_attention.attention.plan import Plan
from burst_attention.plan.layout import BALANCED
from burst_attention.plan.mask import Mask

IGNORED = -100  # transformers' label for a token without a target
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "sequence_ids")
_LENGTHS = ("max_length_q", "max_length_k")  # redundant: they follow from the cumulative lengths
PACKING = (*_PACKED, *_LENGTHS)


@dataclass(frozen=True, eq=False)
class BatchRows:
    """A whole batch as rows for the plan, the same on every rank.

    Attributes:
        input_ids: [R, T], with padding at the end of rows.
        targets: [R, T], shifted labels: the next token's id at each token; None without labels.
        cu_seqlens: document borders, the same for every row; None for one document per row.
        shape: (B, S) of the original batch.
        padding: int64 [B], the number of padding tokens before each row of the batch; None if no row has any.
        real: bool [B, S], True for real tokens, False for padding; None if the batch has no padding.
        shifted: whether the first token of any row is not at position 0, due to ``position_ids`` or left padding.
        joined: whether the rows of the batch became documents of one row at the caller's wish.
        others: other values of each token, [R, T], by name.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor | None
    cu_seqlens: tuple[int, ...] | None
    shape: tuple[int, int]
    padding: torch.Tensor | None
    real: torch.Tensor | None
    shifted: bool
    others: Mapping[str, torch.Tensor]
    joined: bool = False

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [R, T, ...] in the order of the original batch: [B, S, ...]."""
        batch, length = self.shape
        if rows.shape[0] == batch:
            rows = rows[:, :length]
        rows = rows.flatten(0, 1)[: batch * length].unflatten(0, (batch, length))
        return rows if self.padding is None else _rolled(rows, self.padding)


def rows_of(
    batch: Mapping[str, Any],
    *,
    ranks: int,
    causal: bool = True,
    join: bool = False,
    others: Mapping[str, Any] | None = None,
) -> BatchRows:
    """Convert a batch into rows.

    Args:
        batch: ``input_ids`` [B, S], int. All other entries are optional (None or left out). ``labels`` [B, S]:
            not shifted. ``shift_labels`` [B, S]: shifted over the whole sequence. ``attention_mask`` [B, S]: zeros
            only before and behind each row's tokens. ``position_ids`` [B, S] or [1, S]: increase by one, or restart
            at 0 where a document begins. ``cu_seq_lens_q`` and ``cu_seq_lens_k`` [documents + 1]: over all rows
            concatenated. ``seq_idx`` or ``sequence_ids`` [B, S]: change where a document begins.
        ranks: the number of ranks. Shorter rows are padded to this length, so that each rank has a token.
        causal: whether the model's attention is. If not, tokens would see the padding behind them.
        join: make several rows the documents of one row, even if they have the same documents.
        others: other values of each token, [B, S], by name.

    Raises:
        TypeError, ValueError: an entry is wrong; the message names it and says what to do.
    """
    ids = _tensor(batch, "input_ids")
    if ids is None:
        raise ValueError("input_ids are missing; pass token ids [batch, sequence] (inputs_embeds are not supported)")
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(f"input_ids has shape {list(ids.shape)}; pass [batch, sequence], at least one token")
    real, padding = _padding(batch, ids)
    targets = _targets(batch, ids, real)
    starts = _starts(batch, ids, real)
    batch_size, length = ids.shape
    starts = _in_front(starts, padding)
    if real is not None and not causal:
        starts = _before_padding(starts, real)
    join = join and batch_size > 1
    joined = join and starts is None
    if joined:
        starts = torch.zeros_like(ids, dtype=torch.bool)
    rows, cu_seqlens = _one_mask(starts, (batch_size, length), join=join)
    tokens = batch_size * length // rows
    more = max(0, ranks - tokens)

    def arranged(x: torch.Tensor, filler: int) -> torch.Tensor:
        return F.pad(_in_front(x, padding).reshape(rows, tokens), (0, more), value=filler)

    if more and (cu_seqlens is not None or not causal):
        cu_seqlens = (*(cu_seqlens or (0, tokens)), tokens + more)
    also = {}
    for name in others or ():
        value = _like(others or {}, name, ids, rows=True)
        if value is not None:
            also[name] = arranged(value, 0)
    targets = None if targets is None else arranged(targets, IGNORED)
    shifted = _shifted(batch, ids, padding)
    return BatchRows(arranged(ids, 0), targets, cu_seqlens, (batch_size, length), padding, real, shifted, also, joined)


class PlanCache:
    """A least-recently-used cache of plans, by sequence length, documents and layer window.

    Args:
        base: a plan; all plans share its group, layout and route.
        windows: what the model's layers see (:func:`~.models.layer_windows`).
        causal: whether the model's attention is.
        kept: the number of (length, documents) pairs whose plans the cache holds.
    """

    def __init__(self, base: Plan, windows: list[Reach], *, causal: bool = True, kept: int = 16) -> None:
        self.base, self.causal = base, causal
        self._windows = list(dict.fromkeys(windows))
        self._kept = kept
        self._plans: OrderedDict[tuple[int, tuple[int, ...] | None], Plans] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def joins_rows(self) -> bool:
        """Whether the rows of a batch become documents of one row: the layout ``balanced`` places documents."""
        return self.base.layout == BALANCED

    def get(self, seqlen: int, cu_seqlens: tuple[int, ...] | None) -> Plans:
        """Return the plans for ``seqlen`` tokens and these documents. Nothing is exchanged."""
        key = seqlen, cu_seqlens
        if key not in self._plans:
            first = self.base.with_mask(Mask(self.causal, cu_seqlens=cu_seqlens), seqlen=seqlen)
            self._plans[key] = Plans.by_windows(first, self._windows, cu_seqlens)
        self._plans.move_to_end(key)
        while len(self._plans) > self._kept:
            self._plans.popitem(last=False)
        return self._plans[key]


def _tensor(batch: Mapping[str, Any], name: str) -> torch.Tensor | None:
    value = batch.get(name)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        raise TypeError(f"{name} is a {type(value).__name__}; pass a tensor of integers")
    return value


def _like(batch: Mapping[str, Any], name: str, ids: torch.Tensor, *, rows: bool = False) -> torch.Tensor | None:
    """Return an entry as [B, S]. With ``rows``, [1, S] is allowed and expanded to all rows."""
    value = _tensor(batch, name)
    if value is None:
        return None
    if value.shape != ids.shape and not (rows and value.dim() == 2 and value.shape == (1, ids.shape[1])):
        raise ValueError(f"{name} has shape {list(value.shape)}, input_ids {list(ids.shape)}; make the shapes equal")
    return value.expand(ids.shape)


def _padding(batch: Mapping[str, Any], ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (bool [B, S], True for real tokens; int64 [B], padding before them); None where there is no padding."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None, None
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        what = f"of shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"that is a {type(mask).__name__}"
        raise _mask_refusal(what)
    real = mask != 0
    if real.all():
        return None, None
    before = (real.cumsum(1) == 0).sum(1)
    behind = (real.flip(1).cumsum(1) == 0).sum(1)
    if not (real.sum(1) == (real.shape[1] - before - behind).clamp(min=0)).all():
        raise _mask_refusal("with zeros between tokens")
    return real, before if before.any() else None


def _mask_refusal(what: str) -> ValueError:
    return ValueError(
        f"attention_mask: a mask {what} is not supported; pass [batch, sequence] with zeros only for padding. "
        "For packed documents pass position_ids that restart at 0 where each begins, and leave attention_mask out"
    )


def _targets(batch: Mapping[str, Any], ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor | None:
    labels, shifted = _like(batch, "labels", ids), _like(batch, "shift_labels", ids)
    if shifted is not None:
        targets = shifted
    elif labels is not None:
        targets = torch.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
    else:
        return None
    if real is not None and (targets[~real] != IGNORED).any():
        raise ValueError(
            f"labels has targets for padding tokens (zeros in attention_mask); set the labels of padding and of the "
            f"first token behind padding to {IGNORED}, because no real token precedes and predicts them"
        )
    return targets


def _starts(batch: Mapping[str, Any], ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor | None:
    """Return bool [B, S], True where a document begins inside a row; None if no row has a second document.

    Raises:
        ValueError: two entries describe different documents.
    """
    said = {}
    positions = _like(batch, "position_ids", ids, rows=True)
    if positions is not None:
        said["position_ids"] = _restarts(positions, real)
    for name in ("seq_idx", "sequence_ids"):
        sequence = _like(batch, name, ids, rows=True)
        if sequence is not None:
            said[name] = _inside(sequence[:, 1:] != sequence[:, :-1], real)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        borders = _tensor(batch, name)
        if borders is not None:
            said[name] = _at(borders, name, ids)
    # Positions that never restart don't contradict other entries: rotary angles within documents stay the same.
    if len(said) > 1 and not said.get("position_ids", torch.ones(1)).any():
        del said["position_ids"]
    names, starts = list(said), list(said.values())
    for name, other in zip(names[1:], starts[1:], strict=True):
        if not torch.equal(starts[0], other):
            raise ValueError(
                f"{names[0]} and {name} describe different documents; pass one of them, or make them equal"
            )
    if not starts or not starts[0].any():
        return None
    if batch.get("attention_mask") is not None and names[0] == "position_ids":
        raise ValueError(
            "position_ids restart, but there is an attention_mask, with which transformers lets the documents of a row "
            "see each other. Leave attention_mask out for packed documents; else don't restart position_ids"
        )
    return starts[0]


def _shifted(batch: Mapping[str, Any], ids: torch.Tensor, padding: torch.Tensor | None) -> bool:
    positions = _like(batch, "position_ids", ids, rows=True)
    if positions is None:
        return padding is not None
    return bool((_in_front(positions, padding)[:, 0] != 0).any())


def _restarts(positions: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Return bool [B, S], True where the position is not one more than the previous token's."""
    step = positions[:, 1:] - positions[:, :-1]
    restart = _inside(step != 1, real)
    if (positions[restart] != 0).any():
        row, place = (restart & (positions != 0)).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids goes from {positions[row, place - 1]} to {positions[row, place]} in row {row}; positions "
            "must increase by one, or restart at 0 where a document begins"
        )
    return restart


def _inside(between: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Expand flags between tokens [B, S - 1] to [B, S]; set them to False at borders of padding."""
    starts = F.pad(between, (1, 0))
    if real is not None:
        starts &= real & F.pad(real[:, :-1], (1, 0))
    return starts


def _at(borders: torch.Tensor, name: str, ids: torch.Tensor) -> torch.Tensor:
    """Return bool [B, S], True where documents of the cumulative lengths begin; False at a row's first token."""
    whole = Mask(cu_seqlens=borders.flatten().tolist())
    try:
        whole.check(ids.numel())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    starts = torch.zeros(ids.numel() + 1, dtype=torch.bool, device=ids.device)
    starts[torch.as_tensor(whole.cu_seqlens, device=ids.device)] = True
    starts = starts[:-1].view(ids.shape)
    if not starts[:, 0].all():
        raise ValueError(f"{name}: a document crosses the end of a row; end each document within its row")
    return F.pad(starts[:, 1:], (1, 0))


def _before_padding(starts: torch.Tensor | None, real: torch.Tensor) -> torch.Tensor:
    """Mark where padding begins, bool [B, S], in rows whose padding is behind their tokens."""
    begins = torch.arange(real.shape[1], device=real.device) == real.sum(1)[:, None]
    return begins if starts is None else starts | begins


def _one_mask(starts: torch.Tensor | None, shape: tuple[int, int], *, join: bool) -> tuple[int, tuple[int, ...] | None]:
    """Return (rows, borders). If all rows have the same documents, keep the rows; else join them into one."""
    if starts is None:
        return shape[0], None
    begins = starts.cpu().numpy().copy()
    if not join and (begins == begins[:1]).all():
        begins, rows = begins[0], shape[0]
    else:
        begins[:, 0], rows = True, 1
        begins = begins.reshape(-1)
    begins[0] = True
    return rows, (*np.flatnonzero(begins).tolist(), len(begins))


def _in_front(x: Any, padding: torch.Tensor | None) -> Any:
    """Move left padding of rows [B, S] behind the tokens. None stays None."""
    return x if x is None or padding is None else _rolled(x, -padding)


def _rolled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rotate each row of [B, S, ...] to the right by its entry of ``by`` [B]."""
    places = (torch.arange(x.shape[1], device=x.device) - by.to(x.device)[:, None]) % x.shape[1]
    return x[torch.arange(len(x), device=x.device)[:, None], places]
