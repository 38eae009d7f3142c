"""A batch as trainers and collators give it, made into rows that one plan holds, and the way back to its own order.

Documents, padding and packing come in many spellings: positions that restart, cumulative lengths, sequence ids, zeros
in ``attention_mask``. All become a mask's documents. Rows with documents of their own are laid end to end in one row;
padding goes behind the tokens, where no causal query sees it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from burst_attention.attention.batch import Plans
from burst_attention.attention.plan import Plan
from burst_attention.plan.mask import Mask

IGNORED = -100  # the label of a token without a target, as transformers has it
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "sequence_ids")
_LENGTHS = ("max_length_q", "max_length_k")  # say nothing that the borders do not
PACKING = (*_PACKED, *_LENGTHS)


@dataclass(frozen=True, eq=False)
class Rows:
    """A whole batch as the plan takes it, alike on every rank.

    Attributes:
        input_ids: [R, T], behind which padding may stand.
        targets: [R, T], shifted: at each token the next; None without labels.
        cu_seqlens: the documents of every row; None for one.
        shape: (B, S) of the batch as it was given.
        padding: int64 [B], tokens of padding before each row of the batch; None for none.
        real: bool [B, S], where the batch has tokens and no padding; None if there is none.
        shifted: whether some row's first token is not at position 0, by its ``position_ids`` or by padding before it.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor | None
    cu_seqlens: tuple[int, ...] | None
    shape: tuple[int, int]
    padding: torch.Tensor | None
    real: torch.Tensor | None
    shifted: bool

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, T, ...] in the order of the batch as it was given: [B, S, ...]."""
        batch, length = self.shape
        if rows.shape[0] == batch:
            rows = rows[:, :length]
        rows = rows.flatten(0, 1)[: batch * length].unflatten(0, (batch, length))
        return rows if self.padding is None else _rolled(rows, self.padding)


def rows_of(batch: Mapping[str, Any], *, ranks: int) -> Rows:
    """The rows of a batch of ``input_ids`` and what else says where its documents and its padding are.

    Args:
        batch: ``input_ids`` [B, S] int; and, None or left out: ``labels`` [B, S], not shifted, or ``shift_labels``
            [B, S], shifted over the whole sequence; ``attention_mask`` [B, S], zeros before and behind each row's
            tokens; ``position_ids`` [B, S] or [1, S], which count on, or restart where a document begins;
            ``cu_seq_lens_q`` and ``cu_seq_lens_k`` [documents + 1] over all rows laid end to end; ``seq_idx`` or
            ``sequence_ids`` [B, S], which change where a document begins.
        ranks: rows are made at least as long, so that no rank is left without a token.

    Raises:
        TypeError, ValueError: naming the entry, and what to do.
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
    rows, cu_seqlens = _one_mask(starts, (batch_size, length))
    tokens = batch_size * length // rows
    more = max(0, ranks - tokens)

    def arranged(x: torch.Tensor, filler: int) -> torch.Tensor:
        return F.pad(_in_front(x, padding).reshape(rows, tokens), (0, more), value=filler)

    if more and cu_seqlens is not None:
        cu_seqlens = (*cu_seqlens, tokens + more)
    targets = None if targets is None else arranged(targets, IGNORED)
    shifted = _shifted(batch, ids, padding)
    return Rows(arranged(ids, 0), targets, cu_seqlens, (batch_size, length), padding, real, shifted)


class PlanCache:
    """The plans of a model's layers for the batches that come, each by the layer's window; the last few are kept.

    Args:
        base: whose group, layout and route they have.
        windows: of the model's layers; None for a layer that sees everything.
        kept: how many masks' plans stay.
    """

    def __init__(self, base: Plan, windows: list[int | None], *, kept: int = 16) -> None:
        self.base = base
        self._windows = list(dict.fromkeys(windows))
        self._kept = kept
        self._plans: OrderedDict[tuple[int, tuple[int, ...] | None], Plans] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, seqlen: int, cu_seqlens: tuple[int, ...] | None) -> Plans:
        """The plans, by window, of sequences of ``seqlen`` tokens with these documents. Nothing is exchanged."""
        key = seqlen, cu_seqlens
        if key not in self._plans:
            first = self.base.with_mask(Mask(cu_seqlens=cu_seqlens), seqlen=seqlen)
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
    """The entry, [B, S]; ``rows``: [1, S] will do for all rows."""
    value = _tensor(batch, name)
    if value is None:
        return None
    if value.shape != ids.shape and not (rows and value.dim() == 2 and value.shape == (1, ids.shape[1])):
        raise ValueError(f"{name} has shape {list(value.shape)}, input_ids {list(ids.shape)}; pass as many")
    return value.expand(ids.shape)


def _padding(batch: Mapping[str, Any], ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(bool [B, S], where the real tokens are; int64 [B], padding before them), each None if there is none."""
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
        f"attention_mask: a mask {what} is not supported; pass [batch, sequence] with zeros for padding alone. "
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
            f"labels has targets for tokens of padding (zeros in attention_mask); set the labels of padding, and of "
            f"the first token behind padding, to {IGNORED}: nothing meaningful foretells them"
        )
    return targets


def _starts(batch: Mapping[str, Any], ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor | None:
    """bool [B, S], where documents begin besides a row's first token; None if nothing is said of documents.

    Raises:
        ValueError: two entries say different things.
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
    # Positions that count on over the whole row say nothing: rotary angles are the same within documents.
    if len(said) > 1 and not said.get("position_ids", torch.ones(1)).any():
        del said["position_ids"]
    names, starts = list(said), list(said.values())
    for name, other in zip(names[1:], starts[1:], strict=True):
        if not torch.equal(starts[0], other):
            raise ValueError(f"{names[0]} and {name} tell of different documents; pass one of them, or make them equal")
    if not starts or not starts[0].any():
        return None
    if batch.get("attention_mask") is not None and names[0] == "position_ids":
        raise ValueError(
            "position_ids restart and there is an attention_mask: with a mask transformers lets the documents of a row "
            "see each other, without one not. Leave attention_mask out for packed documents, or let positions count on"
        )
    return starts[0]


def _shifted(batch: Mapping[str, Any], ids: torch.Tensor, padding: torch.Tensor | None) -> bool:
    positions = _like(batch, "position_ids", ids, rows=True)
    if positions is None:
        return padding is not None
    return bool((_in_front(positions, padding)[:, 0] != 0).any())


def _restarts(positions: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Where positions do not count on from the token before."""
    step = positions[:, 1:] - positions[:, :-1]
    restart = _inside(step != 1, real)
    if (positions[restart] != 0).any():
        row, place = (restart & (positions != 0)).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids goes from {positions[row, place - 1]} to {positions[row, place]} in row {row}; positions "
            "must count on by one, or restart at 0 where a document begins"
        )
    return restart


def _inside(between: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """bool [B, S] of what is said between tokens [B, S - 1]; padding says nothing."""
    starts = F.pad(between, (1, 0))
    if real is not None:
        starts &= real & F.pad(real[:, :-1], (1, 0))
    return starts


def _at(borders: torch.Tensor, name: str, ids: torch.Tensor) -> torch.Tensor:
    """bool [B, S], where the documents of cumulative lengths begin; a row's first token is not told."""
    whole = Mask(cu_seqlens=borders.flatten().tolist())
    try:
        whole.check(ids.numel())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    starts = torch.zeros(ids.numel() + 1, dtype=torch.bool, device=ids.device)
    starts[torch.as_tensor(whole.cu_seqlens, device=ids.device)] = True
    starts = starts[:-1].view(ids.shape)
    if not starts[:, 0].all():
        raise ValueError(f"{name}: a document reaches over the end of a row; documents must end with their row")
    return F.pad(starts[:, 1:], (1, 0))


def _one_mask(starts: torch.Tensor | None, shape: tuple[int, int]) -> tuple[int, tuple[int, ...] | None]:
    """(rows, borders): as many rows as the batch has if all have the same documents, else all in one."""
    if starts is None:
        return shape[0], None
    begins = starts.cpu().numpy().copy()
    if (begins == begins[:1]).all():
        begins, rows = begins[0], shape[0]
    else:
        begins[:, 0], rows = True, 1
        begins = begins.reshape(-1)
    begins[0] = True
    return rows, (*np.flatnonzero(begins).tolist(), len(begins))


def _in_front(x: Any, padding: torch.Tensor | None) -> Any:
    """Rows [B, S] with the padding before them moved behind; None stays None."""
    return x if x is None or padding is None else _rolled(x, -padding)


def _rolled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Each row of [B, S, ...] moved right by so many places, what falls off coming back on the left."""
    places = (torch.arange(x.shape[1], device=x.device) - by.to(x.device)[:, None]) % x.shape[1]
    return x[torch.arange(len(x), device=x.device)[:, None], places]
