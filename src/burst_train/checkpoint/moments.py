"""AdamW's moments as plain tensors, also if the optimizer holds them in 8 bits (torchao's AdamW8bit).

A checkpoint holds moments in the dtype of their weights. Moments in 8 bits are rounded again when they are loaded, so
such a run resumes to within that rounding, not bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def blank_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's state before the optimizer's first step: zeros, as the optimizer itself would make them."""
    own: Any = getattr(optimizer, "_new_buffer", None)  # torchao's; it has no public name
    # Only the first moment has a sign, which takes one of the 8 bits.
    made = {name: own(parameter, name == MOMENTS[0]) if own else torch.zeros_like(parameter) for name in MOMENTS}
    return {"step": torch.tensor(0.0), **made}


def plain(moment: Tensor) -> Tensor:
    """Return a moment in its weight's dtype: the tensor itself, or a copy of one that is held in 8 bits."""
    local = _local(moment)
    if not _in_8_bits(local):
        return moment.detach()
    values = local.dequantize()
    if not isinstance(moment, DTensor):
        return values
    mesh, placements = moment.device_mesh, moment.placements
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=moment.shape, stride=moment.stride())


@torch.no_grad()
def put_back(moment: Tensor, values: Tensor) -> None:
    """Store the values of :func:`plain` in a moment that is held in 8 bits; another one holds them already."""
    if _in_8_bits(local := _local(moment)):
        local.copy_(_local(values))


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _in_8_bits(x: Tensor) -> bool:
    return hasattr(x, "codes")
