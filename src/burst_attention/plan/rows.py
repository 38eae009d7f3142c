"""The sides of a pair, the directions of a call, and sets of local rows: what of a shard some tile touches, and where
it lies once packed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

Where = slice | np.ndarray  # positions in a buffer: a slice where they are consecutive, else an int64 index


class Side(Enum):
    """The two sides of a pair."""

    QUERY = "query"
    KEY = "key"


class Direction(Enum):
    """The two passes of a call."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def returns(self) -> tuple[Side, ...]:
        """The sides for which computing a pair gives partial results: (out, lse); or dQ, and dK with dV."""
        return (Side.QUERY,) if self is Direction.FORWARD else tuple(Side)


@dataclass(frozen=True, eq=False)
class Rows:
    """A set of rows as sorted, disjoint, non-adjacent intervals ``[starts[n], stops[n])``."""

    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, starts: np.ndarray, stops: np.ndarray) -> Rows:
        """The union of intervals, given in any order."""
        keep = stops > starts
        starts, stops = starts[keep], stops[keep]
        if len(starts) < 2:
            return cls(starts, stops)
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        reach = np.maximum.accumulate(stops)
        apart = starts[1:] > reach[:-1]  # from the interval before
        return cls(np.concatenate([starts[:1], starts[1:][apart]]), np.concatenate([reach[:-1][apart], reach[-1:]]))

    @classmethod
    def all(cls, count: int) -> Rows:
        """Rows 0 to ``count`` - 1."""
        return cls.of(np.array([0]), np.array([count]))

    @classmethod
    def union(cls, many: Iterable[Rows]) -> Rows:
        parts = list(many)
        empty = np.empty(0, np.int64)
        return cls.of(
            np.concatenate([empty, *(p.starts for p in parts)]), np.concatenate([empty, *(p.stops for p in parts)])
        )

    @cached_property
    def _offsets(self) -> np.ndarray:
        offsets = np.zeros(len(self.starts) + 1, np.int64)
        np.cumsum(self.stops - self.starts, out=offsets[1:])
        return offsets

    @property
    def count(self) -> int:
        return int(self._offsets[-1])

    def locate(self, rows: np.ndarray) -> np.ndarray:
        """Where rows of this set lie once it is packed: their rank within it."""
        at = np.searchsorted(self.starts, rows, side="right") - 1
        return self._offsets[at] + rows - self.starts[at]

    def within(self, packed: Rows) -> Where:
        """Where this set lies in a buffer that holds ``packed``, a set around it."""
        begins = packed.locate(self.starts)
        sizes = self.stops - self.starts
        if not len(begins):
            return slice(0, 0)
        if np.all(begins[1:] == begins[:-1] + sizes[:-1]):
            return slice(int(begins[0]), int(begins[-1] + sizes[-1]))
        return np.repeat(begins - self._offsets[:-1], sizes) + np.arange(self.count)
