"""The buffers of an attention call over any number of ranks, from the programs of a few ranks of a small world.

From a few context slices on they no longer grow: a rank holds what it computes with and what is under way, however many
others there are. Blocks hold a block's sides, which grow with the root of the slices.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

import torch

from burst_attention.attention.footprint import WALKED, peak_of
from burst_attention.kernels.precision import accumulation_dtype
from burst_attention.plan.cost import Shape
from burst_attention.plan.rows import Direction

from .calls import Setting, Way

ENOUGH = 32  # ranks whose buffers are those of more
SQUARES = (4, 16)  # slices that blocks are walked over


def buffers(way: Way, setting: Setting, dtype: torch.dtype) -> int:
    """Bytes that a backward holds at its peak beside q, k, v, out, its gradient and lse: the most of a few ranks.

    A backward holds more than a forward does.
    """
    slices = setting.world // way.groups.query
    if way.travels == "blocks" and slices > SQUARES[1]:
        few, many = (_walked(way, setting, slices=n, dtype=dtype) for n in SQUARES)
        a, b, x = (max(isqrt(n), -(-n // isqrt(n))) for n in (*SQUARES, slices))
        return round(many + (x - b) * (many - few) / (b - a))
    return _walked(way, setting, slices=min(slices, max(2, ENOUGH // way.groups.query)), dtype=dtype)


def _walked(way: Way, setting: Setting, *, slices: int, dtype: torch.dtype) -> int:
    world = slices * way.groups.query
    seq_len = setting.seq_len * world // setting.world
    # A mask of documents leaves less to hold than one document does.
    small = replace(setting, world=world, seq_len=seq_len, mask=replace(setting.mask, cu_seqlens=None))
    walked = min(world, WALKED)
    schedule, held = small.schedule(way), []
    for rank in sorted({n * (world - 1) // max(1, walked - 1) for n in range(walked)}):
        peak = peak_of(replace(schedule, rank=rank), setting.shape, dtype, way.travels, Direction.BACKWARD)
        held.append(peak - schedule.layout.lengths[rank] * token_bytes(setting.shape, dtype))
    return max(0, *held)


def token_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """A token's q, k, v, out, gradient of out, and lse."""
    wide = accumulation_dtype(dtype).itemsize
    elements = shape.q_heads * (shape.head_dim + 2 * shape.v_head_dim)
    elements += shape.kv_heads * (shape.head_dim + shape.v_head_dim)
    return shape.batch * (elements * shape.io + shape.q_heads * wide)
