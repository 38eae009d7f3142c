"""A surrogate output that makes a stock flash backward compute with a given D.

These backwards use ``out`` only to compute D = rowsum(dO * out). Any out' with that row sum works, so ``out`` need not
be sent. In the accumulation dtype, out' is dO times D / |dO|^2. In half precision that would round D too coarsely, so
two columns of out' carry D. The first is D divided by a large element of dO, rounded. The second is the rounding error
divided by another element. If dO is too small to carry D, extra columns are appended. That can happen only if the lse
has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .precision import accumulation_dtype

NEAR = 32  # columns searched first: a search over all columns would dominate the cost


def surrogate_output(dout: Tensor, delta: Tensor) -> Tensor | None:
    """Return out' [B, H, rows, Dv] in dout's dtype with rowsum(dout * out') = delta; None if dout can't carry delta.

    ``dout`` is [B, H, rows, Dv], the gradient of the output; ``delta`` [B, H, rows] in fp32 or fp64.
    """
    if dout.dtype == delta.dtype and (out := _projected(dout, delta)) is not None:
        return out
    for near in (True, False)[dout.shape[-1] <= NEAR :]:
        out = torch.zeros_like(dout)
        # One head at a time keeps temporaries small. All heads share one test, because on a GPU the host waits for it.
        heads = ((x[:, n] for x in (out, dout, delta)) for n in range(dout.shape[1]))
        lost = [_fill(*head, near=near) for head in heads]
        if not bool(torch.stack(lost).any()):
            return out
        del out
    return None


def _projected(dout: Tensor, delta: Tensor) -> Tensor | None:
    """Return dout * delta / |dout|^2; None if some row's norm, factor or out' would lose digits."""
    info = torch.finfo(dout.dtype)
    least = info.smallest_normal / info.eps  # parts of smaller numbers may be subnormal, which a kernel may treat as 0
    norm = torch.linalg.vector_norm(dout, dim=-1)
    factor = (delta / norm / norm).masked_fill_(delta == 0, 0.0)
    size = factor.abs() * norm  # of out'
    exact = (norm >= math.sqrt(least)) & (factor.abs() >= info.smallest_normal)
    exact &= (size >= least) & (size <= math.sqrt(info.max))
    return dout * factor.unsqueeze(-1) if bool((exact | (delta == 0)).all()) else None


def _fill(out: Tensor, dout: Tensor, delta: Tensor, *, near: bool) -> Tensor:
    """Write the columns that carry delta; return a bool tensor, true if some row can't carry it.

    ``near``: use the largest element of each half of the first columns. This fails if one is 0 or subnormal, because a
    kernel may treat subnormal numbers as 0.
    """
    if near:
        at = dout[..., :NEAR].abs().unflatten(-1, (2, -1)).max(-1).indices
        at[..., 1] += NEAR // 2
    else:
        at = dout.abs().topk(min(2, dout.shape[-1]), dim=-1).indices
    carriers = dout.gather(-1, at).to(delta.dtype).unbind(-1)
    rest, parts = delta, []
    for carrier in carriers:
        part = torch.where(carrier == 0, 0.0, rest / carrier).to(dout.dtype)
        parts.append(part)
        rest = rest - part.to(delta.dtype) * carrier
    out.scatter_(-1, at, torch.stack(parts, -1))
    # A row carries its D if the remainder is at most about the rounding error of one quotient. A small fp16 quotient
    # is subnormal, so its rounding error is absolute.
    info = torch.finfo(dout.dtype)
    allowed = 2 * info.eps * delta.abs() + info.smallest_normal * info.eps * carriers[-1].abs()
    lost = (rest.abs() > allowed) | ~torch.isfinite(rest)
    if near:
        least = torch.finfo(delta.dtype).smallest_normal
        lost |= (delta != 0) & ((carriers[0].abs() < least) | (carriers[1].abs() < least))
    return lost.any()


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """One call of a stock backward. The gradients are the sum over all calls."""

    dout: Tensor
    out: Tensor
    values: bool = True  # whether v is passed; if not, zeros are passed and dV is discarded


def backward_calls(dout: Tensor, delta: Tensor, *, widest: int | None) -> tuple[BackwardCall, ...]:
    """Return the stock backward calls that together compute with D = ``delta``.

    Usually one call. If dO can't carry D, columns are appended. If that would exceed the head dimension ``widest``,
    there are two calls instead: one with D = 0 and one with D only. Gradients are linear in (dO, D), and with v = 0
    the term dO v' - D is only -D.
    """
    out = surrogate_output(dout, delta)
    if out is not None:
        return (BackwardCall(dout, out),)
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
                total[:, :, where] += part[..., : total.shape[-1]]


PARTS = 3  # D is split into this many io-dtype numbers, whose sum is D up to rounding


def appended_columns(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dout, out') [..., Dv + 3].

    In the three new columns, dout is 1 and out' holds delta in three parts. v must be 0 there.
    """
    parts, rest = [], delta
    for _ in range(PARTS):
        part = rest.to(dout.dtype)
        parts.append(part)
        rest = rest - part.to(rest.dtype)
    columns = torch.stack(parts, -1)
    return torch.cat([dout, torch.ones_like(columns)], -1), torch.cat([torch.zeros_like(dout), columns], -1)
