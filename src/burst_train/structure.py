"""What training reads of a transformers model: its decoder layers, and what their attention sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer


def build_empty(config: Any) -> Any:
    """Return the model of a configuration without memory for its weights; ValueError if none takes text alone."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        images = ", a vision-language model," * (getattr(config, "vision_config", None) is not None)
        raise ValueError(
            f"model_type={config.model_type!r} of the configuration{images} has no causal language model in "
            "transformers, and this command takes only those; train it by hf.parallelize and a trainer"
        )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_text_alone(model: Any) -> None:
    """Raise ValueError for a model with an image encoder."""
    if getattr(model.config, "vision_config", None) is not None:
        raise ValueError(
            f"{type(model).__name__} has an image encoder, and --data holds text only; train it by hf.parallelize and "
            "a trainer"
        )


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return a causal language model's decoder layers; ValueError if it has none, several lists, or images."""
    check_text_alone(model)
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    stacks = [part for part in lists if all(isinstance(layer, GradientCheckpointingLayer) for layer in part)]
    if len(stacks) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(stacks)} lists of decoder layers, and its layers are sharded one by one; "
            "train it by hf.parallelize and a trainer"
        )
    return stacks[0]


def sharded_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers that FSDP2 shards one by one: those that share no parameter with other layers."""
    layers = [*decoder_layers(model)]
    users: dict[int, int] = {}
    for layer in layers:
        for parameter in {id(p) for p in layer.parameters()}:
            users[parameter] = users.get(parameter, 0) + 1
    return [layer for layer in layers if all(users[id(p)] == 1 for p in layer.parameters())]
