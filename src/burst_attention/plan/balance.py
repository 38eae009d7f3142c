"""Place documents on ranks so that all ranks have nearly equal work and nearly equal numbers of tokens.

The keys of a document on several ranks must be sent. So each document goes to the fewest ranks that have room for it,
in equal parts. Longer documents come first. In a causal document a later token sees more keys, so a part is a piece
from the front and the mirrored piece from the end: all such pairs have equal work. Under a short window all tokens see
equally many keys, and a part is one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

import numpy as np

from .mask import Mask

Segments = tuple[range, ...]

MOST_WORK = 1.05  # a rank should have at most this multiple of the mean work
SPARE = 16  # a rank holds at most 1 / SPARE more tokens than the mean, rounded up
ROUNDS = (1, 2, 4, 8)  # parts per rank to try if one part per rank leaves the work uneven

# Shares of a rank's whole room that one part of a document may fill, to try in turn. A long document has much work on
# few tokens. If it fills a rank's work, the short documents fill the tokens of the others, and some find no room.
SHARES = (1, 15 / 16, 7 / 8, 3 / 4, 1 / 2)


def most_tokens(seqlen: int, world: int) -> int:
    """Return the largest number of tokens that a rank may hold.

    Memory grows with tokens, so ranks hold about equally many. Exactly equal numbers would cut a document at nearly
    every rank's border, and the keys of cut documents must be sent.
    """
    return -(-seqlen // world) + seqlen // (SPARE * world)


def place(mask: Mask, seqlen: int, world: int) -> list[Segments]:
    """Return the positions of each rank, ascending."""
    best = None
    for placed in _Documents(mask, seqlen, world).placements():
        if best is None or placed.score < best.score:
            best = placed
        if best.score == (False, 0.0):
            break
    assert best is not None
    return best.segments


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


class _Placement:
    """A placement of documents on ranks."""

    def __init__(self, seqlen: int, world: int, work: int) -> None:
        self.pieces: list[list[int]] = []  # rank, start and stop
        self.tokens, self.work = np.zeros(world, np.int64), np.zeros(world, np.int64)
        self.most_tokens, self.most_work = most_tokens(seqlen, world), max(1, MOST_WORK * work / world)
        self.complete = seqlen >= world  # every rank can have a token

    @property
    def score(self) -> tuple[bool, float]:
        """Rank placements; less is better. First come full and idle ranks, then the busiest one with too much work."""
        full = int(self.tokens.max()) > self.most_tokens
        busiest = float(self.work.max() / self.most_work)
        return full or (self.complete and int(self.tokens.min()) == 0), busiest if busiest > 1 else 0.0

    @property
    def segments(self) -> list[Segments]:
        """The positions of each rank, ascending."""
        ranges: list[list[range]] = [[] for _ in self.tokens]
        for rank, start, stop in sorted(self.pieces):
            ranges[rank].append(range(start, stop))
        return [joined(each) for each in ranges]

    def give(self, ranks: np.ndarray, parts: _Parts) -> None:
        """Put part n on rank ``ranks[n]``. No rank gets two."""
        self.tokens[ranks] += parts.tokens
        self.work[ranks] += parts.work
        rows = np.concatenate([np.c_[ranks, parts.pieces[:, :2]], np.c_[ranks, parts.pieces[:, 2:]]])
        self.pieces += rows[rows[:, 1] < rows[:, 2]].tolist()

    def give_whole(self, rank: int, start: int, length: int, work: int) -> None:
        """Put a document on one rank."""
        self.tokens[rank] += length
        self.work[rank] += work
        self.pieces.append([rank, start, start + length])

    def load(self, rank: int) -> float:
        """Return how much of a rank's room for tokens or for work is taken, whichever is more."""
        return max(self.tokens[rank] / self.most_tokens, self.work[rank] / self.most_work)

    def takes(self, rank: int, tokens: int, work: int) -> bool:
        """Return whether a rank has room for a whole document."""
        return bool(self.tokens[rank] + tokens <= self.most_tokens and self.work[rank] + work <= self.most_work)

    def rooms(self, tokens: int, work: int, share: float = 1) -> np.ndarray:
        """Return what part of a document each rank can take, float [W], in at most ``share`` of a rank's whole room."""
        free_tokens = np.minimum(self.most_tokens - self.tokens, self.most_tokens * share)
        free_work = np.minimum(self.most_work - self.work, self.most_work * share)
        return np.maximum(np.minimum(free_tokens / tokens, free_work / max(1, work)), 0)


@dataclass
class _Parts:
    """Parts of a document: tokens and work, both int64 [N], and two pieces each, [N, 4]: starts and stops."""

    tokens: np.ndarray
    work: np.ndarray
    pieces: np.ndarray

    def __getitem__(self, at: np.ndarray) -> _Parts:
        return _Parts(self.tokens[at], self.work[at], self.pieces[at])


class _Documents:
    """The documents of a mask, longest first."""

    def __init__(self, mask: Mask, seqlen: int, world: int) -> None:
        self.mask, self.seqlen, self.world = mask, seqlen, world
        borders = np.array([0, seqlen] if mask.cu_seqlens is None else mask.cu_seqlens, np.int64)
        starts, lengths = borders[:-1], np.diff(borders)
        order = np.argsort(-lengths, kind="stable")
        order = order[lengths[order] > 0]
        self.starts, self.lengths = starts[order].tolist(), lengths[order].tolist()
        self.work = [int(seen(mask, n, n)) for n in self.lengths]

    def placements(self) -> Iterator[_Placement]:
        """Yield placements to try, the last with every document over all ranks."""
        few = self.world
        while few:
            yield from filter(None, (self._placed(few, share) for share in SHARES))
            few //= 4
        placed = self._placed(0, 1)
        assert placed is not None
        yield placed

    def _placed(self, few: int, share: float) -> _Placement | None:
        """Place each document on one rank, on up to ``few`` by ``share`` of their room, or all; None without room."""
        placed = _Placement(self.seqlen, self.world, sum(self.work))
        first = 0  # the next rank to get an extra token
        loads = [(0.0, rank) for rank in range(self.world)]
        for n, (start, length, work) in enumerate(zip(self.starts, self.lengths, self.work, strict=True)):
            if max(length / placed.most_tokens, work / placed.most_work) > few:
                first = self._spread(placed, n, first)
                continue
            if not placed.takes(rank := _least_loaded(placed, loads), length, work):
                rank = int(placed.rooms(length, work).argmax())
            if placed.takes(rank, length, work):
                placed.give_whole(rank, start, length, work)
                continue
            order = np.argsort(-(rooms := placed.rooms(length, work, share)), kind="stable")
            enough = np.flatnonzero(rooms[order] * np.arange(1, self.world + 1) >= 1)
            if not len(enough):
                return None
            if 4 * (count := int(enough[0]) + 1) > 3 * self.world:  # fewer would save little, and balance worse
                first = self._spread(placed, n, first)
            else:
                parts = self._parts(n, _equal(length, count))
                placed.give(order[:count], parts[np.argsort(-parts.work, kind="stable")])
        return placed

    def _spread(self, placed: _Placement, n: int, first: int) -> int:
        """Deal a document's parts out to all ranks, and return the next rank to get an extra token."""
        world, length = self.world, self.lengths[n]
        for rounds in ROUNDS:
            parts = self._parts(n, _equal(length, rounds * world))
            order = np.arange(len(parts.work)) if rounds == 1 else np.argsort(parts.work, kind="stable")
            turns = order.reshape(rounds, world)
            turns[1::2] = turns[1::2, ::-1]  # alternate the direction, because later parts have more work
            work = parts.work[turns].sum(0)
            even = work.max() * world <= (1 + (MOST_WORK - 1) / 2) * work.sum()
            if even or 64 * world * 2 * rounds > length:
                break
        ranks = np.arange(world) if rounds > 1 else (np.arange(world) + first) % world
        for turn in turns:
            placed.give(ranks, parts[turn])
        return (first + length) % world if rounds == 1 else first

    def _parts(self, n: int, tokens: np.ndarray) -> _Parts:
        """Cut document ``n`` into parts with these numbers of tokens."""
        length = self.lengths[n]
        alike = not self.mask.causal or (self.mask.window is not None and 16 * self.mask.window <= length)
        front = tokens if alike else -(-tokens // 2)
        begin, end = np.cumsum(front) - front, length - np.cumsum(tokens - front)
        pieces = np.stack([begin, begin + front, end, end + tokens - front], 1)
        below = seen(self.mask, length, pieces)
        return _Parts(tokens, below[:, 1] - below[:, 0] + below[:, 3] - below[:, 2], pieces + self.starts[n])


def _equal(length: int, count: int) -> np.ndarray:
    """Return the tokens of each of ``count`` equal parts; the first ones take the remainder."""
    return length // count + (np.arange(count) < length % count)


def _least_loaded(placed: _Placement, loads: list[tuple[float, int]]) -> int:
    """Return the least loaded rank. ``loads`` is a heap of all ranks; a load in it may be too small."""
    while (load := placed.load(rank := loads[0][1])) > loads[0][0]:
        heapreplace(loads, (load, rank))
    return rank


def joined(ranges: Iterable[range]) -> Segments:
    """Join each range with the next one if they touch; leave out empty ones."""
    merged: list[range] = []
    for span in ranges:
        if merged and merged[-1].stop == span.start:
            merged[-1] = range(merged[-1].start, span.stop)
        elif len(span):
            merged.append(span)
    return tuple(merged)
