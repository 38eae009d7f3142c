"""What all stores have in common: they keep copies of tensors outside the device's memory."""

from __future__ import annotations

from torch import Tensor

MOST_WRITES = 2  # copies under way: a layer's input is written while this layer and the next one run
ELSEWHERE = "pass another folder in memory=Memory(offload='disk:DIR')"  # the remedy of most errors


class OffloadError(RuntimeError):
    """A copy could not be written, or could not be read back unchanged. The message names the file and the remedy."""


def check_unchanged(x: Tensor, version: int) -> None:
    """Raise OffloadError if ``x`` was written to since its version counter was ``version``."""
    if x._version != version:
        raise OffloadError(
            f"a tensor of {list(x.shape)} was changed in place while it was copied. A layer must not change its input; "
            "clone it first, or pass memory=Memory(offload=None)"
        )
