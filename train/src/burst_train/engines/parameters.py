"""FSDP2 over a model's parameters, with gradients that are plain sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard


def shard_parameters(wrapper: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool = False) -> None:
    """FSDP2 in place, one group of parameters for each layer of ``wrapper.model``; gradients are *sums* over ranks.

    Args:
        wrapper: its forward uses the head's weight, so that it is the root.
        mesh: one axis.
        dtype: of the computation.
        offload: whether shards and their gradients lie in host memory, from where each use fetches them. Where that is
            a GPU's, it was never run.
    """
    halved = dtype in (torch.bfloat16, torch.float16)
    policy = MixedPrecisionPolicy(param_dtype=dtype if halved else None, reduce_dtype=torch.float32 if halved else None)
    offloading = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    layers: nn.ModuleList = wrapper.get_submodule("model.model.layers")  # type: ignore[assignment]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    fully_shard(wrapper, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    for module in wrapper.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the tokens of all ranks already; gloo has no pre-multiplied sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.device_type == "cpu":
                module.set_custom_reduce_scatter(SumByRank())  # type: ignore[arg-type]


class SumByRank:
    """FSDP2's reduce-scatter, as an all-to-all and a sum in the ranks' order: the same bits at every run.

    For gloo, whose own reduce-scatter is a whole all-reduce: twice the bytes.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op != dist.ReduceOp.SUM or async_op:
            raise NotImplementedError(f"op={op}, async_op={async_op}: gradients are summed, and waited for")
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), *output_tensor.shape), 0, out=output_tensor)
