"""The peak memory of one pass, by running its sweep on tensors without data; nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..comm.transport import Operation, Transport
from ..kernels.contract import BackwardInputs, Kernel, accumulation_dtype, blank_output
from ..plan.cost import Shape
from ..plan.groups import Groups
from ..plan.rows import Direction
from ..plan.schedule import Schedule
from ..plan.tile import Tiles
from ..planner.choice import Candidate
from .passes import Backward, Forward, Pass, Tensors, cache
from .sweep import sweep, sweeps


class LiveBytes(TorchDispatchMode):
    """Track the bytes of ``tensors`` and of all tensors made while this mode is active; ``most``: at once."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.most, self._now, self._live = 0, 0, dict[int, tuple[StorageWeakRef, int]]()
        self._see(tensors)

    def _see(self, tensors: Any) -> None:
        for x in tree_leaves(tensors):
            if isinstance(x, Tensor):
                ref = StorageWeakRef(x.untyped_storage())
                if ref.cdata not in self._live:
                    self._live[ref.cdata] = ref, x.untyped_storage().nbytes()
                    self._now += x.untyped_storage().nbytes()
        if self._now > self.most:  # freed storages can only lower the sum, so drop them only at a new peak
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
            self._now = sum(size for _, size in self._live.values())
            self.most = max(self.most, self._now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(result)
        return result


def peak_bytes(
    schedule: Schedule,
    shape: Shape,
    dtype: torch.dtype,
    chosen: Candidate,
    direction: Direction,
    *,
    calls: int = 1,
) -> int:
    """Return the peak bytes of one pass on ``schedule.rank``.

    Counted are inputs (laid out as in models, [B, S, H, D]), results, sums, shards of other ranks, messages in flight,
    copies of what is sent, a kernel's results for a pair, and the surrogate of out that passes the global lse and D to
    a stock kernel. A kernel's workspace is not counted.

    ``calls``: their exchanges overlap (:func:`~burst_attention.attention.sweep.sweeps`). With several, tensors that the
    sweep does not read, such as out in a backward, are not counted.
    """
    groups, circulate = chosen
    program, device = schedule.program(circulate, direction, groups), torch.device("meta")
    made = partial(example, schedule, groups, direction, shape, dtype, _Allocating(), device=device)
    if calls > 1:
        with LiveBytes() as live:
            for sums in sweeps(((program, made()[0]) for _ in range(calls)), _Silent(None)):
                del sums
        return live.most
    work, inputs = made()
    with LiveBytes(*inputs) as live:
        sums = sweep(program, _Silent(None), work)
        results = [x for side in tuple(sums) for x in sums.pop(side)]
        for n in range(len(results)):  # as in the operator: each sum is freed once it is rounded
            results[n] = results[n].to(dtype)
    return live.most


def example(
    schedule: Schedule,
    groups: Groups,
    direction: Direction,
    shape: Shape,
    dtype: torch.dtype,
    kernel: Any,
    *,
    device: torch.device,
) -> tuple[Pass, Sequence[Tensor]]:
    """Return (one pass of a call on ``schedule.rank``, the tensors that are alive throughout)."""
    tokens, keys = (layout.lengths[schedule.rank] for layout in schedule.layouts.values())
    alone = schedule.layout.world == 1

    def new(rows: int, heads: int, dim: int) -> Tensor:
        return torch.zeros(shape.batch, rows, heads, dim, dtype=dtype, device=device).transpose(1, 2)

    q = new(tokens, shape.q_heads, shape.head_dim)
    k, v = new(keys, shape.kv_heads, shape.head_dim), new(keys, shape.kv_heads, shape.v_head_dim)
    kept: Tensors | None = None
    if groups.keep:
        kept = cache(q, k, v, groups.query, schedule.slice_length(groups), results=groups.results)
        kept = kept[: 5 if groups.results else 3]
    if direction is Direction.FORWARD:
        return Forward(q, k, v, 1.0, kernel, groups, kept), (q, k, v, *(kept or ()))
    dout = new(tokens, shape.q_heads, shape.v_head_dim)
    tensors, stats, results = (*(kept or (q, k, v)), dout), None, None
    if alone:
        out = new(tokens, shape.q_heads, shape.v_head_dim)
        results = out, torch.zeros(out.shape[:3], dtype=accumulation_dtype(dtype), device=device)
        tensors = (*tensors, *results, results[1].clone())  # the operator's lse, and that without -inf
    elif not groups.results:
        rows = (shape.batch, shape.q_heads, tokens)
        # one stands for lse and D, the other is both packed together
        lse_and_delta, stats = (torch.zeros(*rows, 2, dtype=accumulation_dtype(dtype), device=device) for _ in range(2))
        tensors = (*tensors, new(tokens, shape.q_heads, shape.v_head_dim), lse_and_delta, stats)
    if kept:
        q, k, v = (x[:, :, :0].clone() for x in (q, k, v))
    return Backward(dout, q, k, v, stats, 1.0, kernel, alone, groups, kept, results), tensors


class _Silent(Transport):
    """A transport that sends nothing."""

    def _start(self, operations: Sequence[Operation], tag: int) -> list[Any]:
        return []


class _Allocating(Kernel):
    """A kernel that allocates its results and computes nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        """Allocate what a forward returns."""
        out, _ = blank_output(q, v, q.shape[2], q.dtype)
        return out, blank_output(q[..., :0], v[..., :0], q.shape[2], accumulation_dtype(q.dtype))[1]

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate what a backward returns, and its temporary buffers."""
        surrogate = torch.zeros_like(inputs.dout) if inputs.out is None else None
        dq, dk, dv = (torch.zeros_like(x) for x in (inputs.q, inputs.k, inputs.v))
        del surrogate
        return dq, dk, dv
