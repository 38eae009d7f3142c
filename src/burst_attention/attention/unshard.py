"""Differentiable gathering of shards into the global tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.transport import Transport
from ..kernels.contract import accumulation_dtype
from ..plan.layout import Layout
from .passes import check_batches, check_transforms, differentiable_once


@dataclass(frozen=True, eq=False)
class _Reshard:
    name: str  # of the call, in errors
    layout: Layout
    transport: Transport
    dim: int
    grad: str
    number: int

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """Return the global rows that a rank holds."""
        return torch.from_numpy(self.layout.places(rank)).to(device, non_blocking=True)

    def gathered(self, x: Tensor, *, phase: str, number: int) -> Tensor:
        """Return the global tensor, of whose rows ``x`` has this rank's."""
        rows = x.movedim(self.dim, 0).contiguous()
        leaving, label = [rows] * self.transport.world, f"{self.name}'s {phase}"
        shards = self.transport.all_to_all(leaving, self.layout.lengths, label=label, call=number)
        order = torch.from_numpy(self.layout.gather_order).to(x.device, non_blocking=True)
        return torch.cat(shards).index_select(0, order).movedim(0, self.dim).contiguous()

    def summed(self, x: Tensor, *, phase: str, number: int) -> Tensor:
        """Return the sum over ranks r of this rank's rows of x_r, in rank order, in the accumulation dtype."""
        rank, world = self.transport.rank, self.transport.world
        rows = x.movedim(self.dim, 0)
        parts = [rows.index_select(0, self.positions(r, x.device)) for r in range(world)]
        lengths, label = [self.layout.lengths[rank]] * world, f"{self.name}'s {phase}"
        arrived = self.transport.all_to_all(parts, lengths, label=label, call=number)
        total = torch.zeros_like(arrived[0], dtype=accumulation_dtype(x.dtype))
        for part in arrived:
            total += part
        return total.to(x.dtype).movedim(0, self.dim).contiguous()

    def backward(self, dy: Tensor, move: Callable[..., Tensor]) -> Tensor:
        """Move a gradient over the ranks."""
        name = f"the backward of {self.name}"
        check_transforms(name, dy=dy)
        check_batches(name, dy)
        number = self.transport.health.note_backward(self.number)
        with self.transport.health.failing(name):
            return move(dy, phase="backward", number=number)


def reshard(
    name: str, x: Tensor, dim: int, grad: str, layout: Layout, transport: Transport, agreement: Agreement
) -> Tensor:
    """Implement :meth:`burst_attention.Plan.unshard` and :meth:`burst_attention.Plan.sum_shards`, by ``name``."""
    whose, length = "this rank's", layout.lengths[transport.rank]
    if name == "sum_shards":
        whose, length = "the sequence's", layout.seqlen
    with agreement.entering(name, once=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}, not a tensor; pass {whose} {length} tokens")
        check_transforms(name, x=x)
        transport.check_device(x.device)
        if grad not in ("slice", "sum"):
            raise ValueError(f"grad={grad!r} is unknown; choose slice or sum")
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim} is outside of x's {x.ndim} dims")
        if x.shape[dim] != length:
            raise ValueError(f"x has shape {list(x.shape)}: dim {dim} must be {whose} {length} tokens")
        dim %= x.ndim
        fields = {
            "other dims": [*x.shape[:dim], *x.shape[dim + 1 :]],
            "dim": dim,
            "dtype": str(x.dtype),
            "grad": grad,
            "gradient wanted": x.requires_grad and torch.is_grad_enabled(),
            "seqlen": layout.seqlen,
            "layout": layout.description,
        }
    agreement.agree(name, fields, once=True)
    call = _Reshard(name, layout, transport, dim, grad, transport.health.next_call())
    with transport.health.failing(name):
        moved: Tensor = _Resharded.apply(x, call)
    return moved


class _Resharded(torch.autograd.Function):
    """Ledger. unshard: in x, S_local entries along dim; out the global tensor, S entries; saved nothing.

    back    slice: dx = this rank's entries of dy.
            sum: dx = the sum over ranks r of those entries of dy_r, in rank order, in the accumulation dtype.

    sum_shards is the adjoint of unshard with the gradient ``sum``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Reshard) -> Tensor:
        ctx.call = call
        move = call.gathered if call.name == "unshard" else call.summed
        return move(x, phase="forward", number=call.number)

    @staticmethod
    @differentiable_once("unshard or sum_shards")
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, None]:
        call: _Reshard = ctx.call
        if call.grad == "slice":
            return dy.index_select(call.dim, call.positions(call.transport.rank, dy.device)), None
        return call.backward(dy, call.summed if call.name == "unshard" else call.gathered), None
