"""The place in a stream of training sequences, as plain values: it knows nothing of ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checked import Checked


@dataclass(frozen=True)
class Cursor:
    """Where :meth:`burst_train.data.sequences.SequenceReader.training` is.

    Attributes:
        taken: sequences given out since the start of the run.
        epoch: how often all documents were read before.
        document: how many documents of the epoch were begun.
        used: tokens of the last of them that sequences hold already.
        digest: of that document's text, in hexadecimal digits; empty before the first.
        order: the state of the shuffle's generator.
        waiting: int32 [n, S], the sequences among which the next is drawn.
        borders: for each of them its ``cu_seqlens``, or None.
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
        """All but ``waiting``, which is kept as a tensor, and its shape."""
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
        """What :meth:`as_json` gave, and the waiting sequences.

        Raises:
            ValueError: it is not of that form; names the entry.
        """
        borders = content.value("borders", list)
        if len(borders) != len(waiting) or not all(_are_borders(each, waiting.shape[1]) for each in borders):
            raise content.wrong("borders", "must hold for each waiting sequence its documents' borders, or null")
        order = content.value("order", dict)
        try:
            np.random.default_rng(0).bit_generator.state = order
        except (TypeError, ValueError, KeyError, OverflowError):
            raise content.wrong("order", "must be the state of a PCG64 generator") from None
        return cls(
            taken=content.natural("taken"),
            epoch=content.natural("epoch"),
            document=content.natural("document"),
            used=content.natural("used"),
            digest=content.value("digest", str),
            order=order,
            waiting=waiting,
            borders=borders,
        )


def _are_borders(value: Any, length: int) -> bool:
    """Whether it is None, or whole numbers that rise from 0 to ``length``."""
    if value is None:
        return True
    if not isinstance(value, list) or not all(type(border) is int for border in value):
        return False
    return value[:1] == [0] and value[-1:] == [length] and all(x < y for x, y in itertools.pairwise(value))
