"""Shards side by side: several owners' rows in one buffer, sorted by position, so that neighbours are one segment."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .layout import Layout
from .rows import Rows
from .waves import in_waves


class Slice:
    """The shards of ``owners``, the lowest position first. Of one owner it is the shard as it is.

    Args:
        chunks: into how many a shard is cut (:class:`~burst_attention.plan.waves.Chunks`).
    """

    def __init__(self, layout: Layout, owners: Iterable[int], *, chunks: int = 1) -> None:
        self.owners, self.chunks = tuple(owners), chunks
        # chunk, local offset, first position, length, stride
        table = in_waves(layout, chunks).table([owner * chunks + n for owner in self.owners for n in range(chunks)])
        if len(self.owners) > 1:
            table = table[np.argsort(table[:, 2], kind="stable")]
        lengths = table[:, 3]
        self._table, self._offsets = table, np.cumsum(lengths) - lengths
        self.length = int(lengths.sum())
        self._segments: dict[tuple[int, ...], np.ndarray] = {}

    def place(self, owner: int, rows: Rows) -> Rows:
        """Where local rows of ``owner``'s shard lie here."""
        if len(self.owners) == 1:
            return rows
        mine = self._table[:, 0] // self.chunks == owner
        begins, lengths, offsets = self._table[mine, 1], self._table[mine, 3], self._offsets[mine]
        first = np.searchsorted(begins, rows.starts, side="right") - 1  # the segments that an interval touches
        count = np.searchsorted(begins, rows.stops) - first
        at = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
        starts = np.maximum(np.repeat(rows.starts, count), begins[at])
        stops = np.minimum(np.repeat(rows.stops, count), begins[at] + lengths[at])
        shift = offsets[at] - begins[at]
        return Rows.of(starts + shift, stops + shift)

    def segments(self, chunks: tuple[int, ...]) -> np.ndarray:
        """int64 [N, 5], as :meth:`~burst_attention.plan.layout.Layout.table` gives, of these chunks' rows, by offset
        here; neighbours whose positions go on are joined."""
        if chunks not in self._segments:
            of_them = np.isin(self._table[:, 0], chunks)
            table = self._table[of_them].copy()
            table[:, 0], table[:, 1] = 0, self._offsets[of_them]
            self._segments[chunks] = _joined(table) if len(self.owners) > 1 else table
        return self._segments[chunks]


def _joined(table: np.ndarray) -> np.ndarray:
    """Segments that go on where the one before ends, in this buffer and in positions, as one."""
    if len(table) < 2:
        return table
    _, offset, first, length, stride = table.T
    goes_on = (offset[1:] == (offset + length)[:-1]) & (stride[1:] == stride[:-1])
    goes_on &= first[1:] == (first + length * stride)[:-1]
    starts = np.flatnonzero(np.r_[True, ~goes_on])
    joined = table[starts].copy()
    joined[:, 3] = np.add.reduceat(length, starts)
    return joined
