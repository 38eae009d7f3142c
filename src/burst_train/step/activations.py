"""Save activation memory in a model's layers, and compile their parts, as the command's flags ask."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_attention.comm.agreement import Agreement
from burst_attention.integrations import hf
from burst_attention.memory.offload import Store

from ..memory import MemoryConfig

COMPILED = ("input_layernorm", "post_attention_layernorm", "mlp")  # parts of a layer, where it has them


def keep_less(body: nn.Module, memory: MemoryConfig, agreement: Agreement, *, store: Store | None = None) -> None:
    """Apply ``memory`` to a model without its head, before FSDP2; ValueError on every rank if one can't."""
    with agreement.entering("the model"):
        hf.Memory(
            recompute=memory.remat,
            attention_chunks=memory.attention_chunks,
            mlp_chunks=memory.mlp_chunks,
            offload=None if memory.offload == "none" else memory.offload,
        ).apply(body, store=store)
    agreement.agree("the model", {"memory": repr(memory)})
    if memory.compile:
        for layer in body.modules():
            for name in COMPILED if isinstance(layer, GradientCheckpointingLayer) else ():
                if name in layer._modules:
                    layer.get_submodule(name).compile()
