"""Compare the memory that a plan predicts with the live tensors during a sweep."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Mask, Strategy, make_plan
from burst_attention.attention.footprint import LiveBytes, example, peak_bytes
from burst_attention.attention.sweep import sweep
from burst_attention.kernels.contract import BackwardInputs, Kernel, blank_output
from burst_attention.plan.cost import Shape
from burst_attention.plan.rows import Direction
from burst_attention.plan.tile import Tiles

HEADS, KV_HEADS, DIM, V_DIM = 8, 4, 32, 48


class Idle(Kernel):
    """Allocates what a stock kernel does, and computes nothing."""

    name = "idle"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        out, _ = blank_output(q, v, q.shape[2], q.dtype)
        return out, blank_output(q[..., :0], v[..., :0], q.shape[2], torch.float32)[1]

    def backward(self, inputs: BackwardInputs) -> Any:
        surrogate = torch.zeros_like(inputs.dout) if inputs.out is None else None  # noqa: F841
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
        pairs.append((live.most, peak_bytes(plan.schedule, shape, dtype, chosen, direction)))
        del sums, results
    return pairs


WINDOW, DOCUMENTS = Mask(window=700), Mask(cu_seqlens=[0, 100, 1500, 1500, 4096])
WHOLE = {"ulysses_degree": 1}


@pytest.mark.parametrize(
    ("world", "layout", "route", "circulate", "mask", "cut"),
    [
        (1, "zigzag", "direct", "query", Mask(), WHOLE),
        (2, "zigzag", "direct", "key-value", Mask(), WHOLE),
        (2, "striped", "direct", "key-value", DOCUMENTS, WHOLE),
        (3, "contiguous", "direct", "nearest", Mask(), WHOLE),
        (3, "striped", "ring-attention", "query", Mask(), WHOLE),
        (4, "zigzag", "ring-attention", "key-value", Mask(), WHOLE),
        (4, "zigzag", "direct", "query", WINDOW, WHOLE),
        (4, "zigzag", "direct", "query", Mask(), {"ulysses_degree": 4, "cache_qkv": True}),
        (4, "contiguous", "direct", "query", WINDOW, {"ulysses_degree": 4, "cache_qkv": False}),
        (4, "zigzag", "direct", "query", Mask(), {"ulysses_degree": 2, "cache_qkv": True}),
        (4, "striped", "direct", "query", DOCUMENTS, {"ulysses_degree": 2, "cache_qkv": False}),
    ],
)
def test_live_memory_is_as_predicted(pools, world, layout, route, circulate, mask, cut):
    # A CPU's tensors share index arrays with numpy, which are counted. With head groups there are more of them.
    near = 0.01 if cut is WHOLE else 0.04
    for reported in pools(world).run(functools.partial(live_and_predicted, **cut), layout, route, circulate, mask):
        for live, predicted in reported:
            assert predicted == pytest.approx(live, rel=near)
