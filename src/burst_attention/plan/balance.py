"""Place documents on ranks so that all ranks have equal work and nearly equal numbers of tokens.

A document that fits one rank stays whole there, so its keys need not be sent. A longer one is cut into equal parts. In
a causal document a later token sees more keys, so a part is a piece from the front and the mirrored piece from the end:
any two mirrored pieces have equal work. Under a short window all tokens see equally many keys, and a part is one piece.
Parts of the longest documents are dealt out evenly. The others go to the least loaded rank, largest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any

import numpy as np

from .mask import Mask

Segments = tuple[range, ...]
Cut = Callable[[Any, int, Any], tuple[tuple[Any, Any, int], ...]]  # (length, number of parts, part) -> pieces' borders
Part = tuple[int, list[range]]  # number of seen (query, key) pairs, and positions

MOST_WORK = 1.05  # accept a placement if the busiest rank has at most this multiple of the mean work
SPARE = 32  # a rank holds at most 1 / SPARE more tokens than the mean, rounded up
ROUNDS = (1, 2, 4, 8)  # parts per rank to try if one part per rank leaves the work uneven
FINEST = 5  # how often the parts of documents that fit one rank may be halved


def most_tokens(seqlen: int, world: int) -> int:
    """Return the largest number of tokens that a rank may hold.

    Memory grows with tokens, so ranks hold about equally many. Exactly equal numbers would cut a document at nearly
    every rank's border, and the keys of cut documents must be sent.
    """
    return -(-seqlen // world) + seqlen // (SPARE * world)


def place(mask: Mask, seqlen: int, world: int, *, fold: Cut, plain: Cut) -> list[Segments]:
    """Return the positions of each rank, ascending.

    ``fold`` and ``plain`` cut a document into parts of equal length: a front piece and the mirrored end piece; or one.
    """
    documents = _Documents(mask, seqlen, world, fold, plain)
    if not seqlen:
        return [()] * world
    best = None
    for fineness in range(FINEST + 1):
        placed = documents.placed(fineness)
        if best is None or placed.score < best.score:
            best = placed
        if placed.good or not placed.parts:
            break
    assert best is not None
    return [joined(sorted(ranges, key=lambda r: r.start)) for ranges in best.ranges]


def seen(mask: Mask, length: int, before: Any) -> Any:
    """Count the pairs that the first ``before`` queries of a document of ``length`` tokens see."""
    reach = length if mask.window is None else min(mask.window, length)

    def earlier(queries: Any) -> Any:  # and itself
        ramp = np.minimum(queries, reach)
        return ramp * (ramp + 1) // 2 + (queries - ramp) * reach

    total = earlier(before)
    if not mask.causal:  # of the later keys, the last queries see as many as the first see of the earlier ones
        return total + earlier(length) - earlier(length - before) - before
    if mask.prefix:  # a query inside the prefix also sees the rest of the prefix
        early = np.minimum(before, mask.prefix)
        total = total + early * mask.prefix - early * (early + 1) // 2
    return total


@dataclass(eq=False)
class _Placed:
    """One placement. ``parts``: whether some documents are on fewer than all ranks."""

    ranges: list[list[range]]
    tokens: list[int]
    work: list[int]
    parts: bool
    seqlen: int

    @property
    def good(self) -> bool:
        """Whether the tokens fit, no rank is idle and the work is balanced."""
        return self.score == (False, False, 0.0)

    @property
    def score(self) -> tuple[bool, bool, float]:
        """Rank placements; less is better. First comes room for the tokens, then idle ranks, then the busiest rank."""
        world = len(self.tokens)
        crowded = max(self.tokens) > most_tokens(self.seqlen, world)
        idle = self.seqlen >= world and min(self.tokens) == 0
        busiest = max(self.work) * world / max(1, sum(self.work))
        return crowded, idle, busiest if busiest > MOST_WORK else 0.0


class _Documents:
    """The documents of a mask, longest first."""

    def __init__(self, mask: Mask, seqlen: int, world: int, fold: Cut, plain: Cut) -> None:
        self.mask, self.seqlen, self.world, self.fold, self.plain = mask, seqlen, world, fold, plain
        borders = np.array([0, seqlen] if mask.cu_seqlens is None else mask.cu_seqlens, np.int64)
        starts, lengths = borders[:-1], np.diff(borders)
        order = np.argsort(-lengths, kind="stable")
        order = order[lengths[order] > 0]
        self.starts, self.lengths = starts[order], lengths[order]
        self.work = np.array([int(seen(mask, n, n)) for n in self.lengths.tolist()], np.int64)

    def placed(self, fineness: int) -> _Placed:
        """Spread the longest documents over all ranks, and cut the others into smaller parts.

        A part has at most a rank's share / 2 ** ``fineness``. 0: documents that fit stay whole.
        """
        counts = self._counts(fineness)
        result = _Placed([[] for _ in range(self.world)], [0] * self.world, [0] * self.world, False, self.seqlen)
        first = 0  # the next rank to get an extra token
        for n in np.flatnonzero(counts >= self.world).tolist():
            first = self._spread(result, n, first)
        alone = np.flatnonzero(counts < self.world)
        result.parts = len(alone) > 0
        self._fill(result, [part for n in alone.tolist() for part in self._parts(n, int(counts[n]))])
        return result

    def _counts(self, fineness: int) -> np.ndarray:
        """Return the number of parts of each document; a document with as many parts as ranks is spread."""
        if self.world == 1 or fineness == FINEST:
            return np.full(len(self.lengths), self.world)
        means = [(x.sum() / self.world, np.cumsum(x[::-1])[::-1] / self.world) for x in (self.lengths, self.work)]
        rooms = [rest + spare * mean for (mean, rest), spare in zip(means, (1 / SPARE, MOST_WORK - 1), strict=True)]
        shares = np.maximum(
            self.lengths / rooms[0], self.work / rooms[1]
        )  # in ranks, if all longer documents are spread
        few = 2 * np.maximum(shares, 1) <= self.world
        longest = int(np.argmax(few)) if few.any() else len(few)  # documents to spread
        tokens, work = (room[min(longest, len(room) - 1)] for room in rooms)
        counts = np.ceil(np.maximum(self.lengths / tokens, self.work / work) * 2**fineness).astype(np.int64)
        counts[:longest] = self.world
        return np.where(2 * counts > self.world, np.where(counts > 1, self.world, 1), counts)

    def _spread(self, result: _Placed, n: int, first: int) -> int:
        """Deal a document's parts out to all ranks, and return the next rank to get an extra token."""
        world, length = self.world, int(self.lengths[n])
        for rounds in ROUNDS:
            parts = self._parts(n, rounds * world)
            work = np.array([part[0] for part in parts])
            order = np.arange(len(parts)) if rounds == 1 else np.argsort(work, kind="stable")
            turns = order.reshape(rounds, world)
            turns[1::2] = turns[1::2, ::-1]  # alternate the direction, because later parts have more work
            even = work[turns].sum(0).max() * world <= (1 + (MOST_WORK - 1) / 2) * work.sum()
            if even or 64 * world * 2 * rounds > length:
                break
        for n_rank in range(world):
            rank = (n_rank + first) % world if rounds == 1 else n_rank
            _give(result, rank, (parts[part] for part in turns[:, n_rank].tolist()))
        return (first + length) % world if rounds == 1 else first

    def _fill(self, result: _Placed, parts: list[Part]) -> None:
        """Assign parts greedily, most work first, to the least loaded rank.

        A rank's load is its share of the work or of the tokens, whichever is larger.
        """
        total = max(1, int(self.work.sum()))

        def load(rank: int) -> int:
            return max(result.work[rank] * self.seqlen, result.tokens[rank] * total)

        loads = [(load(rank), rank) for rank in range(self.world)]
        heapify(loads)
        for part in sorted(parts, key=lambda part: -part[0]):
            rank = loads[0][1]
            _give(result, rank, (part,))
            heapreplace(loads, (load(rank), rank))
        self._trim(result)

    def _trim(self, result: _Placed) -> None:
        """Move the excess tokens of each rank, from its smallest documents, to the rank with the fewest tokens."""
        most = most_tokens(self.seqlen, self.world)
        rooms = [(tokens, rank) for rank, tokens in enumerate(result.tokens)]
        heapify(rooms)
        for rank in range(self.world):
            while result.tokens[rank] > most and rooms[0][0] < most:
                last, other = result.ranges[rank].pop(), rooms[0][1]
                count = min(len(last), result.tokens[rank] - most, most - result.tokens[other])
                kept, moved = last[: len(last) - count], last[len(last) - count :]
                below, all_of_it = (int(seen(self.mask, len(last), n)) for n in (len(kept), len(last)))
                result.tokens[rank] -= len(moved)
                result.work[rank] -= all_of_it - below  # counted as of a whole document, which it mostly is
                result.ranges[rank] += [kept] if len(kept) else []
                _give(result, other, [(all_of_it - below, [moved])])
                heapreplace(rooms, (result.tokens[other], other))

    def _parts(self, n: int, count: int) -> list[Part]:
        """Return (work, positions) of each of ``count`` parts of document ``n``."""
        start, length = int(self.starts[n]), int(self.lengths[n])
        if count == 1:
            return [(int(self.work[n]), [range(start, start + length)])]
        alike = not self.mask.causal or (self.mask.window is not None and 16 * self.mask.window <= length)
        cut = self.plain if alike else self.fold
        pieces = [(begin, end) for begin, end, _ in cut(length, count, np.arange(count))]
        work = sum(seen(self.mask, length, end) - seen(self.mask, length, begin) for begin, end in pieces)
        ends = np.stack([x for piece in pieces for x in piece], 1) + start
        moved = (
            [range(*row[n : n + 2]) for n in range(0, len(row), 2) if row[n] < row[n + 1]] for row in ends.tolist()
        )
        return list(zip(work.tolist(), moved, strict=True))


def _give(result: _Placed, rank: int, parts: Iterable[Part]) -> None:
    for work, ranges in parts:
        result.ranges[rank] += ranges
        result.tokens[rank] += sum(map(len, ranges))
        result.work[rank] += work


def joined(ranges: Iterable[range]) -> Segments:
    """Join each range with the next one if they touch; leave out empty ones."""
    found: list[range] = []
    for each in ranges:
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        elif len(each):
            found.append(each)
    return tuple(found)
