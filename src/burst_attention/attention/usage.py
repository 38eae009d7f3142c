"""Whether the attention over ranks has seen what a plan cut into shards."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Usage:
    """Which batches a plan cut into shards, and whether a model's attention took the plan for them.

    A model whose attention is another one ignores its plan without a word: each rank then sees its shard alone. What
    notices is that a loss of several ranks is asked for shards that no attention over the ranks has seen.
    """

    def __init__(self) -> None:
        self._batches = WeakIdKeyDictionary()  # tensors given out, each with its batch: [whether it was attended to]
        self._given = self._attended = False

    def give_out(self, positions: Tensor, labels: Tensor | None) -> None:
        """A batch was cut into shards, with these positions and labels."""
        self._given, batch = True, [False]
        for tensor in (positions, labels):
            if tensor is not None:
                self._batches[tensor] = batch

    def note(self, positions: Any) -> None:
        """An attention takes the plan for tokens at these positions; copies of those given out may be of any batch."""
        self._attended = True
        known = isinstance(positions, Tensor) and positions in self._batches
        for batch in [self._batches[positions]] if known else self._batches.values():
            batch[0] = True

    def check(self, labels: Tensor) -> None:
        """Raise ValueError if these labels' batch was given out, and no attention has taken the plan for it."""
        attended = self._batches[labels][0] if labels in self._batches else self._attended or not self._given
        if not attended:
            raise ValueError(
                "no attention has taken the plan for this batch, so each rank has seen its shard alone; load the model "
                'with attn_implementation="burst" (or call model.set_attn_implementation) and pass it plan=plan'
            )
