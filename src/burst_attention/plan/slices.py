"""Several owners' shards in one buffer, sorted by position, so that adjacent segments join."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .chunks import in_chunks
from .layout import Layout
from .rows import Rows, runs


class Slice:
    """The shards of ``owners``, of ``chunks`` each, in one buffer, lowest position first; one shard keeps its order."""

    def __init__(self, layout: Layout, owners: Iterable[int], *, chunks: int = 1) -> None:
        self.owners, self.chunks = tuple(owners), chunks
        # chunk, local offset, first position, length, stride
        table = in_chunks(layout, chunks).table([owner * chunks + n for owner in self.owners for n in range(chunks)])
        if len(self.owners) > 1:
            table = table[np.argsort(table[:, 2], kind="stable")]
        lengths = table[:, 3]
        self._table, self._offsets = table, np.cumsum(lengths) - lengths
        self.length = int(lengths.sum())
        self._segments: dict[tuple[int, ...], np.ndarray] = {}
        self._owned: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # by owner: begins, lengths, offsets

    def place(self, owner: int, rows: Rows) -> Rows:
        """Return the places of local rows of ``owner``'s shard in this buffer."""
        if len(self.owners) == 1:
            return rows
        if owner not in self._owned:
            mine = self._table[:, 0] // self.chunks == owner
            self._owned[owner] = self._table[mine, 1], self._table[mine, 3], self._offsets[mine]
        begins, lengths, offsets = self._owned[owner]
        first = np.searchsorted(begins, rows.starts, side="right") - 1  # the segments that an interval touches
        count = np.searchsorted(begins, rows.stops) - first
        at = runs(first, count)
        starts = np.maximum(np.repeat(rows.starts, count), begins[at])
        stops = np.minimum(np.repeat(rows.stops, count), begins[at] + lengths[at])
        shift = offsets[at] - begins[at]
        return Rows.of(starts + shift, stops + shift)

    def segments(self, chunks: tuple[int, ...]) -> np.ndarray:
        """Return the joined segments of these chunks as in :meth:`Layout.table`; owner 0, offsets in this buffer."""
        if chunks not in self._segments:
            of_them = np.isin(self._table[:, 0], chunks)
            table = self._table[of_them].copy()
            table[:, 0], table[:, 1] = 0, self._offsets[of_them]
            self._segments[chunks] = _joined(table) if len(self.owners) > 1 else table
        return self._segments[chunks]


def _joined(table: np.ndarray) -> np.ndarray:
    """Join each segment with the next one if they are adjacent both in the buffer and in positions."""
    if len(table) < 2:
        return table
    _, offset, first, length, stride = table.T
    goes_on = (offset[1:] == (offset + length)[:-1]) & (stride[1:] == stride[:-1])
    goes_on &= first[1:] == (first + length * stride)[:-1]
    starts = np.flatnonzero(np.r_[True, ~goes_on])
    joined = table[starts].copy()
    joined[:, 3] = np.add.reduceat(length, starts)
    return joined
