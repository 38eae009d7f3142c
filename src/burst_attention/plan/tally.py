"""What every rank sends and receives when heads are cut first, by arrays: for choosing, before there is any program."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .assignment import Assignment
from .cost import Shape
from .groups import Groups
from .rows import Direction, Payload, Side, Union, painted


def moved(
    table: np.ndarray, lengths: np.ndarray, shape: Shape, assignments: Mapping[Direction, Assignment], groups: Groups
) -> np.ndarray:
    """int64 [2, W]: bytes that each rank sends, and receives, in a forward and a backward over direct routes.

    Every head group's rows go the same ways, so they are counted once.

    Args:
        table: of all pairs, as :func:`~burst_attention.plan.tile.wanted_tiles` gives it.
        lengths: tokens of each rank.
        assignments: of context slices, of each pass.
    """
    total = np.zeros((2, len(lengths)), np.int64)
    for direction, inner in assignments.items():
        for side in Side:
            total += _Side(table, lengths, shape, inner, groups, direction, side).moved()
    return total


class _Side:
    """One side of one pass. ``rows`` [W, R]: of each owner those that each context's ranks need, by head group."""

    def __init__(
        self,
        table: np.ndarray,
        lengths: np.ndarray,
        shape: Shape,
        inner: Assignment,
        groups: Groups,
        direction: Direction,
        side: Side,
    ) -> None:
        self.shape, self.groups, self.direction, self.side = shape, groups, direction, side
        self.lengths, world = lengths, len(lengths)
        self.owner, self.context = np.arange(world)[:, None], np.arange(world // groups.query)
        own, first = (table[:, 0], 2) if side is Side.QUERY else (table[:, 1], 4)
        user = inner(*(groups.context(table[:, n]) for n in (0, 1)))
        union = Union.of(own * len(self.context) + user, table[:, first], table[:, first + 1])
        self.rows = np.zeros((world, len(self.context)), np.int64)
        self.rows.flat[union.keys] = union.counts
        grid = inner(self.context[:, None], self.context)
        self.all_rows = np.zeros((world, 1), np.int64)
        union = Union.of(own, table[:, first], table[:, first + 1])
        self.all_rows[union.keys, 0] = union.counts
        self.whole = (grid == grid[:, :1]).all(1) if side is Side.QUERY else (grid == grid[:1]).all(0)

    def moved(self) -> np.ndarray:
        """int64 [2, W]: sent and received."""
        total = np.zeros((2, len(self.lengths)), np.int64)
        for group in range(self.groups.query):
            user = group + self.groups.query * self.context
            keeper = group + self.groups.query * self.groups.context(self.owner)
            for rows, size, source in self._out(keeper):
                _add(total, rows * size, source, user)
            for rows, size, start, end in self._home(keeper, user) if self.side in self.direction.returns else ():
                _add(total, rows * size, start, end)
        return total // self.groups.count(self.side)

    def _out(self, keeper: np.ndarray) -> list[tuple[np.ndarray, int, np.ndarray]]:
        """(rows, bytes of one, where they start)."""
        bytes_of = self.shape.side_bytes
        if not (self.groups.keep and self.direction is Direction.BACKWARD):
            rows = self.rows
            if self.groups.keep:
                rows = np.where(self.context == self.groups.context(self.owner), self.lengths[:, None], rows)
            return [(rows, bytes_of(self.side, self.direction), self.owner)]
        kept = (self.rows, bytes_of(self.side, self.direction, payload=Payload.INPUTS), keeper)
        if self.side is Side.KEY:
            return [kept]
        return [kept, (self.rows, bytes_of(self.side, self.direction, payload=Payload.GRADIENTS), self.owner)]

    def _home(self, keeper: np.ndarray, user: np.ndarray) -> list[tuple[np.ndarray, int, np.ndarray, np.ndarray]]:
        """(rows, bytes of one, where they start, where they go), of one head group."""
        io, partial = (
            self.shape.side_bytes(self.side, self.direction, wide=wide) for wide in (self.shape.io, self.shape.partial)
        )
        if self.groups.query == 1:
            return [(self.rows, partial, user, self.owner)]
        shared = self.groups.query > self.groups.count(self.side)
        whole = self.whole[self.groups.context(self.owner)] & (not shared)
        foreign = ~whole & (self.context != self.groups.context(self.owner))
        return [
            (self.rows * whole, io, user, self.owner),
            (self.rows * foreign, partial, user, keeper),
            (self.all_rows * ~whole, partial if shared else io, keeper, self.owner),
        ]


def _add(total: np.ndarray, sizes: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    """Add messages of ``sizes`` [W, R] from ``source`` to ``target``; what stays on a rank is none."""
    sizes, source, target = np.broadcast_arrays(sizes, source, target)
    sizes = np.where(source == target, 0, sizes)
    np.add.at(total[0], source, sizes)
    np.add.at(total[1], target, sizes)


def rows_sent_directly(tiles: np.ndarray, host: np.ndarray) -> int:
    """Key rows that leave the busiest host when each shard goes straight to the ranks whose queries see it."""
    union = Union.of(tiles[:, 1] * len(host) + tiles[:, 0], tiles[:, 4], tiles[:, 5])
    owner, user = np.divmod(union.keys, len(host))
    return _most_by_host(np.where(host[owner] == host[user], 0, union.counts), owner, host)


def rows_sent_round(tiles: np.ndarray, host: np.ndarray) -> int:
    """Key rows that leave the busiest host when each shard goes from rank to rank, to the last whose queries see it."""
    world = len(host)
    owner, counts, distance = painted(tiles[:, 1], tiles[:, 4], tiles[:, 5], (tiles[:, 0] - tiles[:, 1]) % world)
    crossing = np.bincount(np.r_[owner, owner + distance], np.r_[counts, -counts], minlength=2 * world)
    sent = np.cumsum(crossing).reshape(2, -1)[:, :world].sum(0).astype(np.int64)  # by each rank, to the next
    rank = np.arange(world)
    return _most_by_host(np.where(host == host[(rank + 1) % world], 0, sent), rank, host)


def _most_by_host(rows: np.ndarray, rank: np.ndarray, host: np.ndarray) -> int:
    """Of rows that ranks send, those of the host with most."""
    return int(np.bincount(host[rank], rows, minlength=1).max())
