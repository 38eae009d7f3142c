"""A surrogate output that makes a stock flash backward compute with a given D.

These backwards use ``out`` only to compute D = rowsum(dO * out). Any out' with that row sum works, so ``out`` need not
be sent. In the accumulation dtype, out' is dO times D / |dO|^2. In half precision that would round D too coarsely, so
two columns of out' carry D: D divided by the largest element of dO, rounded; and the rounding error divided by the
second largest. A row of dO that is 0 carries nothing. Then D is 0 too, unless the lse has a gradient: in calls whose
lse may have one, extra columns are appended.

No decision depends on the values, so on a GPU the host waits for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .merge import head_blocks
from .precision import accumulation_dtype, converted


def surrogate_output(dout: Tensor, delta: Tensor) -> Tensor:
    """Return out' [B, H, rows, Dv] in dout's dtype with rowsum(dout * out') = delta, up to rounding.

    ``delta`` [B, H, rows] is in fp32 or fp64, and 0 in rows in which dout is 0.
    """
    if dout.is_cuda and dout.dtype != delta.dtype:
        from .triton.kernel import carried  # PyTorch for CUDA brings Triton; one launch in place of 25

        return carried(dout, delta)
    fill = _project if dout.dtype == delta.dtype else _carry
    out = dout.new_empty(dout.shape)
    for heads in head_blocks(dout, torch.float64):  # several temporaries
        fill(out[:, heads], dout[:, heads], delta[:, heads])
    return out


def _project(out: Tensor, dout: Tensor, delta: Tensor) -> None:
    """Write dout * delta / |dout|^2, computed with dout scaled to 1, because squares may underflow or overflow."""
    size = torch.maximum(dout.amax(-1), dout.amin(-1).neg_())
    empty = size.logical_not()
    torch.div(dout, size.masked_fill_(empty, 1.0).unsqueeze(-1), out=out)
    square = torch.linalg.vecdot(out, out).masked_fill_(empty, 1.0)
    out.mul_(torch.div(delta, size).div_(square).unsqueeze(-1))


def _carry(out: Tensor, dout: Tensor, delta: Tensor) -> None:
    """Write the two columns that carry delta; the second is clamped, where it carries delta's own rounding error."""
    size = torch.abs(dout, out=out)
    at = size.topk(min(2, dout.shape[-1]), -1).indices
    carriers = converted(dout.gather(-1, at), delta.dtype)
    empty = torch.logical_not(carriers, out=carriers.new_empty(carriers.shape, dtype=torch.bool))
    carriers.masked_fill_(empty, 1.0)  # what a column says does not count where dout is 0
    first, second = carriers[..., 0], carriers[..., -1]  # a single column carries what it can
    parts, most = dout.new_empty(carriers.shape), torch.finfo(dout.dtype).max
    high = delta / first
    high = high.copy_(parts[..., 0].copy_(high))  # rounded
    if at.shape[-1] > 1:
        parts[..., 1].copy_(torch.addcmul(delta, high, first, value=-1).div_(second).clamp_(-most, most))
    out.fill_(0).scatter_(-1, at, parts)


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """One call of a stock backward. The gradients are the sum over all calls."""

    dout: Tensor
    out: Tensor
    values: bool = True  # whether v is passed; if not, zeros are passed and dV is discarded


def backward_calls(
    dout: Tensor, delta: Tensor, *, widest: int | None, of_lse: bool = False
) -> tuple[BackwardCall, ...]:
    """Return the stock backward calls that together compute with D = ``delta``; usually one.

    In fp16, and if D may include a gradient of the lse (``of_lse``), columns are appended. If that exceeds the head
    dimension ``widest``, one call has D = 0 and a second D only: gradients are linear in (dO, D).
    """
    if not of_lse and dout.dtype != torch.float16:
        return (BackwardCall(dout, surrogate_output(dout, delta)),)
    wide, columns = appended_columns(dout, delta)
    if widest is None or wide.shape[-1] <= widest:
        return (BackwardCall(wide, columns),)
    ones, carried = torch.zeros_like(dout), torch.zeros_like(dout)
    ones[..., :PARTS], carried[..., :PARTS] = 1, columns[..., -PARTS:]
    return BackwardCall(dout, torch.zeros_like(dout)), BackwardCall(ones, carried, values=False)


class GradientSums:
    """dq, dk and dv, accumulated over launches and calls in the accumulation dtype."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.dq, self.dk, self.dv = (
            torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in (q, k, v)
        )

    def add(self, parts: Sequence[Tensor], rows: slice, columns: slice, call: BackwardCall) -> None:
        """Add a launch's gradients, padded or not, at these rows and columns."""
        for total, part, where in zip((self.dq, self.dk, self.dv), parts, (rows, columns, columns), strict=True):
            if total is not self.dv or call.values:
                total[:, :, where].add_(part[..., : total.shape[-1]])


PARTS = 3  # D is split into this many io-dtype numbers, whose sum is D up to rounding


def appended_columns(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dout, out') [..., Dv + 3]: dout is 1 in the new columns, out' holds delta in parts, v must be 0."""
    parts, rest = [], delta
    for _ in range(PARTS):
        part = rest.to(dout.dtype)
        parts.append(part)
        rest = rest - part.to(rest.dtype)
    columns = torch.stack(parts, -1)
    return torch.cat([dout, torch.ones_like(columns)], -1), torch.cat([torch.zeros_like(dout), columns], -1)
