"""Save activation memory in a model's layers: recomputation, token chunks, host memory; and compile them.

Weights keep their names and places. As in FSDP2, a module's class is replaced by a subclass with the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from burst_attention.attention.remat import keep_attention

from ..memory import MemoryConfig


def keep_less(layers: nn.ModuleList, memory: MemoryConfig) -> None:
    """Apply ``memory`` to decoder layers of transformers, in place. Call it before FSDP2 shards them."""
    copies = HostCopies() if memory.offload == "activations" else None
    for layer in layers:
        if memory.mlp_chunks > 1:
            by_pieces(layer.get_submodule("mlp"), memory.mlp_chunks)
        if memory.compile:
            for name in ("input_layernorm", "post_attention_layernorm", "mlp"):
                layer.get_submodule(name).compile()
        if memory.remat != "none":  # set the attributes that transformers' own gradient checkpointing sets
            kept = keep_attention if memory.remat == "keep-attention" else noop_context_fn
            layer._gradient_checkpointing_func = partial(_recomputed, kept, copies)  # type: ignore[assignment]
            layer.gradient_checkpointing = True  # type: ignore[assignment]


def _recomputed(kept: Callable[[], Any], copies: HostCopies | None, run: Callable[..., Any], *inputs: Any) -> Any:
    # Inside a checkpoint, its own hooks handle saved tensors, so these hooks only see the inputs.
    with nullcontext() if copies is None else saved_tensors_hooks(copies.pack, copies.unpack):
        return _again(run, *inputs, context_fn=kept)


def _again(run: Callable[..., Any], *inputs: Any, context_fn: Callable[[], Any] = noop_context_fn) -> Any:
    """Run with activation checkpointing: the backward recomputes everything except what ``context_fn`` keeps."""
    # Layers use no random numbers, because dropout is refused: the generator state need not be saved.
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)


class HostCopies:
    """Hooks that keep tensors saved for the backward in pinned host memory.

    A separate CUDA stream copies them there and back. Written for CUDA; not yet run on a GPU.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def pack(self, x: Tensor) -> tuple[torch.device, Tensor]:
        """Return (original device, copy in host memory)."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(x, non_blocking=True)
        x.record_stream(self._stream)  # its memory must not be reused before the copy ends
        return x.device, copy

    def unpack(self, held: tuple[torch.device, Tensor]) -> Tensor:
        """Return the tensor on its original device."""
        device, copy = held
        assert self._stream is not None
        current = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            x = copy.to(device, non_blocking=True)
        current.wait_stream(self._stream)
        x.record_stream(current)
        return x


def by_pieces(module: nn.Module, pieces: int) -> None:
    """Make a token-wise module process [B, S, E] in ``pieces`` chunks of S.

    Only the input of each chunk is saved. The backward recomputes one chunk at a time.
    """
    kind: Any = type(module)
    module.__class__ = _by_pieces(kind)
    module.pieces = pieces  # type: ignore[assignment]


@cache
def _by_pieces(kind: Any) -> Any:
    return type(kind.__name__, (_ByPieces, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


class _ByPieces(nn.Module):
    pieces: int

    def __call__(self, hidden: Tensor) -> Tensor:  # __call__, so that the module's sharding hooks see each chunk
        run = super().__call__
        if torch.is_grad_enabled():
            run = partial(_again, run)
        return torch.cat([run(piece) for piece in _chunks(hidden, self.pieces)], 1)


def _chunks(hidden: Tensor, pieces: int) -> list[Tensor]:
    """Split dim 1 into chunks; a DTensor's local shards are split, so that no data moves."""
    if not isinstance(hidden, DTensor):
        return list(hidden.chunk(pieces, 1))
    mesh, placements = hidden.device_mesh, hidden.placements
    parts = hidden.to_local().chunk(pieces, 1)
    return [DTensor.from_local(part, mesh, placements, run_check=False) for part in parts]
