"""Runs: the stretches of neighbouring tokens of one document that each rank holds. Integers only."""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..plan.layout import Layout


@dataclass(frozen=True)
class Run:
    """``length`` neighbouring tokens of one document on rank ``owner``.

    Attributes:
        offset: the local index of the first token.
        first: its global position.
        start, stop: the borders of its document.
    """

    owner: int
    offset: int
    first: int
    length: int
    start: int
    stop: int

    @property
    def begins(self) -> bool:
        """Whether the document begins here, so that nothing comes in."""
        return self.first == self.start

    @property
    def ends(self) -> bool:
        """Whether the document ends here, so that nothing goes out."""
        return self.first + self.length == self.stop

    @property
    def local(self) -> slice:
        """The run's local indices."""
        return slice(self.offset, self.offset + self.length)


@dataclass(frozen=True)
class GivenRows:
    """Rows that several ranks give, in a common order: row i comes from rank ``owners[i]``."""

    owners: tuple[int, ...]
    world: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of rows of each rank."""
        return tuple(len(self.positions(rank)) for rank in range(self.world))

    @cached_property
    def gather_order(self) -> np.ndarray:
        """Index of each row in the concatenation of all ranks' rows, int64 [N]."""
        order = np.empty(len(self.owners), np.int64)
        order[np.concatenate([self.positions(rank) for rank in range(self.world)])] = np.arange(len(self.owners))
        return order

    def positions(self, rank: int) -> np.ndarray:
        """Return the indices of the rows of one rank, int64."""
        return np.flatnonzero(np.asarray(self.owners, np.int64) == rank)

    @property
    def seqlen(self) -> int:
        """Number of rows of all ranks."""
        return len(self.owners)

    @cached_property
    def description(self) -> str:
        """A text that is equal on two ranks only if the rows are."""
        return f"rows (digest {hashlib.blake2b(repr(self.owners).encode(), digest_size=8).hexdigest()})"


@dataclass(frozen=True)
class Runs:
    """The runs of all ranks in the order of the sequence, as seen by ``rank``."""

    every: tuple[Run, ...]
    rank: int
    world: int

    @cached_property
    def own(self) -> tuple[Run, ...]:
        """The runs of this rank, in local order."""
        return tuple(sorted((run for run in self.every if run.owner == self.rank), key=lambda run: run.offset))

    @cached_property
    def pairs(self) -> GivenRows:
        """The runs whose document goes on behind them: each gives the state after it."""
        return GivenRows(tuple(run.owner for run in self.every if not run.ends), self.world)

    @functools.lru_cache(maxsize=8)  # noqa: B019  # the runs themselves are in a bounded cache
    def borders(self, width: int) -> tuple[GivenRows, list[int], list[list[int]]]:
        """Return what a convolution needs that reads the ``width`` tokens before each token.

        Returns:
            The rows that ranks exchange; the local indices of this rank's; for each own run the indices, among all
            rows, of the ``width`` tokens before it. -1 stands for a token before the document, which is zero.
        """
        sent = [
            (run, token)
            for run in self.every
            if not run.ends
            for token in range(max(run.first, run.first + run.length - width), run.first + run.length)
        ]
        place = {token: n for n, (_, token) in enumerate(sent)}
        own = [run.offset + token - run.first for run, token in sent if run.owner == self.rank]
        before = [
            [place[token] if token >= run.start else -1 for token in range(run.first - width, run.first)]
            for run in self.own
        ]
        return GivenRows(tuple(run.owner for run, _ in sent), self.world), own, before

    def bytes(self, rows: GivenRows, row_bytes: int) -> tuple[int, int]:
        """Return (sent, received) payload bytes of this rank in one gather of ``rows``; its backward swaps them."""
        own = rows.lengths[self.rank]
        return own * (self.world - 1) * row_bytes, (rows.seqlen - own) * row_bytes


@functools.lru_cache(maxsize=64)
def runs_of(layout: Layout, borders: Sequence[int] | None, rank: int) -> Runs:
    """Return the runs of a layout with these document borders (None: one document).

    Raises:
        ValueError: the layout separates neighbouring tokens.
    """
    if any(stride != 1 and count > 1 for *_, count, stride in layout.table(range(layout.world)).tolist()):
        raise ValueError(
            f"layout={layout.name!r} separates neighbouring tokens, but recurrent layers and convolutions pass a state "
            "from token to token; use Strategy(layout='zigzag') or 'contiguous'"
        )
    documents, every = borders or (0, layout.seqlen), []
    for owner, offset, first, count in _joined(layout):
        at = first
        while at < first + count:
            place = bisect.bisect_right(documents, at)
            start, stop = documents[place - 1], documents[place]
            until = min(first + count, stop)
            every.append(Run(owner, offset + at - first, at, until - at, start, stop))
            at = until
    return Runs(tuple(every), rank, layout.world)


def _joined(layout: Layout) -> list[tuple[int, int, int, int]]:
    """Return (owner, local offset, first position, length) of all segments in order, with adjacent ones joined."""
    joined: list[tuple[int, int, int, int]] = []
    for owner, offset, first, count, _ in sorted(layout.table(range(layout.world)).tolist(), key=lambda row: row[2]):
        if joined:
            last_owner, last_offset, last_first, length = joined[-1]
            if (last_owner, last_offset + length, last_first + length) == (owner, offset, first):
                joined[-1] = (owner, last_offset, last_first, length + count)
                continue
        joined.append((owner, offset, first, count))
    return joined
