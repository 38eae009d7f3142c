"""Compare the memory that a plan predicts with the live tensors during a sweep."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Mask, Strategy, make_plan
from burst_attention.attention.footprint import LiveBytes, example, peak_of
from burst_attention.attention.sweep import sweep
from burst_attention.kernels.contract import BackwardInputs
from burst_attention.kernels.merge import blank_output
from burst_attention.plan.cost import Shape
from burst_attention.plan.rows import Direction
from burst_attention.plan.tile import Tiles

HEADS, KV_HEADS, DIM, V_DIM = 8, 4, 32, 48


class Idle:
    """Allocates what a stock kernel does, and computes nothing."""

    name = "idle"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        out, _ = blank_output(q, v, q.shape[2], q.dtype)
        return out, blank_output(q[..., :0], v[..., :0], q.shape[2], torch.float32)[1]

    def backward(self, inputs: BackwardInputs) -> Any:
        surrogate = torch.zeros_like(inputs.dout)  # noqa: F841
        return torch.zeros_like(inputs.q), torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)


def live_and_predicted(layout: str, route: str, circulate: str, mask: Mask, **cut: Any) -> list[tuple[int, int]]:
    """Forward, then backward."""
    plan = make_plan(4096, mask=mask, strategy=Strategy(layout=layout, route=route, circulate=circulate, **cut))
    dtype = torch.bfloat16
    heads = {"q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "v_head_dim": V_DIM}
    shape = Shape(batch=1, **heads, io=2, partial=2, accumulate=4)
    pairs = []
    for direction in Direction:
        schedule, device = plan.schedule, torch.device("cpu")
        chosen = plan.planner.decide(schedule, shape)
        groups, circulate = chosen
        work, known = example(schedule, groups, direction, shape, dtype, Idle(), device=device)
        with LiveBytes(*known) as live:
            sums = sweep(schedule.program(circulate, direction, groups), plan.transport, work)
            results = [x for side in tuple(sums) for x in sums.pop(side)]
            for n, x in enumerate(results):
                results[n] = x.to(dtype)
            del x
        pairs.append((live.most, peak_of(plan.schedule, shape, dtype, chosen, direction)))
        del sums, results
    return pairs


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("layout", "route", "circulate", "mask"),
    [
        ("zigzag", "direct", "query", Mask()),
        ("zigzag", "direct", "key-value", Mask()),
        ("contiguous", "direct", "nearest", Mask()),
        ("striped", "ring", "query", Mask()),
        ("zigzag", "ring-attention", "key-value", Mask()),
        ("zigzag", "direct", "query", Mask(window=700)),
        ("striped", "direct", "key-value", Mask(cu_seqlens=[0, 100, 1500, 1500, 4096])),
    ],
)
def test_live_memory_is_as_predicted(
    pools: Any, world: int, layout: str, route: str, circulate: str, mask: Mask
) -> None:
    near = 0.01  # index arrays, which a CPU's tensors share with numpy, are counted
    whole = functools.partial(live_and_predicted, ulysses_degree=1)
    for reported in pools(world).run(whole, layout, route, circulate, mask):
        for live, predicted in reported:
            assert predicted == pytest.approx(live, rel=near)


@pytest.mark.parametrize(
    ("layout", "heads", "keep", "mask"),
    [
        ("zigzag", 4, True, Mask()),
        ("contiguous", 4, False, Mask(window=700)),
        ("zigzag", 2, True, Mask()),
        ("striped", 2, False, Mask(cu_seqlens=[0, 100, 1500, 1500, 4096])),
    ],
)
def test_live_memory_with_head_groups_is_as_predicted(
    pools: Any, layout: str, heads: int, keep: bool, mask: Mask
) -> None:
    cut = functools.partial(live_and_predicted, ulysses_degree=heads, cache_qkv=keep)
    for reported in pools(4).run(cut, layout, "direct", "query", mask):
        for live, predicted in reported:
            assert predicted == pytest.approx(live, rel=0.04)  # more index arrays, of which a CPU keeps no copies
