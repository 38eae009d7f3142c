"""Sides of a pair, directions of a call, and sets of local rows.

A set holds the rows of a shard that some tile touches. It also finds their places in a packed buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

Where = slice | np.ndarray  # positions in a buffer: a slice if they are consecutive, else an int64 index


class Side(Enum):
    """The two sides of a pair."""

    QUERY = "query"
    KEY = "key"

    # Every call looks up many dictionaries of sides: Enum's own hash is a function in Python.
    __hash__ = object.__hash__


class Direction(Enum):
    """The two passes of a call."""

    FORWARD = "forward"
    BACKWARD = "backward"

    __hash__ = object.__hash__

    @property
    def returns(self) -> tuple[Side, ...]:
        """Sides that get partial results: (out, lse) in a forward; dQ, and dK with dV, in a backward."""
        return (Side.QUERY,) if self is Direction.FORWARD else tuple(Side)


class Payload(Enum):
    """Which of a side's tensors a message carries."""

    ALL = "all"
    INPUTS = "inputs"  # q, or k and v
    GRADIENTS = "gradients"  # the rest of a backward's query side: dO, lse and D
    OUTPUT_GRADIENT = "output-gradient"  # dO alone


@dataclass(frozen=True, eq=False)
class Rows:
    """A set of rows as sorted, disjoint, non-adjacent intervals ``[starts[n], stops[n])``."""

    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, starts: np.ndarray, stops: np.ndarray) -> Rows:
        """Return the union of intervals in any order."""
        keep = stops > starts
        if not keep.all():
            starts, stops = starts[keep], stops[keep]
        if len(starts) < 2:
            return cls(starts, stops)
        if (starts[1:] < starts[:-1]).any():
            order = np.argsort(starts, kind="stable")
            starts, stops = starts[order], stops[order]
        reach = np.maximum.accumulate(stops)
        apart = starts[1:] > reach[:-1]  # separate from the interval before
        return cls(np.concatenate([starts[:1], starts[1:][apart]]), np.concatenate([reach[:-1][apart], reach[-1:]]))

    @classmethod
    def all(cls, count: int) -> Rows:
        """Return rows 0 to ``count`` - 1."""
        return cls.of(np.array([0]), np.array([count]))

    @classmethod
    def union(cls, many: Iterable[Rows]) -> Rows:
        """Return the rows that are in any of ``many``."""
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

    @cached_property
    def count(self) -> int:
        """Number of rows."""
        return int(self._offsets[-1])

    def locate(self, rows: np.ndarray) -> np.ndarray:
        """Return the places of rows of this set once the set is packed."""
        at = np.searchsorted(self.starts, rows, side="right") - 1
        return self._offsets[at] + rows - self.starts[at]

    def within(self, packed: Rows) -> Where:
        """Return the places of this set in a buffer that holds ``packed``, a superset."""
        begins = packed.locate(self.starts)
        sizes = self.stops - self.starts
        if not len(begins):
            return slice(0, 0)
        if np.all(begins[1:] == begins[:-1] + sizes[:-1]):
            return slice(int(begins[0]), int(begins[-1] + sizes[-1]))
        return np.repeat(begins - self._offsets[:-1], sizes) + np.arange(self.count)


@dataclass(frozen=True, eq=False)
class Union:
    """Sets of rows, one for each of ``keys`` (int [N], ascending), as arrays because there may be many."""

    keys: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    _cuts: np.ndarray  # where each key's intervals begin, and their end

    @classmethod
    def of(cls, keys: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Union:
        """Unite the intervals [starts[n], stops[n]) of each key. They come in any order, and must not be empty."""
        apart = int(stops.max(initial=0)) + 1  # keeps the intervals of different keys apart
        if (keys[1:] < keys[:-1]).any():  # stable: tables come in a few ascending runs, which are merged
            order = np.argsort(keys, kind="stable")
            keys, starts, stops = keys[order], starts[order], stops[order]
        another = np.r_[True, keys[1:] != keys[:-1]][: len(keys)]
        unique, at = keys[another], np.cumsum(another) - 1
        rows = Rows.of(starts + at * apart, stops + at * apart)
        which = rows.starts // apart
        shift = which * apart
        return cls(unique, rows.starts - shift, rows.stops - shift, np.searchsorted(which, np.arange(len(unique) + 1)))

    @property
    def counts(self) -> np.ndarray:
        """Number of rows of each key."""
        return np.diff(np.r_[0, np.cumsum(self.stops - self.starts)][self._cuts])

    @property
    def intervals(self) -> np.ndarray:
        """Number of intervals of each key."""
        return np.diff(self._cuts)

    def under(self, keys: np.ndarray) -> Union:
        """Unite the sets that have the same of these new keys, int [N]."""
        return Union.of(np.repeat(keys, self.intervals), self.starts, self.stops)

    def sets(self) -> Iterator[tuple[int, Rows]]:
        """Yield each key with its rows."""
        for n, key in enumerate(self.keys.tolist()):
            cut = slice(self._cuts[n], self._cuts[n + 1])
            yield key, Rows(self.starts[cut], self.stops[cut])


def runs(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return counts[0] integers from begins[0] on, then counts[1] from begins[1] on, and so on."""
    return np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
