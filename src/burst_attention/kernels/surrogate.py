"""A substitute for ``out`` that makes a stock flash backward compute the right D.

Those backwards use ``out`` only to form D = rowsum(dO * out). Any out' with that row sum will do, so ``out`` need not
be sent. Two columns of out' carry D. The first is D divided by a large dO of the row, rounded. The second is the
rounding error divided by another dO. If dO is too small to carry D, which needs a gradient of the lse, columns are
appended that v lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .precision import accumulation_dtype

NEAR = 32  # columns that are looked at first: to find the largest of all takes longer than all else here


def surrogate_output(dout: Tensor, delta: Tensor) -> Tensor | None:
    """out' [B, H, rows, Dv] in dout's dtype with rowsum(dout * out') = delta, or None where dout can't carry delta.

    Args:
        dout: [B, H, rows, Dv], the gradient of the output.
        delta: [B, H, rows] fp32 or fp64.
    """
    for near in (True, False)[dout.shape[-1] <= NEAR :]:
        out = torch.zeros_like(dout)
        # Head by head: what the quotients need stays small. Asked once a look: on a GPU the host waits for the answer.
        heads = ((x[:, n] for x in (out, dout, delta)) for n in range(dout.shape[1]))
        lost = [_fill(*head, near=near) for head in heads]
        if not bool(torch.stack(lost).any()):
            return out
        del out
    return None


def _fill(out: Tensor, dout: Tensor, delta: Tensor, *, near: bool) -> Tensor:
    """Write the columns that carry delta; a bool that tells whether some row's can't. ``near``: of the first columns
    the largest of either half, which will do but where one is 0, or a kernel may take it for that."""
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
    # A row carries its D if hardly more than the rounding of one quotient is left of it; a quotient in fp16 may be so
    # small that it is rounded to a multiple of the least number there is.
    info = torch.finfo(dout.dtype)
    allowed = 2 * info.eps * delta.abs() + info.smallest_normal * info.eps * carriers[-1].abs()
    lost = (rest.abs() > allowed) | ~torch.isfinite(rest)
    if near:
        least = torch.finfo(delta.dtype).smallest_normal
        lost |= (delta != 0) & ((carriers[0].abs() < least) | (carriers[1].abs() < least))
    return lost.any()


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """A call of a stock backward: its gradients, summed over the calls, are the ones wanted.

    ``values``: with v; else with zeros in its place, and dV is dropped.
    """

    dout: Tensor
    out: Tensor
    values: bool = True


def backward_calls(dout: Tensor, delta: Tensor, *, widest: int | None) -> tuple[BackwardCall, ...]:
    """What to call a stock backward with, so that it computes with D = ``delta``.

    One call, unless dO can't carry D and the columns that would make its head dim exceed ``widest``: then one with
    D = 0, and one of D alone: gradients are linear in (dO, D), and with v = 0 nothing but D is left of dO v' - D.
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
    """dq, dk, dv under accumulation, over launches and calls; in the accumulation dtype."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.dq, self.dk, self.dv = (
            torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in (q, k, v)
        )

    def add(self, parts: Sequence[Tensor], rows: slice, columns: slice, call: BackwardCall) -> None:
        """A launch's results, padded or not, for these rows and columns."""
        for total, part, where in zip((self.dq, self.dk, self.dv), parts, (rows, columns, columns), strict=True):
            if total is not self.dv or call.values:
                total[:, :, where] += part[..., : total.shape[-1]]


PARTS = 3  # numbers of the io dtype whose sum is D, nearly


def appended_columns(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """(dout, out') [..., Dv + 3]: dO = 1 in the new columns, out' delta in three parts; v must be 0 there."""
    parts, rest = [], delta
    for _ in range(PARTS):
        part = rest.to(dout.dtype)
        parts.append(part)
        rest = rest - part.to(rest.dtype)
    columns = torch.stack(parts, -1)
    return torch.cat([dout, torch.ones_like(columns)], -1), torch.cat([torch.zeros_like(dout), columns], -1)
