"""Chunks of the all-to-all: the rows of every shard that lie in one stretch of the sequence are sent together.

Under a causal mask a stretch of queries needs no later keys. So the results of a chunk are final, and go home while the
next chunk is on the wire. The forward starts at the front of the sequence and the backward at its end, so this holds
for all results. Source: the chunked all-to-all of FPDT (arXiv 2408.16978), which moves chunks to host memory instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .groups import Ranks
from .layout import Layout
from .rows import Direction, Rows


@dataclass(frozen=True)
class Chunks:
    """A layout's shards, each cut into ``count`` chunks by position.

    Chunk ``owner * count + n`` is ``owner``'s part of the n-th stretch of the sequence. Code that finds tiles takes it
    as a layout with one owner per chunk. Offsets still count from the start of the shard.
    """

    layout: Layout
    count: int

    @property
    def world(self) -> int:
        """Number of chunks."""
        return self.layout.world * self.count

    @cached_property
    def borders(self) -> np.ndarray:
        """Local rows at which each shard's chunks begin and end, int64 [W, count + 1]."""
        owner, _, first, count, stride = self.layout.table(range(self.layout.world)).T
        borders = np.zeros((self.count + 1, self.layout.world), np.int64)
        for n in range(1, self.count + 1):
            stop = self.layout.start + n * self.layout.seqlen // self.count
            below = np.clip(-((first - stop) // stride), 0, count)
            np.add.at(borders[n], owner, below)
        return borders.T

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each chunk."""
        return tuple(np.diff(self.borders, axis=1).ravel().tolist())

    def rows(self, owner: int, n: int) -> Rows:
        """Return the local rows of a chunk."""
        return Rows.of(self.borders[owner, n : n + 1], self.borders[owner, n + 1 : n + 2])

    def table(self, chunks: Sequence[int]) -> np.ndarray:
        """Return the segments of these chunks as :meth:`Layout.table` does, with chunks in place of owners."""
        numbers = np.asarray(chunks, np.int64)
        table = self.layout.table(np.unique(numbers // self.count).tolist())
        owner, offset, first, count, stride = (x[:, None] for x in table.T)
        borders = self.borders[table[:, 0]]
        start = np.maximum(offset, borders[:, :-1])
        stop = np.minimum(offset + count, borders[:, 1:])
        chunk = owner * self.count + np.arange(self.count)
        columns = (chunk, start, first + (start - offset) * stride, stop - start, stride + 0 * chunk)
        cut = np.stack(columns, 2).reshape(-1, 5)
        cut = cut[(cut[:, 3] > 0) & np.isin(cut[:, 0], numbers)]
        return cut[np.argsort(cut[:, 0], kind="stable")]


def turn_of(chunk: Ranks, chunks: int, direction: Direction) -> Ranks:
    """Return a chunk's place in the exchange: a forward starts with a shard's first rows, a backward with the last."""
    place = chunk % chunks
    return place if direction is Direction.FORWARD else chunks - 1 - place


def in_chunks(layout: Layout, count: int) -> Layout | Chunks:
    """Return ``layout`` cut into chunks, or unchanged if ``count`` is 0 or 1."""
    return Chunks(layout, count) if count > 1 else layout
