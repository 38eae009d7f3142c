"""A position in a stream of training sequences, independent of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from ..checked import Checked, Natural


class Position(Checked):
    """The part of a cursor that JSON holds."""

    taken: Natural  # sequences yielded since the start of the run
    epoch: Natural  # complete passes over all documents
    document: Natural  # documents started in this epoch
    used: Natural  # tokens of the last of them that are in sequences
    digest: str  # of that document's text, in hex; empty before the first
    order: dict[str, Any]  # the shuffle's generator
    borders: list[list[int] | None]  # ``cu_seqlens`` of each buffered sequence


class Cursor(Position):
    """A position in a stream of sequences. ``waiting``: int32 [n, S], the shuffle's buffer, saved as a tensor."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    waiting: np.ndarray = Field(exclude=True)
