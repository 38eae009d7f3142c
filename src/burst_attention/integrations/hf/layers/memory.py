"""Save activation memory in a model's layers: recompute them, keep their inputs elsewhere, split heads and tokens.

Weights keep their names and places. As in FSDP2, a module's class is replaced by a subclass with the same name.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_attention.attention.call import keep_attention
from burst_attention.memory.offload import Offloading, check_place, offloading

from ..classes import become, revert
from ..reading import Kind, Part, Reading, known, read
from ..reading.parts import ATTENTIONS
from ..snapshots import Snapshot, inside
from . import attention_chunks, head_chunks
from .attention_chunks import InHeadChunks
from .head_chunks import ByHeads
from .token_chunks import InTokenChunks

Recompute = Literal["none", "keep-attention", "layer"]
# Submodules of a mixture of experts that process each token for itself; its router sees all tokens at once.
_EXPERTS = ("experts", "shared_expert", "shared_experts", "shared_mlp")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Trade computation and copies for memory. No option changes results beyond rounding.

    Attributes:
        recompute: what the backward recomputes. ``layer``: each decoder layer, of which only the inputs are kept.
            ``keep-attention``: all of a layer but its attention, whose exchanges are not repeated.
        attention_chunks: project and compute the heads of a layer's attention in this many groups, one at a time. It
            must divide the key-value heads, or be a multiple of them that divides the query heads. In a model whose
            indexers choose keys, only the attention is in chunks, not its projections (docs/how-to/indexed.md).
        mlp_chunks: process a rank's tokens in this many chunks in feed-forward layers and norms. The backward
            recomputes one chunk at a time.
        offload: where the inputs of recomputed layers are kept. None: on the device. ``host``: in pinned host memory
            (GPUs only; on one H100 it freed half of what it should). ``disk:DIR``: in a file in the folder DIR.

    Raises:
        TypeError, ValueError: an option has a value that can't be used.
    """

    recompute: Recompute = "none"
    attention_chunks: int = 1
    mlp_chunks: int = 1
    offload: str | None = None

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recompute):
            raise ValueError(f"recompute={self.recompute!r} is unknown; choose one of {', '.join(get_args(Recompute))}")
        for name in ("attention_chunks", "mlp_chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be an int")
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.offload is not None:
            check_place(self.offload)
            if self.recompute == "none":
                raise ValueError(
                    f"offload={self.offload!r} keeps the inputs of recomputed layers; add recompute='layer'"
                )

    def apply(self, body: nn.Module) -> None:
        """Apply the options to the layers of a model without its head, in place, before its weights are sharded.

        Raises:
            ValueError: a layer's parts are not among those that the options know, or ``offload`` can't be used.
        """
        layers = _layers_of(read(body))
        if self != Memory() and not layers:
            raise ValueError(f"memory={self!r} needs decoder layers of transformers; {type(body).__name__} has none")
        copies = None if self.offload is None else offloading(self.offload)
        context = keep_attention if self.recompute == "keep-attention" else noop_context_fn
        if self.mlp_chunks > 1:
            modules = [module for layer in layers for module in (*_feed_forward(layer.module), *_norms(layer.module))]
            for module in (*_norms(body), *modules):
                become(module, InTokenChunks, token_chunks=self.mlp_chunks)
        if self.attention_chunks > 1:
            self._split_heads([part for layer in layers for part in layer.inside if part.kind in ATTENTIONS])
        for layer in layers:
            if self.recompute != "none":  # set the attributes that transformers' own gradient checkpointing sets
                recomputed: Any = layer.module
                recomputed._gradient_checkpointing_func = _Recomputing(recomputed, context, copies, self.recompute)
                recomputed.gradient_checkpointing = True

    def _split_heads(self, attentions: list[Part]) -> None:
        """Let attentions compute their heads in chunks; raise ValueError if one can't."""
        if pooling := next((x for part in attentions for x in part.inside if known.pools_keys(x.module)), None):
            raise ValueError(
                f"attention_chunks={self.attention_chunks} is not supported for {pooling}, which pools keys; leave it "
                "out"
            )
        of_choices = any(part.kind is Kind.INDEXED for part in attentions)
        if attentions and not of_choices and self.recompute == "keep-attention":
            raise ValueError(
                f"recompute='keep-attention' takes no attention_chunks={self.attention_chunks} for {attentions[0]}; "
                "use recompute='layer'"
            )
        for part in attentions:
            (attention_chunks if of_choices else head_chunks).convert(part.module, self.attention_chunks)

    def check(self, body: Reading) -> None:
        """Raise ValueError if a layer has changed so that the options no longer fit."""
        for part in body if self.attention_chunks > 1 else ():
            if isinstance(part.module, ByHeads):
                part.module.structures.check(part.module)
        if self.recompute == "none":
            return
        layers: list[Any] = [part.module for part in _layers_of(body)]
        for layer in layers:
            if not (layer.gradient_checkpointing and _is_ours(layer)):
                raise ValueError(
                    f"gradient checkpointing of {type(layer).__name__} changed after hf.parallelize(memory=...) set "
                    f"it to recompute={self.recompute!r}; pass gradient_checkpointing=False to the trainer, or leave "
                    "recompute and offload out"
                )


def unsave(body: nn.Module) -> None:
    """Undo :meth:`Memory.apply`."""
    layers: list[Any] = [part.module for part in _layers_of(read(body))]
    for layer in filter(_is_ours, layers):
        del layer._gradient_checkpointing_func
        layer.gradient_checkpointing = False
    revert(body, ByHeads)
    revert(body, InHeadChunks)
    revert(body, InTokenChunks)


def check_reentrant(body: Reading) -> None:
    """Refuse reentrant checkpointing of layers that get tensors with a gradient otherwise than by position."""
    layer = next((part for part in body if part.name and _is_reentrant(part.module)), None)
    if layer is None:
        return
    for part in body:
        what = "keys and values of another layer" if vars(part.module).get("is_kv_shared_layer") else None
        if known.is_called(part.module, "RotaryEmbedding") and [*part.module.parameters()]:
            what = "learned weights for the angles of all layers"
        if what is not None:
            raise ValueError(
                f"gradient checkpointing of {layer} is reentrant, but {part} has {what}, whose gradients would be "
                "lost; pass gradient_checkpointing_kwargs={'use_reentrant': False}"
            )


def _is_reentrant(module: nn.Module) -> bool:
    """Return whether torch's reentrant checkpointing is set on a layer, or wrapped around it."""
    own = vars(module)
    if getattr(own.get("checkpoint_impl"), "name", None) == "REENTRANT":  # of a CheckpointWrapper
        return True
    function = own.get("_gradient_checkpointing_func") if own.get("gradient_checkpointing") else None
    return isinstance(function, functools.partial) and function.keywords.get("use_reentrant") is not False


def _layers_of(body: Reading) -> list[Part]:
    return [part for part in body if isinstance(part.module, GradientCheckpointingLayer)]


def _is_ours(layer: nn.Module) -> bool:
    return isinstance(vars(layer).get("_gradient_checkpointing_func"), _Recomputing)


def _feed_forward(layer: nn.Module) -> Iterable[nn.Module]:
    """Return the modules of a layer's feed-forward part that process each token for itself."""
    for name in ("mlp", "feed_forward", "block_sparse_moe"):
        if name in layer._modules:
            module = layer.get_submodule(name)
            experts = [module.get_submodule(part) for part in _EXPERTS if part in module._modules]
            if any(known.is_called(each, "Llama4TextExperts") for each in experts):
                raise ValueError(
                    f"memory=Memory(mlp_chunks=...) can't split {type(module).__name__}, whose experts take all tokens "
                    "once for each expert; leave mlp_chunks out"
                )
            return experts or [module]
    raise ValueError(
        f"memory=Memory(mlp_chunks=...) does not know the feed-forward part of {type(layer).__name__}, whose parts are "
        f"{', '.join(layer._modules)}; leave mlp_chunks out"
    )


def _norms(part: nn.Module) -> Iterable[nn.Module]:
    """Return the norms of hidden states in a layer, or behind the last one. Their copies in fp32 are large."""
    return [child for child in part.children() if known.is_called(child, "Norm")]


@dataclass(eq=False)
class _Recomputing:
    """Runs a layer with activation checkpointing. The backward recomputes all but what ``context`` keeps."""

    layer: nn.Module
    context: Callable[[], Any]
    copies: Offloading | None
    option: Recompute
    recent: Snapshot | None = field(default=None, init=False)

    def __call__(self, run: Callable[..., Any], *inputs: Any) -> Any:
        copied = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        after: list[Snapshot] = []  # the layer after its forward

        def checked(*arguments: Any) -> Any:
            for snapshot in after:
                snapshot.check_since_forward(self.layer, f"recompute={self.option!r}")
            return run(*arguments)

        # Inside a checkpoint, its own hooks handle saved tensors, so these hooks only see the inputs.
        with nullcontext() if self.copies is None else self.copies.hooks(*copied):
            # attached.check_random refuses random numbers, so the generator state need not be saved.
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            out = checkpoint(checked, *inputs, **options, context_fn=self.context)
        if not torch.compiler.is_compiling():  # what is compiled does not look at the layer again
            if self.recent is None or not self.recent.unchanged():
                self.recent = Snapshot(inside(self.layer))
            after.append(self.recent)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recomputing:
        # Copies of a model share the store, which can't be copied.
        return _Recomputing(copy.deepcopy(self.layer, memo), self.context, self.copies, self.option)
