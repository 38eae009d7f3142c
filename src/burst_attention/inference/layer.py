"""One layer of a cache over ranks: the keys and values that this rank holds, or a recurrent layer's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionLayer

from burst_attention.attention.batch import Chunked, Reach
from burst_attention.attention.dealt import Seen
from burst_attention.attention.plan import Plan

from .slots import PAGE, Held, Hole, first_needed, ranges_of

SHARED = ("pools", "columns")  # of a layer whose indexer pools keys
_NO_BEAMS = "a cache over ranks can't be reordered; generate greedily or by sampling"


@dataclass
class Filling:
    """What an update of a layer does: ``slots`` of the new tokens, as an array in a prefill, else as this rank's."""

    plan: Plan | None
    slots: Any
    first: int
    stop: int
    seen: dict[Reach, list[Seen]] = field(default_factory=dict)  # layers of one reach hold the same slots
    places: dict[Reach, Tensor] = field(default_factory=dict)  # int64, the slots that they hold
    keys: dict[int, Tensor] = field(default_factory=dict)  # that layers got in this step, by number
    attends: bool = False  # whether a layer has got its keys, but has not attended to them

    @cached_property
    def order(self) -> np.ndarray | None:
        """In a prefill: where the new tokens are, in the order of their slots; None if they are in that order."""
        order = np.argsort(self.slots, kind="stable")
        return order if (order[1:] < order[:-1]).any() else None

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's part of new tokens [B, H, n, D], in the order of their slots."""
        if self.plan is None:
            parts = [x[:, :, part.start - self.first : part.stop - self.first] for part in self.slots]
            return parts[0] if len(parts) == 1 else torch.cat([x[:, :, :0], *parts], 2)
        if self.order is None:
            return x
        return x.index_select(2, torch.from_numpy(self.order).to(x.device, non_blocking=True))


class _Fixed:
    """Refuses what reorders a cache or rolls it back."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse beam search."""
        raise ValueError(f"num_beams: {_NO_BEAMS}")

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to roll back, which assisted decoding needs."""
        raise ValueError(f"crop({tokens_to_remove}): a cache over ranks can't be rolled back; make a new one")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse to expand the batch."""
        raise ValueError(f"batch_repeat_interleave({repeats}): {_NO_BEAMS}")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refuse to select rows of the batch."""
        raise ValueError(f"batch_select_indices: {_NO_BEAMS}")


class EmptyLayer(DummyLayer):
    """A layer that mixes no tokens, such as one of experts alone."""

    sees = "nothing"


class SharingLayer(EmptyLayer):
    """A layer that attends to the keys and values of an earlier one, ``source``."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self.source, self.sees = source, f"the keys of layer {source}"


class StateLayer(_Fixed, LinearAttentionLayer):
    """The state of a recurrent layer and the last inputs of its convolution, whole on every rank."""

    sees = "a state"

    def tensors(self) -> dict[str, Tensor]:
        """Return what is stored, by name."""
        states = {"columns": self.conv_states[0], "state": self.recurrent_states[0]}
        return {name: x for name, x in states.items() if x is not None}

    def nbytes(self) -> int:
        """Return the bytes of the state and of the inputs."""
        return sum(x.nbytes for x in self.tensors().values())

    def move(self, device: torch.device) -> None:
        """Move what is stored to a device."""
        if not self.tensors():
            return
        self.device = device  # type: ignore[assignment]  # None until there are states
        for states in (self.conv_states, self.recurrent_states):
            states[0] = None if states[0] is None else states[0].to(device)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.__init__(self)


class ShardedLayer(_Fixed, CacheLayerMixin):
    """This rank's keys and values of one layer, in the order of their slots, without those out of ``reach``.

    ``keys`` [B, Hkv, capacity, D] and ``values`` [B, Hkv, capacity, Dv] hold ``len(held)`` tokens, and room for more.
    """

    keys: Tensor | None
    values: Tensor | None

    @property
    def sees(self) -> str:
        """What the layer's queries see, for errors and files."""
        return shown_reach(self.reach)

    def __init__(self, reach: Reach = None) -> None:
        super().__init__()
        self.reach = reach
        self.held = Held()
        self.length = 0  # slots of all ranks
        self.is_sliding = reach is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing yet; remember heads, dims, dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse: only a parallelized model fills the cache, which knows the slots of its tokens."""
        raise _not_parallelized()

    def get_seq_length(self) -> int:
        """Return the number of columns of the whole cache, on all ranks."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a mask over all ranks, which is described but never built."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the layer grows without a bound."""
        return -1

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Return keys [B, Hkv, held, D] and values [B, Hkv, held, Dv], as views."""
        assert self.keys is not None and self.values is not None
        return self.keys[:, :, : len(self.held)], self.values[:, :, : len(self.held)]

    def store(self, key: Tensor, value: Tensor, slots: np.ndarray) -> None:
        """Append tokens of any ascending slots; the room behind them is exact."""
        self._grow(key, value, room=0)
        for part in ranges_of(slots):
            self.held.append(part)

    def append(self, key: Tensor, value: Tensor, slots: Sequence[range], first: int) -> None:
        """Append those of new tokens, of slots from ``first`` on, that this rank holds."""
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        for stretch in slots:
            part = slice(stretch.start - first, stretch.stop - first)
            self._grow(key[:, :, part], value[:, :, part], room=PAGE)
            self.held.append(stretch)

    def forget(self, holes: Sequence[Hole], slot: int, *, least: int = PAGE) -> None:
        """Drop what no query from ``slot`` on sees, once it is ``least`` tokens or more."""
        if self.reach is None or not self.is_initialized:
            return
        count = self.held.below(first_needed(slot, self.reach, holes))
        if count >= max(1, least):
            keys, values = self.tokens()
            self.keys, self.values = (x[:, :, count:].clone() for x in (keys, values))
            self.held.drop(count)

    def nbytes(self) -> int:
        """Return the bytes of keys and values on this rank, with the room for more."""
        return sum(x.nbytes for x in (self.keys, self.values) if x is not None)

    def move(self, device: torch.device) -> None:
        """Move what is stored to a device."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values, self.device = self.keys.to(device), self.values.to(device), device

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = None
        self.is_initialized, self.held, self.length = False, Held(), 0

    def _grow(self, key: Tensor, value: Tensor, *, room: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        used = len(self.held)
        assert self.keys is not None and self.values is not None
        self.keys, self.values = _appended(self.keys, key, used, room), _appended(self.values, value, used, room)


class IndexedLayer(ShardedLayer):
    """A layer whose queries attend to keys that an indexer chose; it holds the indexer's keys of the same tokens.

    ``index`` [B, 1, capacity, D]; None in a layer that takes the choice of one before. ``blocks``: the indexer chooses
    blocks of keys, counted from the first slot. ``pool``: keys of a pool, if it chooses among pools; else 0. Every
    rank then has the keys of all ``pools`` [B, n, D] and the last tokens' states, ``columns`` [B, C, pool], in place of
    ``index``.
    """

    def __init__(self, *, blocks: bool = False, pool: int = 0) -> None:
        super().__init__()
        self.blocks, self.pool = blocks, pool
        self.index: Tensor | None = None
        self.pools: Tensor | None = None
        self.columns: Tensor | None = None
        self.filling: Filling | None = None  # of the tokens whose keys came last

    def update_index(self, keys: Tensor) -> Tensor:
        """Take the indexer's keys [B, 1, n, D] of the tokens whose keys came last.

        Returns the keys that their queries choose among. MiniMax M3 calls this, others :meth:`update_indexer`.
        """
        now = self.filling
        if now is None:
            raise _not_parallelized()
        own = now.own(keys)
        self.add_index(own, room=PAGE if now.plan is None else 0)
        # No query sees the keys that a rank without any returns.
        return keys if (now.plan is not None and not now.first) or not len(self.held) else self.indexed()

    def update_indexer(self, keys: Tensor) -> Tensor:
        """See :meth:`update_index`; of [B, n, D]."""
        return self.update_index(keys.unsqueeze(1)).squeeze(1)

    def add_index(self, own: Tensor, *, room: int = 0) -> None:
        """Append the indexer's keys of the last tokens that this rank holds."""
        index = own.new_empty(*own.shape[:2], 0, own.shape[3]) if self.index is None else self.index
        self.index = _appended(index, own, len(self.held) - own.shape[2], room)

    def indexed(self) -> Tensor:
        """Return the indexer's keys [B, 1, held, D], as a view."""
        assert self.index is not None
        return self.index[:, :, : len(self.held)]

    def shared(self) -> dict[str, Tensor]:
        """Return what every rank holds, by name."""
        return {name: x for name in SHARED if (x := getattr(self, name)) is not None}

    def nbytes(self) -> int:
        """Return the bytes of keys, values and the indexer's keys on this rank, with the room for more."""
        return super().nbytes() + sum(x.nbytes for x in (self.index, self.pools, self.columns) if x is not None)

    def move(self, device: torch.device) -> None:
        """Move what is stored to a device."""
        super().move(device)
        for name in ("index", *SHARED):
            setattr(self, name, None if (x := getattr(self, name)) is None else x.to(device))

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.index = self.pools = self.columns = self.filling = None


class IndexLayer(IndexedLayer):
    """The indexer's keys alone, of a layer that attends to the keys of an earlier one, ``source``."""

    def __init__(self, source: int, owner: ShardedLayer) -> None:
        super().__init__()
        self.source, self.owner, self.held = source, owner, owner.held

    @property
    def sees(self) -> str:
        """What the layer's queries see, for errors and files."""
        return f"the keys of layer {self.source}"

    def reset(self) -> None:
        """Forget all tokens, after the source has."""
        super().reset()
        self.held = self.owner.held


def _not_parallelized() -> ValueError:
    return ValueError(
        "the model got a ShardedCache as its cache, but is not parallelized; call hf.parallelize(model) first"
    )


def _appended(held: Tensor, new: Tensor, used: int, room: int) -> Tensor:
    """Return [B, H, capacity, D] with new tokens behind the ``used`` ones, in place unless it has to grow."""
    stop = used + new.shape[2]
    if stop > held.shape[2]:
        grown = held.new_empty(*held.shape[:2], stop + room, held.shape[3])
        grown[:, :, :used] = held[:, :, :used]
        held = grown
    held[:, :, used:stop] = new
    return held


def shown_reach(reach: Reach) -> str:
    """Return a reach for errors and files."""
    if isinstance(reach, Chunked):
        return f"chunks of {reach.size}"
    return "all" if reach is None else f"a window of {reach}"
