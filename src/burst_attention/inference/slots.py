"""Which keys of a rank few queries see: integers only.

A *slot* is a column of the cache. A batch whose rows have padding in front has one *hole* for each row: the slots
without a token of that row. Positions skip the hole, so the position of a slot behind it is smaller by its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from burst_attention.attention.batch import Chunked, Reach
from burst_attention.attention.dealt import Seen
from burst_attention.plan.tile import Tiles

PAGE = 64  # neighbouring slots that one rank holds, of tokens that were decoded

Hole = tuple[int, int]  # first slot without a token, and the first behind it
NO_HOLE: Hole = (0, 0)


class Held:
    """The slots that a rank holds of one layer, in ascending order, as ranges. Local indices count them from 0."""

    def __init__(self, ranges: Sequence[range] = ()) -> None:
        self.ranges: list[range] = []
        self._count = 0
        for part in ranges:
            self.append(part)

    def __len__(self) -> int:
        return self._count

    def append(self, slots: range) -> None:
        """Add slots behind all others; ranges that continue each other are joined."""
        last = self.ranges[-1] if self.ranges else None
        if not slots:
            return
        if last is not None and slots[0] <= last[-1]:
            raise ValueError(f"slots {slots} are not behind {last}")
        self._count += len(slots)
        joins = last is not None and last.step == slots.step == 1 and last.stop == slots.start
        if last is not None and joins:
            self.ranges[-1] = range(last.start, slots.stop)
        else:
            self.ranges.append(slots)

    def slots(self) -> np.ndarray:
        """Return the slots, int64."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(r.start, r.stop, r.step) for r in self.ranges)])

    def stretches(self) -> list[tuple[int, int]]:
        """Return the slots as (start, stop) pairs. A range with a stride becomes a pair for each slot."""
        pairs = ([(r.start, r.stop)] if r.step == 1 else [(slot, slot + 1) for slot in r] for r in self.ranges)
        return [pair for each in pairs for pair in each]

    def below(self, slot: int) -> int:
        """Return the number of held slots below ``slot``: the local index of the first that is not."""
        return sum(len(range(r.start, min(r.stop, slot), r.step)) for r in self.ranges)

    def drop(self, count: int) -> None:
        """Forget the first ``count`` slots."""
        left: list[range] = []
        for part in self.ranges:
            gone = min(count, len(part))
            count -= gone
            left += [part[gone:]] if gone < len(part) else []
        self.ranges, self._count = left, sum(map(len, left))


def ranges_of(slots: np.ndarray) -> list[range]:
    """Return ascending slots as ranges of equal steps."""
    ranges: list[range] = []
    start, values = 0, slots.tolist()
    while start < len(values):
        step = values[start + 1] - values[start] if start + 1 < len(values) else 1
        stop = start + 1
        while stop < len(values) and values[stop] - values[stop - 1] == step:
            stop += 1
        ranges.append(range(values[start], values[stop - 1] + 1, step))
        start = stop
    return ranges


def own_slots(first: int, stop: int, rank: int, world: int) -> list[range]:
    """Return this rank's slots among [first, stop): pages are dealt in turn."""
    pages = range(first // PAGE, (stop - 1) // PAGE + 1) if stop > first else range(0)
    mine = (page for page in pages if page % world == rank)
    return [range(max(first, page * PAGE), min(stop, (page + 1) * PAGE)) for page in mine]


def first_seen(position: int, reach: Reach) -> int:
    """Return the first position that a query sees."""
    if reach is None:
        return 0
    if isinstance(reach, Chunked):
        return position // reach.size * reach.size
    return max(0, position - reach + 1)


def first_needed(slot: int, reach: Reach, holes: Sequence[Hole]) -> int:
    """Return the first slot that a query at ``slot``, or later, of any row sees."""
    return min(_slot(first_seen(slot - (stop - start), reach), (start, stop)) for start, stop in holes)


def seen_keys(held: Held, queries: range, reach: Reach, holes: Sequence[Hole]) -> list[Seen]:
    """Return which held keys the queries of each row see, without the holes of the rows."""
    if len(set(holes)) == 1:
        return [*_of_rows(slice(0, len(holes)), held, queries, reach, holes[0])]
    return [each for n, hole in enumerate(holes) for each in _of_rows(slice(n, n + 1), held, queries, reach, hole)]


def _slot(position: int, hole: Hole) -> int:
    return position if position < hole[0] else position + hole[1] - hole[0]


def _of_rows(rows: slice, held: Held, queries: range, reach: Reach, hole: Hole) -> Iterator[Seen]:
    """Yield the keys before the rows' hole, and those behind it."""
    width = hole[1] - hole[0]
    for low, high in ((0, hole[0]), (hole[1], queries.stop)):
        if low >= high:
            continue
        spans = []
        for query in queries:
            blind = hole[0] <= query < hole[1]
            first = max(low, _slot(first_seen(query - width if query >= hole[1] else query, reach), hole))
            stop = min(high, query + 1)
            spans.append((0, 0) if blind or stop <= first else (held.below(first), held.below(stop)))
        if len(spans) == 1:  # a decoding step: one tile, without numpy's detours
            start, stop = spans[0]
            if stop > start:
                tiles = Tiles(np.array([_full(0, 1, 0, stop - start)], np.int64))
                yield Seen(rows, slice(start, stop), tiles, whole=True)
            continue
        table = _tiles(spans)
        if len(table):
            start, stop = int(table[:, 2].min()), int(table[:, 3].max())
            table[:, 2:4] -= start
            yield Seen(rows, slice(start, stop), Tiles(table))


def _tiles(spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return tiles int64 [T, 6] of queries that see one span of keys each; spans neither shrink nor go back."""
    seeing = [(n, start, stop) for n, (start, stop) in enumerate(spans) if stop > start]
    if not seeing:
        return np.empty((0, 6), np.int64)
    left, right = seeing[-1][1], seeing[0][2]  # what all of these queries see
    tiles = [_full(seeing[0][0], seeing[-1][0] + 1, left, right)] if right > left else []
    for n, start, stop in seeing:
        tiles += [_full(n, n + 1, start, min(stop, left))] if min(stop, left) > start else []
        after = max(start, right, left)
        tiles += [_full(n, n + 1, after, stop)] if stop > after else []
    return np.array(sorted(tiles), np.int64)


def _full(q_start: int, q_stop: int, k_start: int, k_stop: int) -> tuple[int, ...]:
    return q_start, q_stop, k_start, k_stop, 1 - (k_stop - k_start), q_stop - q_start - 1
