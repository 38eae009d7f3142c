"""A transformers model's decoder layers: where they are, what their attention sees, and how they run on shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_attention.attention.batch import Plans, Reach
from burst_attention.integrations import hf
from burst_attention.integrations.hf import converted, known, parts, vision
from burst_attention.integrations.hf.checks import running
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
    converted.convert(body_of(model))
