"""LoRA (arXiv 2106.09685) by PEFT: adapters in a model, merged weights, and the folder of the adapters.

Adapters sit in every linear layer but the head. Their scale is 2: PEFT's ``lora_alpha`` is twice the rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burst_attention.integrations import hf

from ..checkpoint.snapshot import is_adapter

ADAPTER = "adapter"  # folder inside of an exported model


def add_adapters(model: nn.Module, rank: int) -> None:
    """Add adapters to a transformers model in place, and freeze its own weights."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(_config_of(model, rank), model)


def count_adapters(empty: nn.Module, rank: int) -> int:
    """Add adapters to a model without memory for its weights; return how many numbers they hold."""
    with torch.device("meta"):
        add_adapters(empty, rank)
    return sum(parameter.numel() for parameter in empty.parameters() if parameter.requires_grad)


def with_adapters(model: Any, weights: dict[str, Tensor], rank: int) -> Any:
    """Return a PEFT model whose weights are those of :func:`add_adapters`'s model; ValueError if they don't match."""
    from peft import get_peft_model

    adapted: Any = get_peft_model(model, _config_of(model, rank))
    wrong = adapted.base_model.model.load_state_dict(weights, strict=False, assign=True)
    left = [*wrong.unexpected_keys, *filter(is_adapter, wrong.missing_keys)]
    if left:
        raise ValueError(f"the adapters are not those of --lora {rank} for this model: {', '.join(sorted(left)[:3])}")
    adapted.base_model.model.tie_weights()
    return adapted


def merge(adapted: Any, folder: Path, source: str) -> Any:
    """Write a PEFT model's adapters to ``folder``, for ``source``; return the plain model with them merged."""
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = source
    adapted.save_pretrained(folder / ADAPTER, save_embedding_layers=False)
    return adapted.merge_and_unload()


def _config_of(model: nn.Module, rank: int) -> Any:
    from peft import LoraConfig

    # Mamba's fused kernels take this weight past an adapter; PEFT refuses an adapter there.
    past = [f"{name}.out_proj" for name, kind in hf.recurrent_layers(model).items() if kind.startswith("Mamba")]
    options: dict[str, Any] = {"exclude_modules": past or None, "task_type": "CAUSAL_LM"}
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", **options)
