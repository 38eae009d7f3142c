"""A transformers model's decoder layers: where they are, what their attention sees, how they run and are sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_attention.attention.batch import Plans, Reach
from burst_attention.integrations import hf
from burst_attention.integrations.hf import converted, vision
from burst_attention.integrations.hf.checks import running
from burst_attention.integrations.hf.reading import known, parts, read
from burst_attention.integrations.hf.stub_forward import body_of

from .contract import Attend, PlansByWindow


def build_empty(config: Any) -> Any:
    """Return the model of a configuration without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return a causal language model's decoder layers; ValueError if it has none, several lists, or images."""
    if vision.language_model_of(model) is not None:
        raise ValueError(
            f"{type(model).__name__} has an image encoder, and --data holds text only; train it by hf.parallelize and "
            "a trainer"
        )
    lists = [each for each in body_of(model).modules() if isinstance(each, nn.ModuleList) and len(each)]
    found = [each for each in lists if all(isinstance(layer, GradientCheckpointingLayer) for layer in each)]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} lists of decoder layers, and its layers are sharded one by one; "
            "train it by hf.parallelize and a trainer"
        )
    own = next((part for part in found[0].modules() if known.scores_itself(part)), None)
    if own is not None:
        raise ValueError(
            f"{type(model).__name__} computes its attention itself ({type(own).__name__}), and burst train can't "
            "run that; train it by hf.parallelize and a trainer"
        )
    return found[0]


def sharded_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers that FSDP2 shards one by one: those that share no parameter with other layers."""
    layers = [*decoder_layers(model)]
    users: dict[int, int] = {}
    for layer in layers:
        for parameter in {id(p) for p in layer.parameters()}:
            users[parameter] = users.get(parameter, 0) + 1
    return [layer for layer in layers if all(users[id(p)] == 1 for p in layer.parameters())]


def attention_reaches(model: Any) -> list[Reach]:
    """Return what each attention of a model sees, by layer: a window, a chunk, or None for all."""
    layers = decoder_layers(model)
    reaches = hf.layer_windows(model.config.get_text_config(decoder=True))
    if len(reaches) != len(layers):
        reaches = [None] * len(layers)
    calls = [sum(parts.calls_interface(part) for part in layer.modules()) for layer in layers]
    return [reach for reach, count in zip(reaches, calls, strict=True) for _ in range(count)]


def windows_of(config: Any) -> list[Reach]:
    """Return :func:`attention_reaches` of a configuration's model."""
    return attention_reaches(build_empty(config))


def hidden_states(model: Any, shard: Mapping[str, Tensor], plans: PlansByWindow, attend: Attend) -> Tensor:
    """Return the last hidden states of this rank's tokens; ``model`` was converted by :func:`run_on_shards`."""
    body, positions = body_of(model), shard["position_ids"]
    plans = Plans.of(plans)
    if any(type(part).__name__ in known.KEEP_POSITIONS for part in body.modules()):  # its attention can't compare them
        plans = Plans(plans, positions=positions)
        plans.one.usage.note(positions)
    with running(plans):
        out = body(input_ids=shard["input_ids"], position_ids=positions, use_cache=False, plan=plans, attend=attend)
    hidden: Tensor = out.last_hidden_state
    return hidden


def run_on_shards(model: Any) -> None:
    """Make recurrent layers and short convolutions exchange states between ranks. Call it before FSDP2."""
    converted.convert(read(body_of(model)))


def shard_parameters(wrapper: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool = False) -> None:
    """Apply FSDP2 in place, one parameter group per layer of ``wrapper.model``. Gradients are *sums* over ranks.

    The root is ``wrapper``, because its forward uses the head's weight. ``offload`` was never run on a GPU.
    """
    halved = dtype in (torch.bfloat16, torch.float16)
    policy = MixedPrecisionPolicy(param_dtype=dtype if halved else None, reduce_dtype=torch.float32 if halved else None)
    offloading = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for layer in sharded_layers(wrapper.model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    fully_shard(wrapper, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    for module in wrapper.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the tokens of all ranks, and gloo has no pre-multiplied sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.device_type == "cpu":
                module.set_custom_reduce_scatter(SumByRank())  # type: ignore[arg-type]


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
