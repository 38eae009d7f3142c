"""Predict the buffers of an attention call from the peak memory of a few ranks' passes.

A rank holds its operands and the messages in flight, whatever the number of ranks. So a few ranks of a small world
represent a large one. Only ``blocks`` holds the sides of a block, which grow with the square root of the number of
sequence groups.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import isqrt

import torch

from burst_attention.attention import peak_bytes
from burst_attention.plan.balance import most_tokens
from burst_attention.plan.cost import Shape
from burst_attention.plan.layout import BALANCED
from burst_attention.plan.rows import Direction
from burst_attention.planner.choice import Candidate

from .attention import AttentionStrategy, Workload

WALKED = 4  # ranks to simulate: every rank of a large group would take too long
ENOUGH = 32  # with more ranks than this, buffers no longer grow
SQUARES = (4, 16)  # numbers of sequence groups that ``blocks`` is simulated with


def walked(world: int) -> list[int]:
    """Return the ranks to simulate, spread over the group."""
    count = min(world, WALKED)
    return sorted({n * (world - 1) // max(1, count - 1) for n in range(count)})


def buffers(
    way: AttentionStrategy,
    setting: Workload,
    dtype: torch.dtype,
    *,
    calls: int = 1,
    direction: Direction = Direction.BACKWARD,
) -> int:
    """Return the bytes of a backward's buffers at its peak, without q, k, v, out, its gradient and lse.

    ``calls`` overlap, in chunks of heads; everything of the other calls is included. Of a forward only q, k and v are
    left out.
    """
    setting = replace(setting, remat="none")  # which the buffers don't depend on
    slices, pass_ = setting.world // way.groups.query, {"dtype": dtype, "calls": calls, "direction": direction}
    if way.circulate == "blocks" and slices > SQUARES[1]:
        few, many = (_walked(way, setting, slices=n, **pass_) for n in SQUARES)
        a, b, x = (max(isqrt(n), -(-n // isqrt(n))) for n in (*SQUARES, slices))
        return round(many + (x - b) * (many - few) / (b - a))
    few = min(slices, max(2, ENOUGH // way.groups.query))
    return _walked(way, setting, slices=few, **pass_)


@lru_cache(256)
def _walked(
    way: AttentionStrategy, setting: Workload, *, slices: int, dtype: torch.dtype, calls: int, direction: Direction
) -> int:
    world = slices * way.groups.query
    seq_len = setting.seq_len * world // setting.world
    if way.layout == BALANCED:  # as if all ranks held as many tokens as the fullest one may
        seq_len = world * most_tokens(setting.seq_len, setting.world)
    # One document needs at least as much memory as several.
    mask = replace(setting.mask, cu_seqlens=None)
    small = replace(setting, world=world, seq_len=seq_len, mask=mask, widest=None)
    schedule, shape, held = small.schedule(way.strategy), setting.shape, []
    chosen, token = Candidate(way.groups, way.circulate), token_bytes(shape)
    if direction is Direction.FORWARD:
        heads = shape.q_heads * shape.head_dim + shape.kv_heads * (shape.head_dim + shape.v_head_dim)
        token = shape.batch * heads * shape.io
    elif calls > 1:  # then neither out nor lse counts (peak_bytes)
        token -= shape.batch * shape.q_heads * (shape.v_head_dim * shape.io + shape.accumulate)
    for rank in walked(world):
        peak = peak_bytes(replace(schedule, rank=rank), shape, dtype, chosen, direction, calls=calls)
        held.append(peak - schedule.layout.lengths[rank] * token)
    return max(0, *held)


def token_bytes(shape: Shape) -> int:
    """Return the bytes of one token's q, k, v, out, gradient of out, and lse."""
    elements = shape.q_heads * (shape.head_dim + 2 * shape.v_head_dim)
    elements += shape.kv_heads * (shape.head_dim + shape.v_head_dim)
    return shape.batch * (elements * shape.io + shape.q_heads * shape.accumulate)
