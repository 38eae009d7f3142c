"""What runs on the ranks of ``peers.py``: one variant at a time, checked and counted, or timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import flash_attn_stand_in
from .traffic_meter import TrafficMeter
from .variants import VARIANTS, Call, Size, Variant, positions

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """What every rank needs to know. ``device``: cpu or cuda; ``reference``: the file of the right results."""

    size: Size
    dtype: torch.dtype
    device: str
    reference: str


def make_inputs(problem: Problem) -> list[Tensor]:
    """Global q, k, v, dout [1, H, S, D], the same in every process."""
    make, size = torch.Generator().manual_seed(0), problem.size
    shape = 1, size.heads, size.seq_len, size.head_dim
    return [torch.randn(shape, generator=make, dtype=problem.dtype) for _ in range(4)]


def prepare(problem: Problem, meeting: str) -> None:
    """Once on each rank, before anything else: the stand-ins, or the GPU."""
    flash_attn_stand_in.install_adapters()
    if problem.device == "cpu":
        flash_attn_stand_in.install()
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    if world > torch.cuda.device_count():
        raise ValueError(f"world={world}, but there are {torch.cuda.device_count()} GPUs; take one rank per GPU")
    torch.cuda.set_device(rank)
    dist.destroy_process_group()  # the pool's, which is gloo's alone
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=rank, world_size=world)


@dataclass(frozen=True)
class Ready:
    """A variant on this rank with its inputs."""

    variant: Variant
    call: Call
    where: Tensor
    inputs: list[Tensor]
    dout: Tensor

    def run(self) -> tuple[float, list[Tensor]]:
        """Seconds of one call here, and out (and dq, dk, dv), [1, S_local, H, D] or [1, H, S_local, D]."""
        dist.barrier()
        _synchronize()
        started = time.perf_counter()
        out = self.call.attention(*self.inputs)
        grads = torch.autograd.grad(out, self.inputs, self.dout) if self.variant.backward else ()
        _synchronize()
        return time.perf_counter() - started, [out.detach(), *grads]


@cache
def ready(problem: Problem, name: str) -> Ready:
    """Built at the first call, which every rank makes at the same time."""
    variant = next(v for v in VARIANTS if v.name == name)
    where = positions(variant.order, problem.size, variant.ulysses(problem.size), dist.get_rank())
    local = [x.index_select(2, where) for x in make_inputs(problem)]
    if not variant.heads_first:
        local = [x.transpose(1, 2).contiguous() for x in local]
    local = [x.to(problem.device) for x in local]
    inputs = [x.requires_grad_(variant.backward) for x in local[:3]]
    return Ready(variant, variant.build(problem.size), where, inputs, local[3])


def checked(problem: Problem, name: str) -> dict[str, Any]:
    """One counted call: for each tensor (||difference||², ||right||²) of this rank's part, and the bytes sent."""
    state = ready(problem, name)
    transport = state.call.plan.transport if state.call.plan else None
    before = transport.sent if transport else 0
    with TrafficMeter() as meter:
        results = state.run()[1]
    squares = {}
    for key, actual, whole in zip(NAMES, results, torch.load(problem.reference, mmap=True), strict=False):
        right = whole.index_select(2, state.where)
        mine = actual if state.variant.heads_first else actual.transpose(1, 2)
        squares[key] = tuple(x.double().square().sum().item() for x in (mine.cpu().to(right.dtype) - right, right))
    return {
        "squares": squares,
        "bytes": meter.sent,
        "transport_bytes": transport.sent - before if transport else None,
        "detail": state.call.detail,
    }


def timed(problem: Problem, name: str) -> tuple[float, float]:
    """Seconds of one call here, and how many of them the stand-in spent on copies."""
    before = flash_attn_stand_in.copying()
    return ready(problem, name).run()[0], flash_attn_stand_in.copying() - before


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
