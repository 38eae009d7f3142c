"""Parts of weights that tensor parallelism cuts, and sums over its axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from burst_attention.loss.head import AXIS, SummedGradient

_HOMES = ("transformers.distributed.tensor_parallel", f"{__package__}.tensor_styles")  # of replaced forwards


def part(weight: Any) -> Any:
    """Return this rank's part of a weight that only tensor parallelism cuts; another weight itself."""
    return weight.to_local() if along_axis(weight) and weight.device_mesh.ndim == 1 else weight


def used(weight: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a whole weight as a rank uses it for its heads; its gradient is summed over the axis."""
    whole: Tensor = SummedGradient.apply(weight, mesh.get_group(), True)
    return whole


def summed(out: Tensor, bias: Tensor | None, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the ranks' products, plus the bias once."""
    whole: Tensor = Summed.apply(out, mesh.get_group())
    return whole if bias is None else whole + bias


def axis_of(module: nn.Module) -> DeviceMesh | None:
    """Return the axis over which a module's weights are cut, or None."""
    weights: Iterable[Any] = module.parameters()
    return next((x.device_mesh for x in weights if along_axis(x)), None)


class Summed(torch.autograd.Function):
    """Sum over a group; the gradient passes unchanged, because every rank computes the same from the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def along_axis(weight: Tensor) -> bool:
    """Return whether a weight is a DTensor on a mesh with the axis "tp"."""
    return isinstance(weight, DTensor) and AXIS in (weight.device_mesh.mesh_dim_names or ())


def forward_is_ours(module: nn.Module) -> bool:
    """Return whether a module's forward is that of a style, by which it computes a part."""
    own = getattr(vars(module).get("forward"), "__globals__", {})
    return own.get("__name__") in _HOMES
