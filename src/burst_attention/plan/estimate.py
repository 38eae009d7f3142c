"""What one attention call will cost each rank, before anything runs: work, bytes and memory."""

from __future__ import annotations

from dataclasses import dataclass

from . import assignment
from .cost import Shape, Traffic, sent_and_received
from .program import all_edges
from .schedule import RETURNS, TRAVELS, Schedule


@dataclass(frozen=True)
class RankCost:
    """One rank's share of one call.

    Attributes:
        tokens: it holds.
        forward_flops, backward_flops: of the (query, key) pairs that it computes; the backward forms the scores anew.
        traffic: bytes that it sends and receives.
        memory: bytes at the peak of the backward, estimated: inputs, sums, shards in use and arriving, partial results.
    """

    tokens: int
    forward_flops: int
    backward_flops: int
    traffic: Traffic
    memory: int


def estimate(schedule: Schedule, shape: Shape, travels: str) -> list[RankCost]:
    """The cost of one forward and backward on every rank; ``travels`` is ``query`` or ``key-value``."""
    layout, pairs = schedule.layout, schedule.pairs()
    assignments = {False: assignment.rows, True: TRAVELS[travels]}
    edges = {
        backward: all_edges(pairs, assign, schedule.route, RETURNS[backward], layout)
        for backward, assign in assignments.items()
    }
    seen = {backward: [0] * layout.world for backward in assignments}
    for (i, j), tiles in pairs.items():
        area = tiles.area
        seen[False][i] += area
        seen[True][j if travels == "query" else i] += area
    per_pair = 2 * shape.batch * shape.q_heads  # a multiplication and an addition
    forward = per_pair * (shape.head_dim + shape.v_head_dim)  # scores, P V
    backward = per_pair * (3 * shape.head_dim + 2 * shape.v_head_dim)  # scores, dO V', P' dO, dS K, dS' Q
    exact = schedule.route.exact
    return [
        RankCost(
            layout.lengths[rank],
            forward * seen[False][rank],
            backward * seen[True][rank],
            Traffic(
                *sent_and_received(edges[False], rank, shape, backward=False),
                *sent_and_received(edges[True], rank, shape, backward=True),
            ),
            _memory(shape, max(layout.lengths), travels, alone=layout.world == 1, exact=exact),
        )
        for rank in range(layout.world)
    ]


def _memory(shape: Shape, tokens: int, travels: str, *, alone: bool, exact: bool) -> int:
    """Bytes at the peak of a backward on a rank of several; stats (lse, D) are left out as small."""
    q = shape.batch * shape.q_heads * tokens * shape.head_dim * shape.io
    out = shape.batch * shape.q_heads * tokens * shape.v_head_dim * shape.io
    kv = shape.batch * shape.kv_heads * tokens * (shape.head_dim + shape.v_head_dim) * shape.io
    held = q + kv + 2 * out  # q, k, v, out, dout
    results = q + kv + out  # what a kernel gives for one pair, and the surrogate of out that it takes
    if alone:
        return held + results
    sums = (q + kv) * shape.accumulate // shape.io
    bundle, partial = (q + out, q) if travels == "query" else (kv, kv)
    on_wire = partial * (shape.accumulate if exact else shape.partial) // shape.io
    # In use, arriving, and a copy of what is sent; one partial result going out, one coming in.
    return held + results + sums + 3 * bundle + 2 * on_wire
