"""Parts of weights that tensor parallelism cuts, and sums over its axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from burst_attention.attention.plan import Plan
from burst_attention.comm.agreement import Agreement
from burst_attention.comm.collectives import first, sum_
from burst_attention.comm.link import transport_of
from burst_attention.loss.head import AXIS, SummedGradient

OF_EXPERTS = "grouped_gemm"  # transformers' style of weights of whole experts
_HOMES = ("transformers.distributed.tensor_parallel", f"{__package__}.styles")  # of replaced forwards


@dataclass(eq=False)
class Cut:
    """How a model is cut."""

    mesh: DeviceMesh
    agreement: Agreement
    heads: int  # over how many ranks the heads of an attention are cut
    experts: DeviceMesh  # the ranks that share the experts; those of ``mesh``, or of a context and ``mesh``
    share: float = field(default=1.0, init=False)  # by which gradients of experts shared by a context are multiplied

    @property
    def by_context(self) -> bool:
        """Whether ranks with other tokens hold some of the experts."""
        return self.experts.size() > self.mesh.size()

    def set_timeout(self, seconds: float | None) -> None:
        """Set how long agreements and sums over the axis may take, those of all models on it."""
        for mesh in (self.mesh, self.experts):
            transport_of(mesh.get_group()).health.timeout = seconds

    def __deepcopy__(self, memo: dict[int, Any]) -> Cut:
        """Refuse a copy of the model: forwards of its parts would still use the weights of the first."""
        raise TypeError(
            "a model cut by tensor parallelism can't be copied; build a second model, cut it, and load state_dict()"
        )


def part(weight: Any) -> Any:
    """Return this rank's part of a weight that only tensor parallelism cuts; another weight itself."""
    return weight.to_local() if along_axis(weight) and weight.device_mesh.ndim == 1 else weight


def parts_of(weight: Any) -> int:
    """Return over how many ranks tensor parallelism cuts a weight."""
    mesh = weight.device_mesh if along_axis(weight) else None
    return 1 if mesh is None else mesh.size(mesh.mesh_dim_names.index(AXIS))


def summed_gradient(x: Tensor, weight: Any) -> Tensor:
    """Return a tensor from which a part of a weight makes this rank's heads; its gradient is summed over the axis."""
    if parts_of(weight) == 1:
        return x
    whole: Tensor = SummedGradient.apply(x, weight.device_mesh.get_group(AXIS), False)
    return whole


def of_first(choice: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the choice of the axis's first rank, int64 positions or numbers below 2 ** 31.

    Hidden states of the ranks may differ by rounding, where their processors do. Then heads of one layer would attend
    to other keys.
    """
    return first(choice.int(), mesh.get_group(), "a choice of keys over a tensor-parallel axis").to(choice.dtype)


def used(weight: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a whole weight as a rank uses it for its heads; its gradient is summed over the axis."""
    whole: Tensor = SummedGradient.apply(weight, mesh.get_group(), True)
    return whole


def summed(out: Tensor, bias: Tensor | None, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the ranks' products, plus the bias once."""
    whole: Tensor = Summed.apply(out, mesh.get_group())
    return whole if bias is None else whole + bias


class Summed(torch.autograd.Function):
    """Sum over a group; the gradient passes unchanged, because every rank computes the same from the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return sum_(x, group, "a sum of layer outputs over a tensor-parallel axis")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class InStep(torch.autograd.Function):
    """A tensor itself, behind code that saves other tensors on each rank; ``others``, of no elements, get a gradient.

    A checkpoint computes a layer again where the backward first needs a saved tensor, and up to the last one. Both are
    here or behind it on every rank, so ranks make the exchanges of the layer and those of its backward in one order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.new_empty(0))
        ctx.others = len(others)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        (empty,) = ctx.saved_tensors
        return grad, *[empty] * ctx.others


def whole_tokens(x: Tensor, plan: Plan) -> Tensor:
    """Gather the tokens of a whole sequence: [B * S_local, ...] to [B * S, ...]. Its gradient is summed over ranks."""
    if not min(plan.schedule.layout.lengths):
        raise ValueError(
            f"a sequence of {plan.seqlen} tokens leaves some of {plan.world} ranks none, and they share experts; pass "
            "longer sequences"
        )
    return plan.unshard(x.unflatten(0, (-1, plan.length)), 1, grad="sum").flatten(0, 1)


def own_tokens(x: Tensor, plan: Plan) -> Tensor:
    """Return this rank's tokens of the sum over a context: [B * S, ...] to [B * S_local, ...], which may change."""
    return plan.sum_shards(x.unflatten(0, (-1, plan.seqlen)), 1).flatten(0, 1).clone()


@contextmanager
def using(module: nn.Module, change: Callable[[Tensor], Any]) -> Iterator[None]:
    """Let a module use a function of its own weights inside this context."""
    own = dict(module.named_parameters(recurse=False))
    module._parameters.update({name: change(x) for name, x in own.items()})
    try:
        yield
    finally:
        module._parameters.update(own)


class Scaled(torch.autograd.Function):
    """A tensor itself; its gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.factor == 1.0 else grad * ctx.factor, None


def along_axis(weight: Tensor) -> bool:
    """Return whether a weight is a DTensor on a mesh with the axis "tp"."""
    return isinstance(weight, DTensor) and AXIS in (weight.device_mesh.mesh_dim_names or ())


def forward_is_ours(module: nn.Module) -> bool:
    """Return whether a module's forward is that of a style, by which it computes a part."""
    own = getattr(vars(module).get("forward"), "__globals__", {})
    return own.get("__name__") in _HOMES
