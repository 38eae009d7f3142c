"""Convert a trainer's batch into rows that fit one plan, and results back into the batch's order.

Batches describe documents and padding in several ways: positions that restart, cumulative lengths, sequence ids, zeros
in ``attention_mask``. All of them become documents of one mask. If rows differ in their documents, they are
concatenated into one row. Padding moves behind the tokens, where no causal query sees it. Under a mask that is not
causal, a row's padding becomes a document.

Rows are made of one copy of the batch on the host, so that it waits for a GPU once; only the shard goes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from burst_attention.attention.batch import on_host
from burst_attention.plan.mask import Mask

IGNORED = -100  # transformers' label for a token without a target
_INDICES = ("input_ids", "labels", "shift_labels")  # of tables, which take int64 and int32 alone
_DOCUMENTS = ("position_ids", "seq_idx", "sequence_ids", "cu_seq_lens_q", "cu_seq_lens_k")
PACKING = (*_DOCUMENTS[1:], "max_length_q", "max_length_k")  # these follow from the cumulative lengths


@dataclass(frozen=True, eq=False)
class BatchRows:
    """A whole batch as rows for the plan, the same on every rank. Tensors are on the CPU, but for floating-point ones.

    On the CPU integers keep their dtypes; a GPU's become int64.
    """

    input_ids: torch.Tensor  # [R, T], with padding at the end of rows
    targets: torch.Tensor | None  # [R, T], shifted labels: the next token's id at each token; None without labels
    cu_seqlens: tuple[int, ...] | None  # document borders, the same for every row; None for one document per row
    shape: tuple[int, int]  # (B, S) of the original batch
    padding: torch.Tensor | None  # int64 [B], the number of padding tokens before each row; None if no row has any
    real: torch.Tensor | None  # bool [B, S], False for padding; None if the batch has none
    shifted: bool  # whether a row's first token is not at position 0, due to position_ids or left padding
    others: Mapping[str, torch.Tensor]  # other values of each token, [R, T] or [R, T, E], by name
    device: torch.device  # of the batch
    joined: bool = False  # whether the batch's rows became documents of one row at the caller's wish
    unlabeled: bool = False  # whether there are labels, but none of them counts

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
    vocabulary: int | None = None,
    causal: bool = True,
    join: bool = False,
    others: Mapping[str, Any] | None = None,
) -> BatchRows:
    """Convert a batch into rows.

    Args:
        batch: ``input_ids`` [B, S], int, or ``inputs_embeds`` [B, S, E], which go to ``others``. All other entries are
            optional (None or left out): ``labels`` [B, S], not shifted; ``shift_labels`` [B, S]; ``attention_mask``
            [B, S], zeros only before and behind each row's tokens; ``position_ids`` [B, S] or [1, S], which increase
            by one, or restart at 0 where a document begins; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` [documents + 1],
            over all rows concatenated; ``seq_idx`` or ``sequence_ids`` [B, S], which change where a document begins.
        ranks: the number of ranks. Shorter rows are padded to this length, so that each rank has a token.
        vocabulary: the number of ids that a label may have; None: labels are not compared with it.
        causal: whether the model's attention is. If not, tokens would see the padding behind them.
        join: make several rows the documents of one row, even if they have the same documents.
        others: other values of each token, [B, S], by name.

    Raises:
        TypeError, ValueError: an entry is wrong; the message names it and says what to do.
    """
    ids, embeds = _ids_and_embeddings(batch)
    here, others = _on_host(batch, ids, others or {})
    device = ids.device
    ids, host = here["input_ids"], {name: x.numpy().astype(np.int64) for name, x in here.items()}
    seen, before = _padding(here)
    real, padding = (None if x is None else torch.from_numpy(x) for x in (seen, before))
    targets, unlabeled = _targets(here, host, seen, vocabulary)
    starts = _starts(host, ids, seen)
    batch_size, length = ids.shape
    if starts is not None and before is not None:
        starts = np.take_along_axis(starts, (np.arange(length) + before[:, None]) % length, 1)
    if seen is not None and not causal:  # padding behind a row's tokens becomes a document
        begins: np.ndarray = np.arange(length) == seen.sum(1)[:, None]
        starts = begins if starts is None else starts | begins
    join = join and batch_size > 1
    joined = join and starts is None
    if joined:
        starts = np.zeros(ids.shape, bool)
    rows, cu_seqlens = _one_mask(starts, (batch_size, length), join=join)
    tokens = batch_size * length // rows
    more = max(0, ranks - tokens)

    def arranged(x: torch.Tensor, filler: int) -> torch.Tensor:
        behind = (0, 0) * (x.dim() - 2) + (0, more)
        x = x if padding is None else _rolled(x, -padding)  # left padding moves behind the tokens
        return F.pad(x.reshape(rows, tokens, *x.shape[2:]), behind, value=filler)

    if more and (cu_seqlens is not None or not causal):
        cu_seqlens = (*(cu_seqlens or (0, tokens)), tokens + more)
    also = {} if embeds is None else {"inputs_embeds": arranged(embeds, 0)}
    also |= {name: arranged(x, 0) for name, x in others.items()}
    targets = None if targets is None else arranged(targets, IGNORED)
    shape, shifted = (batch_size, length), _shifted(host, before)
    fields = arranged(ids, 0), targets, cu_seqlens, shape, padding, real, shifted, also, device
    return BatchRows(*fields, joined=joined, unlabeled=unlabeled)


def _ids_and_embeddings(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return token ids [B, S], and embeddings [B, S, E] or None. Ids that embeddings replace are zeros."""
    ids, embeds = _tensor(batch, "input_ids"), batch.get("inputs_embeds")
    if embeds is None:
        if ids is None:
            raise ValueError("input_ids are missing; pass token ids [batch, sequence], or inputs_embeds")
        if ids.dim() != 2 or 0 in ids.shape:
            raise ValueError(f"input_ids has shape {list(ids.shape)}; pass [batch, sequence], at least one token")
        return ids, None
    if ids is not None:
        raise ValueError("input_ids and inputs_embeds are both given; pass one of them")
    if not isinstance(embeds, torch.Tensor) or not embeds.is_floating_point():
        raise TypeError(f"inputs_embeds is a {type(embeds).__name__}; pass a tensor of floating-point numbers")
    if embeds.dim() != 3 or 0 in embeds.shape:
        raise ValueError(f"inputs_embeds has shape {list(embeds.shape)}; pass [batch, sequence, hidden] with tokens")
    return torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device), embeds


def _tensor(batch: Mapping[str, Any], name: str) -> torch.Tensor | None:
    value = batch.get(name)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a tensor of integers")
    narrow = name in _INDICES and value.dtype not in (torch.int64, torch.int32)
    if narrow or value.is_floating_point() or value.is_complex():
        raise TypeError(f"{name} has dtype {value.dtype}; pass int64, such as {name}.long()")
    return value


def _like(batch: Mapping[str, Any], name: str, ids: torch.Tensor, *, rows: bool = False) -> torch.Tensor | None:
    """Return an entry as [B, S]. With ``rows``, [1, S] is allowed and expanded to all rows."""
    value = _tensor(batch, name)
    if value is None:
        return None
    if value.shape != ids.shape and not (rows and value.dim() == 2 and value.shape == (1, ids.shape[1])):
        raise ValueError(f"{name} has shape {list(value.shape)}, input_ids {list(ids.shape)}; make the shapes equal")
    return value.expand(ids.shape)


def _on_host(
    batch: Mapping[str, Any], ids: torch.Tensor, others: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the entries that rows are made of, and ``others``, on the CPU, copied together."""
    mask = batch.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
        what = f"of shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"that is a {type(mask).__name__}"
        raise _mask_refusal(what)
    entries = {"attention_mask": None if mask is None else mask != 0}
    entries["other"] = None if mask is None else ((mask != 0) & (mask != 1)).any()[None]
    entries |= {name: _like(batch, name, ids) for name in ("labels", "shift_labels")}
    entries |= {name: _like(batch, name, ids, rows=True) for name in ("position_ids", "seq_idx", "sequence_ids")}
    entries |= {name: _tensor(batch, name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    more = {f"other {name}": _like(others, name, ids, rows=True) for name in others}
    here = on_host({"input_ids": ids} | {name: x for name, x in (entries | more).items() if x is not None})
    if mask is not None and here.pop("other").any():
        raise _mask_refusal(f"that holds {mask[(mask != 0) & (mask != 1)][0].item()}, neither 0 nor 1,")
    return here, {name: here.pop(f"other {name}") for name in others if f"other {name}" in here}


def _padding(here: Mapping[str, torch.Tensor]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return (bool [B, S], True for real tokens; int64 [B], padding before them); None where there is no padding."""
    if "attention_mask" not in here or here["attention_mask"].all():
        return None, None
    real: np.ndarray = here["attention_mask"].numpy().astype(bool)
    empty = ~real.any(1)
    before = np.where(empty, real.shape[1], real.argmax(1))
    behind = np.where(empty, real.shape[1], real[:, ::-1].argmax(1))
    if (real.sum(1) != (real.shape[1] - before - behind).clip(min=0)).any():
        raise _mask_refusal("with zeros between tokens")
    return real, before if before.any() else None


def _mask_refusal(what: str) -> ValueError:
    return ValueError(
        f"attention_mask: a mask {what} is not supported; pass [batch, sequence] with zeros only for padding. "
        "For packed documents pass position_ids that restart at 0 where each begins, and leave attention_mask out"
    )


def _targets(
    here: Mapping[str, torch.Tensor], host: Mapping[str, np.ndarray], real: np.ndarray | None, vocabulary: int | None
) -> tuple[torch.Tensor | None, bool]:
    """Return the shifted labels, and whether none of them counts."""
    name = next((each for each in ("shift_labels", "labels") if each in host), None)
    if name is None:
        return None, False
    values, first = host[name], int(name == "labels")  # nothing predicts the first token
    wrong = (values != IGNORED) & ((values < 0) | (values >= (vocabulary or 0)))
    if vocabulary is not None and wrong[:, first:].any():
        row, place = np.argwhere(wrong[:, first:])[0] + [0, first]
        raise ValueError(
            f"{name} holds {values[row, place]} at token {place} of row {row}, neither in [0, {vocabulary}) nor "
            f"{IGNORED}; pass ids of the model's vocabulary, or resize the model's embeddings"
        )
    targets = here[name]
    if name == "labels":
        targets = torch.full_like(here["labels"], IGNORED)
        targets[:, :-1] = here["labels"][:, 1:]
        values = np.pad(values[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
    if real is not None and (values[~real] != IGNORED).any():
        raise ValueError(
            f"{name} has targets for padding tokens (zeros in attention_mask); set the labels of padding and of the "
            f"first token behind padding to {IGNORED}, because no real token precedes and predicts them"
        )
    return targets, bool((values == IGNORED).all())


def _starts(host: Mapping[str, np.ndarray], ids: torch.Tensor, real: np.ndarray | None) -> np.ndarray | None:
    """Return bool [B, S], True where a document begins inside a row; None if no row has a second document."""
    said = {}
    for name in filter(host.__contains__, _DOCUMENTS):
        x = host[name]
        if name == "position_ids":
            said[name] = _restarts(x, real)
        elif name in ("seq_idx", "sequence_ids"):
            said[name] = _inside(x[:, 1:] != x[:, :-1], real)
        else:
            said[name] = _at(x, name, (ids.shape[0], ids.shape[1]))
    # Positions that never restart don't contradict other entries: rotary angles within documents stay the same.
    if len(said) > 1 and "position_ids" in said and not said["position_ids"].any():
        del said["position_ids"]
    names, starts = list(said), list(said.values())
    for name, other in zip(names[1:], starts[1:], strict=True):
        if not np.array_equal(starts[0], other):
            raise ValueError(f"{names[0]} and {name} describe different documents; pass one of them, or equal ones")
    if not starts or not starts[0].any():
        return None
    if "attention_mask" in host and names[0] == "position_ids":
        raise ValueError(
            "position_ids restart, but there is an attention_mask, with which transformers lets the documents of a row "
            "see each other. Leave attention_mask out for packed documents; else don't restart position_ids"
        )
    return starts[0]


def _shifted(host: Mapping[str, np.ndarray], before: np.ndarray | None) -> bool:
    positions = host.get("position_ids")
    if positions is None:
        return before is not None
    first = 0 if before is None else before % positions.shape[1]
    return bool(positions[np.arange(len(positions)), first].any())


def _restarts(positions: np.ndarray, real: np.ndarray | None) -> np.ndarray:
    """Return bool [B, S], True where the position is not one more than the previous token's."""
    restart = _inside(positions[:, 1:] - positions[:, :-1] != 1, real)
    wrong = np.argwhere(restart & (positions != 0))
    if len(wrong):
        row, place = wrong[0].tolist()
        raise ValueError(
            f"position_ids goes from {positions[row, place - 1]} to {positions[row, place]} in row {row}; they must "
            "increase by one, or restart at 0 where a document begins"
        )
    return restart


def _inside(between: np.ndarray, real: np.ndarray | None) -> np.ndarray:
    """Expand flags between tokens [B, S - 1] to [B, S]; set them to False at borders of padding."""
    starts = np.pad(between, ((0, 0), (1, 0)))
    return starts if real is None else starts & real & np.pad(real[:, :-1], ((0, 0), (1, 0)))


def _at(borders: np.ndarray, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Return bool [B, S], True where documents of the cumulative lengths begin; False at a row's first token."""
    try:
        whole = Mask(cu_seqlens=borders.reshape(-1).tolist())
        whole.check(shape[0] * shape[1])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    starts = np.zeros(shape[0] * shape[1] + 1, bool)
    starts[list(whole.cu_seqlens or ())] = True
    starts = starts[:-1].reshape(shape)
    if not starts[:, 0].all():
        raise ValueError(f"{name}: a document crosses the end of a row; end each document within its row")
    starts[:, 0] = False
    return starts


def _one_mask(starts: np.ndarray | None, shape: tuple[int, int], *, join: bool) -> tuple[int, tuple[int, ...] | None]:
    """Return (rows, borders). If all rows have the same documents, keep the rows; else join them into one."""
    if starts is None:
        return shape[0], None
    begins = starts.copy()
    if not join and (begins == begins[:1]).all():
        begins, rows = begins[0], shape[0]
    else:
        begins[:, 0], rows = True, 1
        begins = begins.reshape(-1)
    begins[0] = True
    return rows, (*np.flatnonzero(begins).tolist(), len(begins))


def _rolled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rotate each row of [B, S, ...] to the right by its entry of ``by`` [B]."""
    by = by.to(x.device, non_blocking=True)[:, None]
    places = (torch.arange(x.shape[1], device=x.device) - by) % x.shape[1]
    return x[torch.arange(len(x), device=x.device)[:, None], places]
