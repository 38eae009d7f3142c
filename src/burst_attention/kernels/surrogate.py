"""An output that makes a stock flash backward compute the D it is meant to.

Those backwards take ``out`` only to form D = rowsum(dO * out). So that ``out`` need not travel, any out' with that row
sum will do. Two columns of it carry D: the quotient by the largest |dO| of the row, rounded, and what rounding lost,
over the second largest. Where dO is too small to carry D (only possible once the lse has a gradient of its own),
columns are appended that v does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor


def surrogate_output(dout: Tensor, delta: Tensor) -> Tensor | None:
    """out' [B, H, rows, Dv] in dout's dtype with rowsum(dout * out') = delta, or None where dout can't carry delta.

    Args:
        dout: [B, H, rows, Dv], the gradient of the output.
        delta: [B, H, rows] fp32 or fp64.
    """
    out = torch.zeros_like(dout)
    for head in range(dout.shape[1]):  # head by head: what topk and the quotients need stays small
        if not _fill(out[:, head], dout[:, head], delta[:, head]):
            return None
    return out


def _fill(out: Tensor, dout: Tensor, delta: Tensor) -> bool:
    """Write the columns that carry delta; False if they can't."""
    columns = min(2, dout.shape[-1])
    at = dout.abs().topk(columns, dim=-1).indices
    carriers = dout.gather(-1, at).to(delta.dtype).unbind(-1)
    rest, parts = delta, []
    for carrier in carriers:
        part = torch.where(carrier == 0, 0.0, rest / carrier).to(dout.dtype)
        parts.append(part)
        rest = rest - part.to(delta.dtype) * carrier
    out.scatter_(-1, at, torch.stack(parts, -1))
    # A row carries its D if hardly more than the rounding of one quotient is left of it.
    lost = rest.abs() > 2 * torch.finfo(dout.dtype).eps * delta.abs()
    return not bool((lost | ~torch.isfinite(rest)).any())


def appended_columns(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """(dout, out') [..., Dv + 3]: dO = 1 in the new columns, out' delta in three parts; v must be 0 there."""
    parts, rest = [], delta
    for _ in range(3):
        part = rest.to(dout.dtype)
        parts.append(part)
        rest = rest - part.to(rest.dtype)
    columns = torch.stack(parts, -1)
    return torch.cat([dout, torch.ones_like(columns)], -1), torch.cat([torch.zeros_like(dout), columns], -1)
