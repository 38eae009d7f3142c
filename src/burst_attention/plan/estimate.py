"""What one attention call will cost each rank, before anything runs: work, bytes and memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .assignment import TRAVELS
from .cost import Shape, Traffic, sent_and_received
from .program import IN_FLIGHT, all_edges
from .schedule import RETURNS, Schedule


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
    """The cost of one forward and backward on every rank; ``travels`` is a name of ``TRAVELS``."""
    layout, pairs = schedule.layout, schedule.pairs()
    assignments = dict(enumerate(TRAVELS[travels](layout.world)))  # forward, backward
    edges = {
        backward: all_edges(pairs, assign, schedule.route, RETURNS[bool(backward)], layout)
        for backward, assign in assignments.items()
    }
    seen = {backward: [0] * layout.world for backward in assignments}
    for (i, j), tiles in pairs.items():
        for backward, assign in assignments.items():
            seen[backward][int(assign(np.array(i), np.array(j)))] += tiles.area
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
    bundles = {"query": (q + out, q), "key-value": (kv, kv), "either": (q + out + kv, q + kv)}
    bundle, partial = bundles[travels]
    on_wire = partial * (shape.accumulate if exact else shape.partial) // shape.io
    # Of two exchanges under way: what arrives and a copy of what is sent, shards and partial results.
    return held + results + sums + IN_FLIGHT * 2 * (bundle + on_wire)
