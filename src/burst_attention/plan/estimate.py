"""What one attention call will cost each rank, before anything runs: work and bytes, for all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .assignment import TRAVELS
from .band import band_area
from .cost import Shape, Traffic, sent_and_received
from .groups import WHOLE, Groups
from .rows import Direction, Side, Union, painted
from .schedule import Schedule
from .tile import meeting, wanted_tiles

MOST_TILES = 1 << 21  # at a time


@dataclass(frozen=True)
class RankCost:
    """One rank's share of one call.

    Attributes:
        tokens: it holds.
        forward_flops, backward_flops: of the (query, key) pairs that it computes; the backward forms the scores anew.
        traffic: bytes that it sends and receives.
    """

    tokens: int
    forward_flops: int
    backward_flops: int
    traffic: Traffic


def estimate(schedule: Schedule, shape: Shape, travels: str, groups: Groups = WHOLE) -> list[RankCost]:
    """The cost of one forward and backward on every rank; ``travels`` is a name of ``TRAVELS``."""
    world, lengths = schedule.layout.world, schedule.layout.lengths
    passes = _whole(schedule, shape, travels) if groups == WHOLE else _cut(schedule, shape, travels, groups)
    per_pair = 2 * shape.batch * shape.q_heads // groups.query  # a multiplication and an addition
    forward = per_pair * (shape.head_dim + shape.v_head_dim)  # scores, P V
    backward = per_pair * (3 * shape.head_dim + 2 * shape.v_head_dim)  # scores, dO V', P' dO, dS K, dS' Q
    seen = {direction: each[0] for direction, each in passes.items()}
    moved = np.concatenate([each[1] for each in passes.values()]).T.tolist()
    return [
        RankCost(
            lengths[rank],
            forward * seen[Direction.FORWARD][rank],
            backward * seen[Direction.BACKWARD][rank],
            Traffic(*moved[rank]),
        )
        for rank in range(world)
    ]


Pass = tuple[list[int], np.ndarray]  # by rank: (query, key) pairs computed; bytes sent and received, int64 [2, W]


def _cut(schedule: Schedule, shape: Shape, travels: str, groups: Groups) -> dict[Direction, Pass]:
    """Of heads that are cut: edge by edge."""
    passes = {}
    for direction in Direction:
        work = schedule.work(travels, direction, groups)
        cells = work.cells()
        edges, ranks = work.edges(cells), range(schedule.layout.world)
        moved = [sent_and_received(edges, rank, shape, direction, groups) for rank in ranks]
        passes[direction] = cells.areas(len(ranks)), np.array(moved).T
    return passes


def _whole(schedule: Schedule, shape: Shape, travels: str) -> dict[Direction, Pass]:
    """Of heads that nobody cuts."""
    world, assignments = schedule.layout.world, TRAVELS[travels](schedule.layout.world)
    areas = {direction: np.zeros(world, np.int64) for direction in Direction}
    moved = {direction: np.zeros((2, world), np.int64) for direction in Direction}
    for tiles in _tiles(schedule):
        i, j, q0, q1, k0, k1, lo, hi = tiles.T
        area = band_area(q1 - q0, k1 - k0, lo, hi)
        for direction, assign in assignments.items():
            rank = assign(i, j)
            np.add.at(areas[direction], rank, area)
            for side in Side:
                moved[direction] += _moved(schedule, shape, tiles, rank, direction, side)
    return {direction: (areas[direction].tolist(), moved[direction]) for direction in Direction}


def _tiles(schedule: Schedule) -> Iterator[np.ndarray]:
    """All tiles, some documents' at a time: no row is of two, so what they take adds up."""
    world, regions = schedule.layout.world, schedule.regions
    everything = np.ones((world, world), bool)
    if schedule.mask.prefix is not None:
        yield wanted_tiles(schedule.layout, regions, everything)
        return
    region, _ = meeting(schedule.layout.table(range(world)), regions[:, 0], regions[:, 1])
    several = np.cumsum(np.bincount(region, minlength=len(regions)) ** 2) // MOST_TILES
    for some in np.split(regions, np.flatnonzero(np.diff(several)) + 1):
        yield wanted_tiles(schedule.layout, some, everything)


def _moved(
    schedule: Schedule, shape: Shape, tiles: np.ndarray, rank: np.ndarray, direction: Direction, side: Side
) -> np.ndarray:
    """int64 [2, W]: bytes that each rank sends and receives of one side's shards and of results for them."""
    world, route = schedule.layout.world, schedule.route
    owner, start, stop = (tiles[:, n] for n in ((0, 2, 3) if side is Side.QUERY else (1, 4, 5)))
    away = rank != owner
    owner, start, stop, rank = owner[away], start[away], stop[away], rank[away]
    distance = (rank - owner) % world
    union = Union.of(owner * world + rank, start, stop)
    direct = np.zeros((2, world), np.int64)
    for end, ranks in enumerate(np.divmod(union.keys, world)):
        np.add.at(direct[end], ranks, union.counts)
    out, home = direct, direct[::-1]
    if route.out == "path":  # from the owner to the last that needs a row
        at, rows, last = painted(owner, start, stop, distance)
        out = _round(at, at + last, rows, world)
    if route.home == "path":  # from the first that computed something for a row
        at, rows, first = painted(owner, start, stop, world - distance)
        home = _round(at + world - first, at + world, rows, world)
    wide = shape.accumulate if route.exact else shape.partial
    total = out * shape.side_bytes(side, direction)
    return total + home * shape.side_bytes(side, direction, wide=wide) if side in direction.returns else total


def _round(begin: np.ndarray, end: np.ndarray, rows: np.ndarray, world: int) -> np.ndarray:
    """int64 [2, W]: rows sent and received by each rank where some go from rank ``begin`` on to ``end``, hop by hop."""
    steps = np.zeros(2 * world + 1, np.int64)
    np.add.at(steps, begin, rows)
    np.add.at(steps, end, -rows)
    sent = np.cumsum(steps)[: 2 * world].reshape(2, -1).sum(0)
    return np.stack([sent, np.roll(sent, 1)])
