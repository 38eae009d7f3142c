"""Sizes of any causal language model of transformers, read from the model without its weights.

Linear layers, attention and recurrent layers are counted. A recurrent layer multiplies, per token and head, with a
state [K, V]: 3 K V for delta rules (decay and erase, write, read), 2 K V for Mamba 2 and lightning attention, 3 for
each number of the state in Mamba 1. Over several ranks a delta rule runs on values of width V + K. The chunked kernels
multiply somewhat more. A convolution multiplies once for each weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from burst_attention.attention.batch import Reach
from burst_attention.comm.agreement import Agreement
from burst_attention.comm.transport import Transport
from burst_attention.integrations import hf
from burst_attention.integrations.hf.mixers import mechanism, mixers_of
from burst_attention.integrations.hf.stub_forward import body_of
from burst_attention.plan.rows import Direction

from ..engines import Heads
from ..engines.body import attention_reaches, build_empty, decoder_layers, run_on_shards
from ..memory import MemoryConfig
from ..step.activations import keep_less
from .footprint import LiveStep, Peak, parts_at
from .models import Matrix, Model

MOST_RUN = 4096  # tokens of a sequence on a rank; for more, activations are scaled
# Sizes of a mixer's heads and states, under the names of the modeling files: (heads, K, V).
_STATES = {
    "gated delta": ("num_v_heads", "head_k_dim", "head_v_dim"),
    "Kimi delta": ("num_heads", "head_dim", "head_dim"),
    "lightning": ("num_attention_heads", "head_dim", "head_dim"),
    "Mamba 2": ("num_heads", "head_dim", "ssm_state_size"),
}


@dataclass(frozen=True, kw_only=True)
class MeasuredModel(Model):
    """A model whose sizes were read from transformers' own.

    Attributes:
        config: its configuration.
        inside: the weights of all decoder layers.
        outside: all other weights.
        products: multiplications per token in the layers' linear layers.
        state_products: multiplications per token in recurrent layers and convolutions.
        reaches: what each attention sees.
    """

    config: PreTrainedConfig = field(repr=False, compare=False)
    inside: tuple[Matrix, ...] = field(repr=False)
    outside: tuple[Matrix, ...] = field(repr=False)
    products: int
    state_products: int
    reaches: tuple[Reach, ...]

    @classmethod
    def of(cls, config: PreTrainedConfig, name: str) -> MeasuredModel:
        """Read a configuration's model.

        Raises:
            ValueError: ranks can't share it, or a part of it is not predicted.
        """
        hf.check_config(config)
        config = config.get_text_config(decoder=True)
        model, heads = build_empty(config), Heads.of(config)
        experts = next((each for each in model.modules() if type(each).__name__.endswith("Experts")), None)
        if experts is not None:
            raise ValueError(f"has a mixture of experts ({type(experts).__name__}), whose work is not predicted")
        reaches, layers = attention_reaches(model), decoder_layers(model)
        if not reaches or not heads.q_heads:
            raise ValueError("has no attention layer with known heads, and only a step with attention is predicted")
        inside = {id(p): _matrix(p) for p in layers.parameters()}
        linear = [each for layer in layers for each in layer.modules() if isinstance(each, nn.Linear)]
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        return cls(  # feed-forward columns and other sizes only matter to engines that refuse this family
            name=name,
            source=name,
            hidden=heads.hidden,
            intermediate=heads.intermediate,
            layers=len(layers),
            q_heads=heads.q_heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            v_head_dim=heads.v_head_dim,
            vocabulary=head.weight.shape[0],
            tied=head.weight is embedding.weight,
            family=heads.family,
            options=heads.options,
            config=config,
            inside=tuple(inside.values()),
            outside=tuple(_matrix(p) for p in model.parameters() if id(p) not in inside),
            products=sum(each.weight.numel() for each in linear),
            state_products=sum(_state_products(mixer) for layer in layers for _, mixer in mixers_of(layer)),
            reaches=tuple(reaches),
        )

    @property
    def measured(self) -> bool:
        """True: the sizes were read from transformers' own model."""
        return True

    @property
    def windows_by_count(self) -> Mapping[Reach, int]:
        """Number of attention layers with each reach."""
        return {reach: self.reaches.count(reach) for reach in dict.fromkeys(self.reaches)}

    @property
    def layers_size(self) -> int:
        """Number of parameters of all layers."""
        return sum(rows * columns for rows, columns in self.inside)

    @property
    def root_size(self) -> int:
        """Number of parameters outside layers."""
        return sum(rows * columns for rows, columns in self.outside)

    @property
    def layers_products(self) -> int:
        """Multiplications per token in all layers, without the attention itself."""
        return self.products + self.state_products

    def memory(  # type: ignore[override]
        self,
        *,
        tokens: int,
        usual: int,
        batch: int,
        world: int,
        dtype: torch.dtype,
        buffers: int,
        options: MemoryConfig,
    ) -> dict[str, int]:
        """Return bytes by part at the peak of a step.

        Args:
            usual: number of tokens from which others are scaled.
            buffers: bytes of an attention call's buffers.
        """
        key = min(usual, MOST_RUN), batch, world, dtype, options
        if key not in self._runs:
            self._runs[key] = _Run(self.config, *key)
        return self._runs[key].parts(tokens / key[0], buffers)

    @cached_property
    def _runs(self) -> dict[Any, _Run]:
        return {}


def measured_of(kind: Any, name: str, file: Path) -> MeasuredModel:
    """Read a model from its config.json, which has this ``model_type``.

    Raises:
        ValueError: transformers does not know the model, or as in :meth:`MeasuredModel.of`.
    """
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"is of model_type {kind!r}, which the installed transformers does not know")
    config: Any = CONFIG_MAPPING[kind].from_pretrained(str(file))
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"is of model_type {kind!r}, which is not a causal language model of transformers")
    return MeasuredModel.of(config, name)


def _matrix(parameter: nn.Parameter) -> Matrix:
    rows = parameter.shape[0] if parameter.ndim else 1
    return rows, parameter.numel() // max(1, rows)


def _state_products(mixer: Any) -> int:
    """Return a mixer's multiplications per token outside of its linear layers."""
    kind = mechanism(mixer)
    convolutions = sum(each.weight.numel() for each in mixer.modules() if isinstance(each, nn.Conv1d))
    if kind == "convolution":
        return convolutions
    if kind == "Mamba 1":
        return convolutions + 3 * mixer.intermediate_size * mixer.ssm_state_size
    heads, keys, values = (getattr(mixer, size) for size in _STATES[str(kind)])
    if "delta" in str(kind):
        return convolutions + 3 * heads * keys * (values + keys)
    return convolutions + 2 * heads * keys * values


class _Run(LiveStep):
    """A step on tensors without data, whose activations can be scaled to more tokens.

    Whole gradients, and the loss's chunks of logits, don't grow with the tokens, so they are held apart.
    """

    def __init__(
        self, config: PreTrainedConfig, tokens: int, batch: int, world: int, dtype: torch.dtype, options: MemoryConfig
    ) -> None:
        hf.register()
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=hf.NAME, dtype=dtype).train()
        keep_less(body_of(model), options, Agreement(Transport(None)))
        run_on_shards(model)
        reaches = attention_reaches(model)
        every, self._options = {None, *reaches}, options
        calls = {(reach, direction): 0 for reach in every for direction in Direction}
        self._reducing, self._whole, self._reductions = False, 0, list[tuple[int, int, int]]()
        super().__init__(model, world, calls, dict.fromkeys(every, (1, 0)), accumulates=False)
        with fake, self:
            self.run(batch, tokens, reaches)

    def expect(self, more: int, *, attention: bool = False) -> None:
        """Record a peak, and what of it are whole gradients; reductions of gradients are recorded separately."""
        if self._reducing:
            self._reductions.append(
                (self.alive() - self._gradients_alive(), self._gradients_alive() + more, self._gradients)
            )
            return
        before = self.peak
        super().expect(more, attention=attention)
        if self.peak is not before:
            self._whole = self._gradients_alive()

    def _gradients_alive(self) -> int:
        return sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)

    def _sum(self, *args: Any) -> None:
        self._reducing = True
        super()._sum(*args)
        self._reducing = False

    def parts(self, longer: float, buffers: int) -> dict[str, int]:
        """Return bytes by part for ``longer`` times as many tokens."""
        peak, loss = self.peak, self.peak.phase == "loss"
        held = self.before_loss if loss else peak.bytes - peak.gradients - self._whole
        rest = peak.bytes - peak.gradients - held + buffers * (not loss)
        moments = [(held, rest, peak.gradients), *self._reductions]
        held, rest, gradients = max(moments, key=lambda each: longer * each[0] + each[1] + each[2])
        phase, attention = (peak.phase, buffers * (not loss)) if gradients == peak.gradients else ("backward", 0)
        most = Peak(round(longer * held) + rest + gradients, attention, gradients, phase)
        scaled = SimpleNamespace(peak=most, before_loss=round(longer * self.before_loss), _accumulates=False)
        return parts_at(scaled, self.model, self._world, self._options)
