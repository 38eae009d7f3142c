"""Shard a model's parameters by FSDP2, one group for each decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from burst_attention.integrations import hf

from ..structure import sharded_layers


def shard_parameters(
    root: nn.Module, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool = False
) -> None:
    """Apply FSDP2 in place, one parameter group for each layer of ``model``. Gradients are *sums* over ranks.

    ``root``: the module that is called: ``model`` or a module around it. Its forward uses the head's weight.
    ``offload`` was never run on a GPU.
    """
    halved = dtype in (torch.bfloat16, torch.float16)
    policy = MixedPrecisionPolicy(param_dtype=dtype if halved else None, reduce_dtype=torch.float32 if halved else None)
    offloading = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for module in model.modules():
        # All tokens of a rank may go to experts without weights (LongCat-Flash).
        experts = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
        if experts and getattr(model.config, "zero_expert_num", None):
            module.register_forward_hook(hf.token_wise(_counts_all))
    for layer in sharded_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    fully_shard(root, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the tokens of all ranks, and gloo has no pre-multiplied sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.device_type == "cpu":
                module.set_custom_reduce_scatter(SumByRank())  # type: ignore[arg-type]


def _counts_all(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """Give every parameter of a module a gradient, if only zeros: FSDP2 reduces those that some rank did not use."""
    counted: Tensor = _WithParameters.apply(output, *module.parameters())
    return counted


class _WithParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(torch.zeros_like(x) if x.requires_grad else None for x in ctx.saved_tensors)


class SumByRank:
    """A reduce-scatter for FSDP2 over gloo, whose own is an all-reduce: an all-to-all, then a sum in rank order."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op != dist.ReduceOp.SUM or async_op:
            raise NotImplementedError(f"op={op}, async_op={async_op}: only a synchronous sum is supported")
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), *output_tensor.shape), 0, out=output_tensor)
