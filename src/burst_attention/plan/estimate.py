"""What one attention call will cost each rank, before anything runs: work and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .cost import Shape, Traffic, sent_and_received
from .groups import WHOLE, Groups
from .rows import Direction
from .schedule import Schedule


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
    world, work = schedule.layout.world, {d: schedule.work(travels, d, groups) for d in Direction}
    cells = {direction: each.cells() for direction, each in work.items()}
    edges = {direction: each.edges(cells[direction]) for direction, each in work.items()}
    per_pair = 2 * shape.batch * shape.q_heads // groups.query  # a multiplication and an addition
    forward = per_pair * (shape.head_dim + shape.v_head_dim)  # scores, P V
    backward = per_pair * (3 * shape.head_dim + 2 * shape.v_head_dim)  # scores, dO V', P' dO, dS K, dS' Q
    seen = {direction: each.areas(world) for direction, each in cells.items()}
    return [
        RankCost(
            schedule.layout.lengths[rank],
            forward * seen[Direction.FORWARD][rank],
            backward * seen[Direction.BACKWARD][rank],
            Traffic(*(n for d in Direction for n in sent_and_received(edges[d], rank, shape, d, groups))),
        )
        for rank in range(world)
    ]
