"""Sizes of decoder models, by name or from a config.json.

The work and memory of a training step follow from these sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burst_attention.attention.batch import Reach

from ..presets import SIZES

Matrix = tuple[int, int]  # rows, columns; a vector has one column


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder like Llama's: grouped-query attention, a gated feed-forward layer, norms before both.

    Attributes:
        source: where the sizes come from.
        tied: whether embedding and head are one matrix.
        biased: whether the q, k and v projections have a bias (Qwen2).
        normed: whether q and k are normed per head (Qwen3).
        windows: sliding window of each layer; None for a layer with full causal attention.
        family: the configuration's ``model_type``.
        options: of ``softcap`` and ``sinks`` those that the attention has.
        v_head_dim: head dimension of the values, if another.
    """

    name: str
    source: str
    hidden: int
    intermediate: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    biased: bool = False
    normed: bool = False
    windows: tuple[int | None, ...] = ()
    family: str = "llama"
    options: tuple[str, ...] = ()
    v_head_dim: int | None = None

    @property
    def measured(self) -> bool:
        """Whether the sizes were read from transformers' own model."""
        return False

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key-value heads together."""
        return self.kv_heads * self.head_dim

    @property
    def windows_by_count(self) -> Mapping[Reach, int]:
        """Number of layers with each window, widest window first."""
        windows = self.windows or (None,) * self.layers
        order = sorted({*windows}, key=lambda window: (window is not None, -(window or 0)))
        return {window: windows.count(window) for window in order}

    def layer(self) -> Iterator[Matrix]:
        """Yield the weights of a layer."""
        for width in (self.q_width, self.kv_width, self.kv_width):
            yield width, self.hidden
            if self.biased:
                yield width, 1
        yield self.hidden, self.q_width
        yield from ((self.intermediate, self.hidden), (self.intermediate, self.hidden))
        yield self.hidden, self.intermediate
        yield from ((self.hidden, 1), (self.hidden, 1))
        if self.normed:
            yield from ((self.head_dim, 1), (self.head_dim, 1))

    def root(self) -> Iterator[Matrix]:
        """Yield the weights outside layers: embedding, last norm, head."""
        yield self.vocabulary, self.hidden
        yield self.hidden, 1
        if not self.tied:
            yield self.vocabulary, self.hidden

    @property
    def layer_size(self) -> int:
        """Number of parameters of a layer."""
        return sum(rows * columns for rows, columns in self.layer())

    @property
    def root_size(self) -> int:
        """Number of parameters outside layers."""
        return sum(rows * columns for rows, columns in self.root())

    @property
    def size(self) -> int:
        """Number of parameters of the model."""
        return self.layers_size + self.root_size

    @property
    def layers_size(self) -> int:
        """Number of parameters of all layers."""
        return self.layers * self.layer_size

    @property
    def feed_forward_products(self) -> int:
        """Multiplications per token in a layer's feed-forward matrices."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer_products(self) -> int:
        """Multiplications per token in a layer's weight matrices, without the attention itself."""
        return 2 * self.hidden * (self.q_width + self.kv_width) + self.feed_forward_products

    @property
    def layers_products(self) -> int:
        """Multiplications per token in all layers, without the attention itself."""
        return self.layers * self.layer_products

    def memory(self, **_: Any) -> dict[str, int] | None:
        """Return bytes by part if a run without data gave them; None: a formula gives them."""
        return None

    def elementwise_bytes(self, io: int) -> int:
        """Return the bytes that element-wise operations read and write per token in a layer's forward.

        Counted in transformers' Llama, run by eager PyTorch. A norm computes in fp32: 4 ``io`` + 28 bytes per element.
        The rotary embedding moves 10 ``io`` per element of q and k, a residual sum 3 ``io``, the gate 5 ``io``.

        Args:
            io: bytes of an element of the activations.
        """
        norms, sums = 2 * (4 * io + 28) * self.hidden, 2 * 3 * io * self.hidden
        return norms + sums + 10 * io * (self.q_width + self.kv_width) + 5 * io * self.intermediate

    @property
    def head_products(self) -> int:
        """Multiplications per token in the head."""
        return self.vocabulary * self.hidden


def _model(name: str, source: str, **more: Any) -> Model:
    hidden, intermediate, layers, q_heads, kv_heads, vocabulary = SIZES[name]
    return Model(
        name=name,
        source=source,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=hidden // q_heads,
        vocabulary=vocabulary,
        **more,
    )


MODELS: Mapping[str, Model] = {
    each.name: each
    for each in (
        _model("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        _model("llama-2-13b", "meta-llama/Llama-2-13b-hf"),
        _model("llama-2-70b", "meta-llama/Llama-2-70b-hf"),
        _model("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        _model("llama-3-70b", "meta-llama/Meta-Llama-3-70B"),
        _model("mistral-7b", "mistralai/Mistral-7B-v0.3"),
        _model("qwen-2.5-7b", "Qwen/Qwen2.5-7B", biased=True),
        _model("qwen-2.5-72b", "Qwen/Qwen2.5-72B", biased=True),
        _model("qwen-3-8b", "Qwen/Qwen3-8B", normed=True),
    )
}
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
