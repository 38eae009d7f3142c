"""A position in a stream of training sequences, independent of ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checked import Checked


@dataclass(frozen=True)
class Cursor:
    """A position in the stream of :meth:`burst_train.data.sequences.SequenceReader.training`.

    Attributes:
        taken: sequences yielded since the start of the run.
        epoch: number of complete passes over all documents so far.
        document: number of documents started in this epoch.
        used: tokens of the last of these documents that are already in sequences.
        digest: hex digest of that document's text; empty before the first.
        order: state of the shuffle's random generator.
        waiting: int32 [n, S], the buffered sequences from which the next one is drawn.
        borders: ``cu_seqlens`` of each buffered sequence, or None.
    """

    taken: int
    epoch: int
    document: int
    used: int
    digest: str
    order: dict[str, Any]
    waiting: np.ndarray
    borders: list[list[int] | None]

    def as_json(self) -> dict[str, Any]:
        """Return all fields except ``waiting``, which is saved as a tensor."""
        return {
            "taken": self.taken,
            "epoch": self.epoch,
            "document": self.document,
            "used": self.used,
            "digest": self.digest,
            "order": self.order,
            "borders": self.borders,
        }

    @classmethod
    def from_json(cls, content: Checked, waiting: np.ndarray) -> Cursor:
        """Build a cursor from the result of :meth:`as_json` and the waiting sequences.

        Raises:
            ValueError: an entry is invalid; names the entry.
        """
        borders = content.value("borders", list)
        if len(borders) != len(waiting) or not all(_are_borders(each, waiting.shape[1]) for each in borders):
            raise content.wrong("borders", "must hold document borders, or null, for each waiting sequence")
        order = content.value("order", dict)
        try:
            np.random.default_rng(0).bit_generator.state = order
        except (TypeError, ValueError, KeyError, OverflowError):
            raise content.wrong("order", "must be the state of a PCG64 generator") from None
        return cls(
            taken=content.non_negative_int("taken"),
            epoch=content.non_negative_int("epoch"),
            document=content.non_negative_int("document"),
            used=content.non_negative_int("used"),
            digest=content.value("digest", str),
            order=order,
            waiting=waiting,
            borders=borders,
        )


def _are_borders(value: Any, length: int) -> bool:
    """Whether ``value`` is null, or increasing integers from 0 to ``length``."""
    if value is None:
        return True
    if not isinstance(value, list) or not all(type(border) is int for border in value):
        return False
    return value[:1] == [0] and value[-1:] == [length] and all(x < y for x, y in itertools.pairwise(value))
