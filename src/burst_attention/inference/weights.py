"""Shard a model's weights over the ranks, for models that no single rank can hold."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer


def shard_weights(model: Any, mesh: DeviceMesh) -> None:
    """Shard a parallelized model by FSDP2 in place: each layer, then what is left. Every rank must call it.

    A rank then holds 1/W of every weight. While it computes, it also holds one or two whole layers, the embeddings and
    the head. An allocator may keep that memory afterwards.

    Args:
        model: the result of ``hf.parallelize``, on a CPU or on the mesh's device; equal on all ranks.
        mesh: a mesh of one axis, over the ranks of ``hf.parallelize``.

    Raises:
        ValueError: the model has no decoder layers, or layers share weights.
    """
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    layers = [each for each in layers if not any(each in other.modules() for other in layers if other is not each)]
    kind = type(model).__name__
    if not layers:
        raise ValueError(f"{kind} has no decoder layers to shard; generate with whole weights")
    if shared := _shared(model, layers):
        raise ValueError(f"layers of {kind} share {shared}, which can't be sharded; generate with whole weights")
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)


def _shared(model: nn.Module, layers: list[Any]) -> str | None:
    """Return the name of a weight that two layers, or a layer and another part, share; None without such a weight."""
    owner_of: dict[int, nn.Module | None] = {}
    owners = {id(part): layer for layer in layers for part in layer.modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        for own, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if owner_of.setdefault(id(weight), owners.get(id(module))) is not owners.get(id(module)):
                return f"{name}.{own}"
    return None
