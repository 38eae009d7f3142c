"""The memory that a plan foretells, against what is live, tensor by tensor, while a sweep runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_attention import Mask, make_plan
from burst_attention.attention.passes import Backward, Forward
from burst_attention.attention.sweep import sweep
from burst_attention.kernels.merge import blank_output
from burst_attention.plan.cost import Shape
from burst_attention.plan.footprint import peak_bytes
from burst_attention.plan.tile import Tiles

HEADS, KV_HEADS, DIM, V_DIM = 8, 4, 32, 48


class Meter(TorchDispatchMode):
    """The most bytes that the tensors known here, and all made meanwhile, took at once."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.most, self._live = 0, dict[int, tuple[StorageWeakRef, int]]()
        self._see(known)

    def _see(self, tensors: Any) -> None:
        for x in tree_leaves(tensors):
            if isinstance(x, Tensor):
                ref = StorageWeakRef(x.untyped_storage())
                self._live.setdefault(ref.cdata, (ref, x.untyped_storage().nbytes()))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(result)
        return result


class Idle:
    """Allocates what a stock kernel does, and computes nothing."""

    name, continues = "idle", False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        out, _ = blank_output(q, v, q.shape[2], q.dtype)
        return out, blank_output(q[..., :0], v[..., :0], q.shape[2], torch.float32)[1]

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, final: bool = False) -> Any:
        surrogate = torch.zeros_like(dout)  # noqa: F841
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def live_and_foretold(layout: str, route: str, travels: str, mask: Mask) -> list[tuple[int, int]]:
    """Forward, then backward."""
    plan = make_plan(4096, layout=layout, route=route, mask=mask)

    def new(heads: int, dim: int) -> Tensor:
        return torch.zeros(1, plan.length, heads, dim, dtype=torch.bfloat16).transpose(1, 2)  # as models have them

    q, k, v, out, dout = new(HEADS, DIM), new(KV_HEADS, DIM), new(KV_HEADS, V_DIM), new(HEADS, V_DIM), new(HEADS, V_DIM)
    lse, _ = torch.zeros(2, 1, HEADS, plan.length).clone().unbind()  # with D in the same storage
    stats = torch.zeros(1, HEADS, plan.length, 2)
    heads = {"q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "v_head_dim": V_DIM}
    shape = Shape(batch=1, **heads, io=2, partial=2, accumulate=4)
    works = Forward(q, k, v, 1.0, Idle()), Backward(dout, q, k, v, stats, 1.0, Idle())
    inputs = (q, k, v), (q, k, v, out, dout, lse, stats)
    told = []
    for work, known in zip(works, inputs, strict=True):
        program = plan.schedule.program(travels, work.direction)
        with Meter(*known) as meter:
            sums = sweep(program, plan.transport, work)
            results = [x for side in tuple(sums) for x in sums.pop(side)]
            for n, x in enumerate(results):
                results[n] = x.to(torch.bfloat16)
            del x
        told.append((meter.most, peak_bytes(program, shape, work.direction, tokens=plan.length)))
        del sums, results
    return told


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("layout", "route", "travels", "mask"),
    [
        ("zigzag", "direct", "query", Mask()),
        ("zigzag", "direct", "key-value", Mask()),
        ("contiguous", "direct", "either", Mask()),
        ("striped", "ring", "query", Mask()),
        ("zigzag", "ring-attention", "key-value", Mask()),
        ("zigzag", "direct", "query", Mask(window=700)),
        ("striped", "direct", "key-value", Mask(cu_seqlens=[0, 100, 1500, 1500, 4096])),
    ],
)
def test_what_is_live_is_what_was_foretold(
    pools: Any, world: int, layout: str, route: str, travels: str, mask: Mask
) -> None:
    near = 0.12 if mask.cu_seqlens else 0.05  # rows apart are gathered, and what a merge takes meanwhile is not counted
    for told in pools(world).run(live_and_foretold, layout, route, travels, mask):
        for live, foretold in told:
            assert foretold == pytest.approx(live, rel=near)
