"""A position in a stream of training sequences, independent of ranks."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field

from ..checked import Checked, Natural


def _generator_state(state: dict[str, Any]) -> dict[str, Any]:
    try:
        np.random.default_rng(0).bit_generator.state = state
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ValueError("must be the state of a PCG64 generator") from None
    return state


class Position(Checked):
    """The part of a cursor that JSON holds."""

    taken: Natural  # sequences yielded since the start of the run
    epoch: Natural  # complete passes over all documents
    document: Natural  # documents started in this epoch
    used: Natural  # tokens of the last of them that are in sequences
    digest: str  # of that document's text, in hex; empty before the first
    order: Annotated[dict[str, Any], AfterValidator(_generator_state)]  # the shuffle's generator
    borders: list[list[int] | None]  # ``cu_seqlens`` of each buffered sequence


class Cursor(Position):
    """A position in a stream of sequences. ``waiting``: int32 [n, S], the shuffle's buffer, saved as a tensor."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    waiting: np.ndarray = Field(exclude=True)

    @classmethod
    def at(cls, position: Position, waiting: np.ndarray) -> Cursor:
        """Return the cursor at a saved position; ValueError if its borders don't fit the waiting sequences."""
        borders = position.borders
        if len(borders) != len(waiting) or not all(_are_borders(each, waiting.shape[1]) for each in borders):
            raise ValueError("the cursor's 'borders' must hold document borders, or null, for each waiting sequence")
        return cls(**dict(position), waiting=waiting)


def _are_borders(value: list[int] | None, length: int) -> bool:
    """Whether ``value`` is None, or increasing integers from 0 to ``length``."""
    rises = value is None or all(x < y for x, y in itertools.pairwise(value))
    return value is None or (value[:1] == [0] and value[-1:] == [length] and rises)
