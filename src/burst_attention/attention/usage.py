"""Whether the attention over ranks has seen what a plan cut into shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Usage:
    """Which batches a plan cut into shards, and whether a model's attention took the plan for them.

    A model whose attention is another one ignores its plan without a word: each rank then sees its shard alone. What
    notices is that a loss of several ranks is asked for shards that no attention over the ranks has seen.
    """

    def __init__(self) -> None:
        self._batches = WeakIdKeyDictionary()  # tensors given out, each with its batch: [whether it was attended to]
        self._latest = [True]  # nothing was given out
        self._noted = False

    def give_out(self, positions: Tensor, labels: Tensor | None) -> None:
        """A batch was cut into shards, with these positions and labels."""
        self._latest = batch = [False]
        for tensor in (positions, labels):
            if tensor is not None:
                self._batches[tensor] = batch

    def note(self, positions: Any) -> None:
        """A model's attention takes the plan for tokens at these positions; copies of them may be of any batch."""
        self._noted = True
        known = isinstance(positions, Tensor) and positions in self._batches
        for batch in [self._batches[positions]] if known else self._batches.values():
            batch[0] = True

    def note_call(self) -> None:
        """An attention over the ranks was called: by a model's, which has noted its positions, or by itself."""
        if not self._noted:
            self.note(None)
        self._noted = False

    def check(self, labels: Tensor) -> None:
        """Raise ValueError if these labels' batch was given out, and no attention has taken the plan for it."""
        if not self._batch_of(labels)[0]:
            raise ValueError(
                "no attention has taken the plan for this batch, so each rank has seen its shard alone; load the model "
                'with attn_implementation="burst" (or call model.set_attn_implementation) and pass it plan=plan'
            )

    def _batch_of(self, labels: Tensor) -> list[bool]:
        """That of these labels; of labels that were moved or copied that with the same values, else the latest."""
        if labels in self._batches:
            return self._batches[labels]
        for given, batch in reversed(list(self._batches.items())):
            if given.shape == labels.shape and torch.equal(given.to(labels.device, labels.dtype), labels):
                return batch
        return self._latest
