"""The contract of a store: it keeps copies of tensors outside the device's memory."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

MOST_WRITES = 2  # a layer's input is written while this layer and the next one run
ELSEWHERE = "pass another folder in memory=Memory(offload='disk:DIR')"  # the remedy of most errors


class OffloadError(RuntimeError):
    """A copy could not be written, or could not be read back unchanged. The message names the file and the remedy."""


class Store(Protocol):
    """Keeps copies of tensors. One thread at a time uses a store.

    At most ``MOST_WRITES`` tensors wait to be copied, and at most one is read ahead.
    """

    def put(self, x: Tensor) -> Any:
        """Start to copy ``x``; return a ticket. Wait first while ``MOST_WRITES`` copies are under way.

        Nothing may change ``x`` afterwards.

        Raises:
            OffloadError: there is no space, or an earlier copy failed.
            ValueError: the store can't keep tensors of this device.
        """

    def fetch(self, ticket: Any) -> None:
        """Start to read the tensor ahead. A tensor that was read ahead and not taken is dropped."""

    def get(self, ticket: Any) -> Tensor:
        """Return a new tensor with the bits, shape, dtype and device of ``x`` and without a gradient.

        Raises:
            OffloadError: the copy failed, or it can't be read, or its bits have changed.
        """

    def free(self, ticket: Any) -> None:
        """Let the space be used again. Never wait and never raise: garbage collection calls it at any time."""


def check_unchanged(x: Tensor, version: int) -> None:
    """Raise OffloadError if ``x`` was written to since its version counter was ``version``."""
    if x._version != version:
        raise OffloadError(
            f"a tensor of {list(x.shape)} was changed in place while it was copied. A layer must not change its input; "
            "clone it first, or pass memory=Memory(offload=None)"
        )
