"""Sizes of decoder models.

The work and memory of a training step follow from these sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
