"""Check that a model's attention used the plan for each sharded batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..plan.cost import Shape
from ..plan.groups import Groups

MOST_CALLS = 16


class Usage:
    """The batches that a plan cut into shards, whether a model's attention used the plan for each, and calls' shapes.

    A model with another attention silently ignores its plan; the loss then refuses the batch's labels.
    """

    def __init__(self) -> None:
        self._batches = WeakIdKeyDictionary()  # tensor given out -> its batch: [whether an attention used the plan]
        self._latest = [True]  # nothing was given out yet, so nothing to refuse
        self._noted = False
        self.calls: dict[tuple[Shape, Groups], None] = {}  # the kinds of calls so far, the latest last

    def mark_sharded(self, positions: Tensor, labels: Tensor | None) -> None:
        """Record that a batch was cut into shards with these positions and labels."""
        self._latest = batch = [False]
        for tensor in (positions, labels):
            if tensor is not None:
                self._batches[tensor] = batch

    def note(self, positions: Any) -> None:
        """Record that an attention uses the plan for tokens at these positions; unknown ones mark every batch."""
        self._noted = True
        known = isinstance(positions, Tensor) and positions in self._batches
        for batch in [self._batches[positions]] if known else self._batches.values():
            batch[0] = True

    def note_kind(self, shape: Shape, groups: Groups) -> None:
        """Record a call's shape and how its heads were split."""
        self.calls.pop((shape, groups), None)  # another thread may do the same
        self.calls[shape, groups] = None
        for oldest in tuple(self.calls)[:-MOST_CALLS]:
            self.calls.pop(oldest, None)

    def note_call(self) -> None:
        """Record a call of the attention: by a model, which has noted its positions already, or directly."""
        if not self._noted:
            self.note(None)
        self._noted = False

    def check(self, labels: Tensor) -> None:
        """Raise ValueError if no attention has used the plan for the batch of these labels."""
        if not self._batch_of(labels)[0]:
            raise ValueError(
                "no attention has used the plan for this batch, so each rank attended to its own shard only; load the "
                'model with attn_implementation="burst" (or call model.set_attn_implementation) and pass it plan=plan'
            )

    def _batch_of(self, labels: Tensor) -> list[bool]:
        """Return the batch of these labels."""
        if labels in self._batches:
            return self._batches[labels]
        for given, batch in reversed(list(self._batches.items())):
            if given.shape == labels.shape and torch.equal(given.to(labels.device, labels.dtype), labels):
                return batch
        return self._latest
