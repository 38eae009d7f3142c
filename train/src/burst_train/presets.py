"""Sizes of named models, and the named models that can be trained from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Sizes of the published config.json: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
# num_key_value_heads, vocab_size.
SIZES: Mapping[str, tuple[int, ...]] = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": (8192, 28672, 80, 64, 8, 128256),
    "mistral-7b": (4096, 14336, 32, 32, 8, 32768),
    "qwen-2.5-7b": (3584, 18944, 28, 28, 4, 152064),
    "qwen-2.5-72b": (8192, 29568, 80, 64, 8, 152064),
    "qwen-3-8b": (4096, 12288, 36, 32, 8, 151936),
}


def _llama(name: str, *, positions: int, **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip((*names, "vocab_size"), SIZES[name], strict=True))
    return {**sizes, "max_position_embeddings": positions, "rms_norm_eps": 1e-5, **more}


# Arguments of transformers.LlamaConfig. ``tiny`` takes its vocabulary and its positions from the run.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.0625,
    },
    "llama-2-7b": _llama("llama-2-7b", positions=4096),
    "llama-2-13b": _llama("llama-2-13b", positions=4096),
    "llama-3-8b": _llama(
        "llama-3-8b", positions=8192, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    ),
}
