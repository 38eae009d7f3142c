"""The model of ``--model``: by name, or from a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .models import MODELS, Model

KINDS = ("llama", "mistral", "qwen2", "qwen3")  # supported values of model_type
MOST_SIZE = 2**31


def model_of(name: str) -> Model:
    """Return a model by name, or read it from a config.json or its folder. Nothing is downloaded.

    Raises:
        ValueError: no such model was found, or its kind is not supported.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"--model {name!r} is not a known name ({', '.join(MODELS)}), nor a config.json, nor a folder with one; "
            "download the model's config.json and give its path, or give --q-heads, --kv-heads and --head-dim for "
            "attention only"
        )
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {name!r}: {file} can't be read: {error}") from None
    try:
        return _of_config(values, name, file)
    except (KeyError, TypeError, ValueError) as error:
        fault = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"--model {name!r}: {file} {fault}") from None


def _of_config(values: Any, name: str, file: Path) -> Model:
    if not isinstance(values, Mapping):
        raise ValueError("is not a model configuration")
    kind = values.get("model_type")
    if kind not in KINDS:
        from .measured import measured_of  # imports transformers

        return measured_of(kind, name, file)

    def size(key: str, default: int | None = None) -> int:
        value = values.get(key)
        value = default if value is None else value
        if value is None:
            raise KeyError(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_SIZE:
            raise ValueError(f"has {key} {value!r}; it must be a whole number of at least 1")
        return value

    hidden, layers, q_heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise ValueError(f"has {q_heads} query heads, which is not a multiple of its {kv_heads} key-value heads")
    if values.get("head_dim") is None and hidden % q_heads:
        raise ValueError(f"has hidden_size {hidden}, not a multiple of its {q_heads} heads, and no head_dim")
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise ValueError(f"has {key}, which is not supported here")
    return Model(
        name=name,
        source=name,
        hidden=hidden,
        intermediate=size("intermediate_size"),
        layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim", hidden // q_heads),
        vocabulary=size("vocab_size"),
        tied=bool(values.get("tie_word_embeddings", False)),
        biased=kind == "qwen2",
        normed=kind == "qwen3",
        windows=_windows(values, kind, layers),
    )


def _windows(values: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window as transformers reads it; empty if all layers have full causal attention."""
    window = values.get("sliding_window")
    if kind in ("qwen2", "qwen3") and not values.get("use_sliding_window", False):
        window = None
    if kind == "llama" or window is None:
        return ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"has sliding_window {window!r}; it must be a whole number of at least 1")
    kinds = values.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ValueError(f"has {len(kinds)} layer_types for {layers} layers")
        return tuple(window if each == "sliding_attention" else None for each in kinds)
    first = values.get("max_window_layers", 28) if kind != "mistral" else 0
    return tuple(window if n >= first else None for n in range(layers))
