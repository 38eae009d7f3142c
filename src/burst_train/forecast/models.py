"""Sizes of any causal language model of transformers, read from the model without its weights.

A recurrent layer multiplies, per token and head, with a state [K, V]: 3 K V for delta rules (decay and erase, write,
read), 2 K V for Mamba 2 and lightning attention, 3 for each number of the state in Mamba 1. Over several ranks a delta
rule runs on values of width V + K. Chunked kernels multiply somewhat more. A convolution multiplies once per weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import ceil
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from burst_attention.integrations import hf
from burst_attention.plan.indexed import Indexed

from ..presets import POSITIONS, PRESETS, has_own_positions
from ..step.model import load_config
from ..step.positions import scale_rope
from ..strategies import Heads
from ..structure import build_empty, decoder_layers
from .mixture import Mixture, blocks_of, mixtures_of

Matrix = tuple[int, int]  # rows, columns; a vector has one column
FORMULA = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")  # families whose memory is predicted
# Sizes of a mixer's heads and states, under the names of the modeling files: (heads, K, V).
_STATES = {
    "gated delta": ("num_v_heads", "head_k_dim", "head_v_dim"),
    "Kimi delta": ("num_heads", "head_dim", "head_dim"),
    "lightning": ("num_attention_heads", "head_dim", "head_dim"),
    "Mamba 2": ("num_heads", "head_dim", "ssm_state_size"),
}
LINEAR = (nn.Linear, Conv1D)
_LOOPS = "n_recurrent_loops"  # of Dory
_CONNECTIONS = ("HyperConnection", "HyperHead")  # ends of the names of classes that mix streams of hidden states


@dataclass(frozen=True, kw_only=True)
class Model(Heads):
    """A causal language model: its sizes, and its weights."""

    name: str
    layers: int
    vocabulary: int
    inside: tuple[Matrix, ...] = field(repr=False)  # weights of the decoder layers
    outside: tuple[Matrix, ...] = field(repr=False)  # all other weights
    products: int  # multiplications per token in the layers, without the attention itself and without indexers
    head_products: int  # multiplications per token in the head
    tied: bool  # embedding and head are one matrix
    reaches: tuple[hf.Reach, ...]  # what each attention sees
    indexed: tuple[Indexed | None, ...]  # how each attends to chosen keys; None: to all
    index_products: int = 0  # multiplications per token in the indexers' linear layers, which have no backward
    mixtures: tuple[Mixture, ...] = ()  # of the layers that have one
    positions: int | None = None  # max_position_embeddings; None: not stated, or as many as the run needs

    @classmethod
    def read(cls, config: Any, name: str) -> Model:
        """Read a configuration's model. Raise ValueError if a part of it is not predicted."""
        config = config.get_text_config(decoder=True)
        model, heads = build_empty(config), Heads.of(config)
        reaches, layers, indexed = hf.attention_windows(model), decoder_layers(model), hf.indexed_layers(model)
        _check_runs(config)
        indexers = [each for each in model.modules() if type(each).__name__.endswith("Indexer")]
        if len(indexers) != sum(each is not None and each.chooses for each in indexed):
            kind = type(indexers[0]).__name__
            raise ValueError(f"has an indexer that chooses keys ({kind}), whose work is not predicted")
        if not reaches or not heads.q_heads:
            raise ValueError("has no attention layer with known heads, and only a step with attention is predicted")
        inside = {id(p): _matrix(p) for p in layers.parameters()}
        head, mixtures = model.get_output_embeddings().weight, mixtures_of(layers, config)
        if mixtures:
            columns = heads.intermediate * (len(layers) - len(mixtures)) + sum(each.columns for each in mixtures)
            heads = replace(heads, intermediate=columns // len(layers))
        scoring = sum(map(_linear_products, indexers))
        return cls(
            **vars(heads),
            name=name,
            layers=len(layers),
            vocabulary=head.shape[0],
            inside=tuple(inside.values()),
            outside=tuple(_matrix(p) for p in model.parameters() if id(p) not in inside),
            products=_products(model, layers) + sum(each.products for each in mixtures) - scoring,
            index_products=scoring,
            head_products=head.numel(),
            tied=head is model.get_input_embeddings().weight,
            reaches=tuple(reaches),
            indexed=tuple(indexed),
            mixtures=tuple(mixtures),
            positions=getattr(config, POSITIONS, None) if has_own_positions(name) else None,
        )

    def cut(self, ranks: int) -> Model:
        """Return the model as a rank of a tensor-parallel axis has it: hidden states whole, all else a part."""
        inside, outside = (
            tuple((ceil(rows / ranks) if columns > 1 else rows, columns) for rows, columns in each)
            for each in (self.inside, self.outside)
        )
        return replace(
            self.of_rank(ranks),
            intermediate=self.intermediate // ranks,
            inside=inside,
            outside=outside,
            vocabulary=ceil(self.vocabulary / ranks),
            products=ceil(self.products / ranks),
            head_products=ceil(self.head_products / ranks),
        )

    @property
    def chooses(self) -> bool:
        """Whether an indexer chooses the keys of any layer."""
        return any(self.indexed)

    @property
    def has_formula(self) -> bool:
        """Whether a formula gives the memory: of these families, if all layers are alike."""
        return self.family in FORMULA and (not self.mixtures or [*self.mixtures] == [self.mixtures[0]] * self.layers)

    @property
    def rows_width(self) -> float:
        """Numbers of the rows that are copied to experts, per token and layer, the mean of all layers."""
        return sum(each.per_token * each.hidden for each in self.mixtures) / self.layers

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key-value heads together."""
        return self.kv_heads * self.head_dim

    @property
    def windows_by_count(self) -> Mapping[hf.Reach, int]:
        """Number of attention layers with each reach, those that see all first."""
        return Counter(sorted(self.reaches, key=lambda reach: reach is not None))

    @property
    def kinds_by_count(self) -> Mapping[tuple[hf.Reach, Indexed | None], int]:
        """Number of attention layers with each reach and way to get keys, in the order of ``windows_by_count``."""
        kinds = zip(self.reaches, self.indexed, strict=True)
        return Counter(sorted(kinds, key=lambda kind: kind[0] is not None))

    @property
    def layer(self) -> tuple[Matrix, ...]:
        """The weights of a layer, if all have the same."""
        return self.inside[: len(self.inside) // self.layers]

    @property
    def layer_size(self) -> int:
        """Number of parameters of a layer, on average."""
        return self.layers_size // self.layers

    @cached_property
    def layers_size(self) -> int:
        """Number of parameters of all layers."""
        return sum(rows * columns for rows, columns in self.inside)

    @cached_property
    def root_size(self) -> int:
        """Number of parameters outside layers: embedding, last norm, head."""
        return sum(rows * columns for rows, columns in self.outside)

    @property
    def size(self) -> int:
        """Number of parameters of the model."""
        return self.layers_size + self.root_size


def model_of(name: str, rope_scaling: str | None = None) -> Model:
    """Return the model of a preset, a folder or a name on the hub; ValueError if its work is not predicted."""
    if name in PRESETS:
        return _preset(name, rope_scaling)
    return _read(load_config(name), name, rope_scaling)


@cache
def _preset(name: str, rope_scaling: str | None) -> Model:
    kind, sizes = PRESETS[name]
    return _read(CONFIG_MAPPING[kind](**sizes), name, rope_scaling)


def _read(config: Any, name: str, rope_scaling: str | None) -> Model:
    if rope_scaling is not None:
        scale_rope(config, rope_scaling, model=name)
    try:
        return Model.read(config, name)
    except ValueError as error:
        raise ValueError(f"--model {name!r} {error}") from None


def _check_runs(config: Any) -> None:
    """Refuse a model that runs layers several times in a call: their weights are counted once."""
    loops = getattr(config, _LOOPS, None) or 1
    if loops > 1:
        raise ValueError(f"runs layers several times ({_LOOPS}={loops}), whose work is not predicted")


def padded(weights: Iterable[Matrix], ranks: int) -> int:
    """Return the numbers of weights of which each rank has as many rows as the fullest one."""
    return sum(ceil(rows / ranks) * ranks * columns for rows, columns in weights)


def _matrix(parameter: nn.Parameter) -> Matrix:
    rows = parameter.shape[0] if parameter.ndim else 1
    return rows, parameter.numel() // max(1, rows)


def _products(model: nn.Module, layers: nn.Module) -> int:
    """Return multiplications per token in linear layers, states and hyper-connections, those of indexers included.

    ValueError: a layer has matrices that are none of these, nor of a mixture.
    """
    recurrent = hf.recurrent_layers(layers)
    apart = {part for path in recurrent for part in layers.get_submodule(path).modules()}
    apart |= {part for block in blocks_of(layers) for part in block.modules()}
    connections = [each for each in model.modules() if type(each).__name__.endswith(_CONNECTIONS)]
    for part in layers.modules():
        matrices = {name: x for name, x in part._parameters.items() if x is not None and x.numel() > max(x.shape)}
        if matrices and not isinstance(part, (*LINEAR, nn.Embedding)) and part not in {*apart, *connections}:
            names = ", ".join(matrices)
            raise ValueError(f"has weights ({names} of {type(part).__name__}) whose work is not predicted")
    states = sum(_state_products(layers.get_submodule(path), kind) for path, kind in recurrent.items())
    mixing = sum(x.numel() for each in connections for x in each.parameters() if x.ndim > 1)
    return _linear_products(layers) + states + mixing


def _linear_products(part: nn.Module) -> int:
    return sum(each.weight.numel() for each in part.modules() if isinstance(each, LINEAR))


def _state_products(mixer: Any, kind: str) -> int:
    """Return a recurrent layer's multiplications per token outside of its linear layers."""
    convolutions = sum(each.weight.numel() for each in mixer.modules() if isinstance(each, nn.Conv1d))
    if kind == "convolution":
        return convolutions
    if kind == "Mamba 1":
        return convolutions + 3 * mixer.intermediate_size * mixer.ssm_state_size
    heads, keys, values = (getattr(mixer, size) for size in _STATES[kind])
    if "delta" in kind:
        return convolutions + 3 * heads * keys * (values + keys)
    return convolutions + 2 * heads * keys * values
