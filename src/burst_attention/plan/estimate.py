"""What one attention call will cost each rank, before anything runs: work and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .assignment import TRAVELS
from .cost import Shape, Traffic, sent_and_received
from .program import all_edges
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


def estimate(schedule: Schedule, shape: Shape, travels: str) -> list[RankCost]:
    """The cost of one forward and backward on every rank; ``travels`` is a name of ``TRAVELS``."""
    layout, pairs = schedule.layout, schedule.pairs()
    assignments = TRAVELS[travels](layout.world)
    edges = {
        direction: all_edges(pairs, assign, schedule.route, direction, layout)
        for direction, assign in assignments.items()
    }
    seen = {direction: [0] * layout.world for direction in assignments}
    for (i, j), tiles in pairs.items():
        for direction, assign in assignments.items():
            seen[direction][int(assign(np.array(i), np.array(j)))] += tiles.area
    per_pair = 2 * shape.batch * shape.q_heads  # a multiplication and an addition
    forward = per_pair * (shape.head_dim + shape.v_head_dim)  # scores, P V
    backward = per_pair * (3 * shape.head_dim + 2 * shape.v_head_dim)  # scores, dO V', P' dO, dS K, dS' Q
    return [
        RankCost(
            layout.lengths[rank],
            forward * seen[Direction.FORWARD][rank],
            backward * seen[Direction.BACKWARD][rank],
            Traffic(*(n for d in Direction for n in sent_and_received(edges[d], rank, shape, d))),
        )
        for rank in range(layout.world)
    ]
