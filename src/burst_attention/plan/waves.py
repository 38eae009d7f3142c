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
    """A layout's shards, each in ``waves`` chunks: chunk ``owner * waves + n`` is ``owner``'s part of the n-th stretch.

    To tiles it is a layout of as many owners as there are chunks; offsets are those of the shards.
    """

    layout: Layout
    waves: int

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def world(self) -> int:
        """How many chunks there are."""
        return self.layout.world * self.waves

    @cached_property
    def borders(self) -> np.ndarray:
        """int64 [W, waves + 1]: the local rows where each shard's chunks begin and end."""
        owner, _, first, count, stride = self.layout.table(range(self.layout.world)).T
        borders = np.zeros((self.waves + 1, self.layout.world), np.int64)
        for n in range(1, self.waves + 1):
            stop = n * self.layout.seqlen // self.waves
            below = np.clip(-((first - stop) // stride), 0, count)
            np.add.at(borders[n], owner, below)
        return borders.T

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each chunk has."""
        return tuple(np.diff(self.borders, axis=1).ravel().tolist())

    def rows(self, owner: int, n: int) -> Rows:
        """Local rows of a chunk."""
        return Rows.of(self.borders[owner, n : n + 1], self.borders[owner, n + 1 : n + 2])

    def table(self, chunks: Sequence[int]) -> np.ndarray:
        """As :meth:`Layout.table`, of these chunks, in place of owners."""
        asked = np.asarray(chunks, np.int64)
        table = self.layout.table(np.unique(asked // self.waves).tolist())
        owner, offset, first, count, stride = (x[:, None] for x in table.T)
        borders = self.borders[table[:, 0]]
        start = np.maximum(offset, borders[:, :-1])
        stop = np.minimum(offset + count, borders[:, 1:])
        chunk = owner * self.waves + np.arange(self.waves)
        columns = (chunk, start, first + (start - offset) * stride, stop - start, stride + 0 * chunk)
        cut = np.stack(columns, 2).reshape(-1, 5)
        cut = cut[(cut[:, 3] > 0) & np.isin(cut[:, 0], asked)]
        return cut[np.argsort(cut[:, 0], kind="stable")]


def wave_of(chunk: Ranks, chunks: int, direction: Direction) -> Ranks:
    """By which wave it comes, of ``chunks`` to a shard: the first rows first, in a backward the last."""
    place = chunk % chunks
    return place if direction is Direction.FORWARD else chunks - 1 - place


def in_waves(layout: Layout, waves: int) -> Layout | Chunks:
    """``layout``'s shards cut so; one wave, or none, cuts nothing."""
    return Chunks(layout, waves) if waves > 1 else layout
