"""Models by name: sizes of published configurations. ``burst train`` gives them random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

POSITIONS = "max_position_embeddings"
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _preset(kind: str, *sizes: int, positions: int, theta: float = 1e4, **more: Any) -> tuple[str, dict[str, Any]]:
    """Return the model_type and the configuration's arguments; ``sizes``: ``_NAMES`` and the vocabulary's."""
    rope = {"rope_type": "default", "rope_theta": theta}
    own = dict(zip((*_NAMES, "vocab_size"), sizes, strict=True))
    return kind, {**own, POSITIONS: positions, "rope_parameters": rope, "rms_norm_eps": 1e-5, **more}


# From the config.json of each model on the hub. ``tiny`` takes its vocabulary and its positions from the run.
PRESETS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", {**dict(zip(_NAMES, (256, 704, 2, 4, 2), strict=True)), "initializer_range": 0.0625}),
    "llama-2-7b": _preset("llama", 4096, 11008, 32, 32, 32, 32000, positions=4096),
    "llama-2-13b": _preset("llama", 5120, 13824, 40, 40, 40, 32000, positions=4096),
    "llama-2-70b": _preset("llama", 8192, 28672, 80, 64, 8, 32000, positions=4096),
    "llama-3-8b": _preset("llama", 4096, 14336, 32, 32, 8, 128256, positions=8192, theta=5e5),
    "llama-3-70b": _preset("llama", 8192, 28672, 80, 64, 8, 128256, positions=8192, theta=5e5),
    "mistral-7b": _preset(
        "mistral", 4096, 14336, 32, 32, 8, 32768, positions=32768, theta=1e6, sliding_window=None, head_dim=128
    ),
    "qwen-2.5-7b": _preset("qwen2", 3584, 18944, 28, 28, 4, 152064, positions=131072, theta=1e6, rms_norm_eps=1e-6),
    "qwen-2.5-72b": _preset("qwen2", 8192, 29568, 80, 64, 8, 152064, positions=131072, theta=1e6),
    "qwen-3-8b": _preset(
        "qwen3", 4096, 12288, 36, 32, 8, 151936, positions=40960, theta=1e6, rms_norm_eps=1e-6, head_dim=128
    ),
}


def has_own_positions(model: str) -> bool:
    """Whether a model comes with a number of positions; ``tiny`` takes that of the run."""
    return model not in PRESETS or POSITIONS in PRESETS[model][1]
