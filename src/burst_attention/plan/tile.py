"""Tiles: the parts of each (query shard x key shard) rectangle that the mask leaves visible.

For two segments of equal stride s, q - k = (q0 - k0) + s (i - j). So a band over global positions stays a band over
local indices. One call finds all tiles of all requested pairs, as one integer table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .band import band_area, tighten
from .chunks import Chunks
from .join import joined
from .layout import Layout
from .rows import Rows, runs


class Tile(NamedTuple):
    """Rows [q_start, q_stop) x columns [k_start, k_stop), seen where lo <= i - j <= hi from the corner.

    ``lo`` and ``hi`` are clamped to the diagonals that exist. Every row and every column has a visible pair. A tile is
    full iff ``lo == 1 - columns`` and ``hi == rows - 1``.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int

    @property
    def rows(self) -> int:
        return self.q_stop - self.q_start

    @property
    def columns(self) -> int:
        return self.k_stop - self.k_start

    @property
    def bounded_above(self) -> bool:
        """Whether ``lo`` masks later keys, as in a causal triangle."""
        return self.lo > 1 - self.columns

    @property
    def bounded_below(self) -> bool:
        """Whether ``hi`` masks earlier keys, as before a window."""
        return self.hi < self.rows - 1

    @property
    def full(self) -> bool:
        """Whether every row sees every column."""
        return not (self.bounded_above or self.bounded_below)

    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tile | None:
        """Return the visible part inside these rows and columns (from the tile's corner), or None."""
        (i, rows_stop), (j, columns_stop) = rows, columns
        lo, hi = self.lo - i + j, self.hi - i + j
        top, bottom, left, right, lo, hi = (int(x) for x in tighten(rows_stop - i, columns_stop - j, lo, hi))
        if bottom <= top or right <= left or hi < lo:
            return None
        q, k = self.q_start + i, self.k_start + j
        return Tile(q + top, q + bottom, k + left, k + right, lo, hi)


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of one pair: disjoint, int64 [T, 6] in :class:`Tile`'s order, sorted by query then key."""

    table: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Tile]:
        return (Tile(*row) for row in self.table.tolist())

    @property
    def q_rows(self) -> Rows:
        return Rows.of(self.table[:, 0], self.table[:, 1])

    @property
    def k_rows(self) -> Rows:
        return Rows.of(self.table[:, 2], self.table[:, 3])

    @property
    def area(self) -> int:
        """Number of seen (query, key) pairs."""
        q0, q1, k0, k1, lo, hi = self.table.T
        return int(band_area(q1 - q0, k1 - k0, lo, hi).sum())

    def packed(self, q_rows: Rows, k_rows: Rows) -> Tiles:
        """Return the same tiles for buffers that hold only ``q_rows`` and ``k_rows``."""
        q0, q1, k0, k1, lo, hi = self.table.T
        q, k = q_rows.locate(q0), k_rows.locate(k0)
        return Tiles(np.stack([q, q + q1 - q0, k, k + k1 - k0, lo, hi], axis=1))


def segment_tiles(q_segments: np.ndarray, k_segments: np.ndarray, regions: np.ndarray) -> dict[tuple[int, int], Tiles]:
    """Return the tiles between segments as in :meth:`Layout.table`, by the numbers in their owner column."""
    table = joined(_intersect(q_segments, k_segments, regions))
    cuts = np.flatnonzero(np.any(table[1:, :2] != table[:-1, :2], axis=1)) + 1
    parts = np.split(table, cuts) if len(table) else []
    return {(int(part[0, 0]), int(part[0, 1])): Tiles(part[:, 3:]) for part in parts}


def wanted_tiles(
    queries: Layout | Chunks, keys: Layout | Chunks, regions: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """Return sorted (query owner, key owner, tile), int64 [T, 8], of the ``wanted`` pairs of owners, bool [W, W]."""
    count = queries.world // len(wanted)
    owners: dict[tuple[int, ...], list[int]] = {}  # wanted key owners -> query owners that want exactly those
    for i in np.flatnonzero(wanted.any(1)).tolist():
        owners.setdefault(tuple(np.flatnonzero(wanted[i]).tolist()), []).append(i)
    tables = [
        _intersect(queries.table(_chunks(q_owners, count)), keys.table(_chunks(k_owners, count)), regions)
        for k_owners, q_owners in owners.items()
    ]
    tiles = joined(np.concatenate([np.empty((9, 0), np.int64), *(table.T for table in tables)], 1).T)
    return np.delete(tiles.T, 2, 0).T


def _chunks(owners: Sequence[int], count: int) -> Sequence[int]:
    """Return all chunks of these owners."""
    return owners if count == 1 else (np.asarray(owners)[:, None] * count + np.arange(count)).ravel().tolist()


def region_tiles(queries: Layout | Chunks, keys: Layout | Chunks, regions: np.ndarray) -> np.ndarray:
    """Return the tiles of all pairs before joining, int64 [T, 9]: query owner, key owner, region, then a tile."""
    return _intersect(queries.table(range(queries.world)), keys.table(range(queries.world)), regions)


def _ceil(a: np.ndarray, b: Any) -> np.ndarray:
    return -(-a // b)


def clip_segments(
    segments: np.ndarray, start: np.ndarray, stop: np.ndarray, stride: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return each segment's local index range inside its interval [start, stop) of positions."""
    first, count = segments[:, 2], segments[:, 3]
    return np.maximum(0, _ceil(start - first, stride)), np.minimum(count, _ceil(stop - first, stride))


def meeting(segments: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the (interval, segment) pairs that may share a position, without comparing all of many with all."""
    first, last = segments[:, 2], segments[:, 2] + (segments[:, 3] - 1) * segments[:, 4]
    order = np.argsort(first, kind="stable")
    low = np.searchsorted(np.maximum.accumulate(last[order]), start)
    count = np.maximum(0, np.searchsorted(first[order], stop) - low)
    return np.repeat(np.arange(len(start)), count), order[runs(low, count)]


def _intersect(q_segments: np.ndarray, k_segments: np.ndarray, regions: np.ndarray) -> np.ndarray:
    """Return the tiles of all segments, which have one stride, and regions: the owners, region, tile, int64 [T, 9]."""
    stride = max(q_segments[:, 4].max(initial=1), k_segments[:, 4].max(initial=1))  # a schedule has checked it
    region, q_at = meeting(q_segments, regions[:, 0], regions[:, 1])
    at, k_at = meeting(k_segments, regions[region, 2], regions[region, 3])
    region = region[at]
    q, k, bands = (x.T.take(n, 1).T for x, n in ((q_segments, q_at[at]), (k_segments, k_at), (regions, region)))
    i0, i1 = clip_segments(q, bands[:, 0], bands[:, 1], stride)
    j0, j1 = clip_segments(k, bands[:, 2], bands[:, 3], stride)
    shift = q[:, 2] - k[:, 2]
    lo = _ceil(bands[:, 4] - shift, stride) - i0 + j0  # counted from the rectangle's corner
    hi = (bands[:, 5] - shift) // stride - i0 + j0
    seen = (hi >= lo) & (i1 > i0) & (j1 > j0)
    top, bottom, left, right, lo, hi = tighten(i1 - i0, j1 - j0, lo, hi)
    q_base, k_base = q[:, 1] + i0, k[:, 1] + j0
    tile = (q_base + top, q_base + bottom, k_base + left, k_base + right, lo, hi)
    seen &= (bottom > top) & (right > left)
    return np.stack([x[seen] for x in (q[:, 0], k[:, 0], region, *tile)]).T  # each column is contiguous in memory
