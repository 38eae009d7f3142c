"""Model sizes that can be trained from scratch, in the terms of ``transformers.LlamaConfig``."""

from __future__ import annotations

from typing import Any

_LLAMA = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.0625,
    },
    "llama-2-7b": _LLAMA | _LLAMA_7B,
    "llama-2-13b": _LLAMA | _LLAMA_13B,
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}
