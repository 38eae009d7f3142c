"""Run a token-wise module, such as a norm or a feed-forward layer, in chunks of its tokens.

Only the module's inputs are saved. The backward recomputes one chunk at a time, so that intermediate results and their
gradients exist for one chunk only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from burst_attention.attention.head_chunks import added
from burst_attention.attention.passes import differentiable_once

from ..snapshots import Snapshot, inside

_DEVICES = ("cpu", "cuda")


class InTokenChunks(nn.Module):
    """A token-wise module that processes [B, S, E] in ``token_chunks`` chunks of S, or [T, E] in chunks of T."""

    token_chunks: int
    stock_class: Any

    def __call__(self, *inputs: Tensor) -> Tensor:  # __call__, so that the module's sharding hooks see each chunk
        if isinstance(self, FSDPModule):  # its hooks gather its weights for one call, so it runs on all tokens
            return super().__call__(*inputs)
        run, dim, weights = super().__call__, inputs[0].ndim - 2, [*self.parameters()]
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *weights)):
            return _ModuleCall(run, self, dim, len(inputs), None).forward(inputs)
        held = _SavedInputs.apply(*inputs)
        node = next((x.grad_fn for x in held if x.requires_grad), None)
        return _RunInChunks.apply(_ModuleCall(run, self, dim, len(inputs), node), *held, *weights)


class _SavedInputs(torch.autograd.Function):
    """Saves a module's inputs before it runs, so that a checkpoint's recomputation can stop before the module."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


class _ModuleCall:
    """One call of a module: how to run a chunk, and the node that saves its inputs (None: they need no gradient)."""

    def __init__(self, run: Callable[..., Tensor], module: InTokenChunks, dim: int, count: int, node: Any) -> None:
        self._run, self.module, self.dim, self.count, self.node = run, module, dim, count, node
        self.after: Snapshot | None = None  # the module after its forward
        self._autocast = [(each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each)) for each in _DEVICES]

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        joined = _Joined(inputs[0], self.dim)
        for chunk in self.chunks(inputs):
            joined.add(self.run(chunk))
        return joined.whole()

    def run(self, chunk: Sequence[Tensor]) -> Tensor:
        with ExitStack() as modes:
            for device, dtype, enabled in self._autocast:
                modes.enter_context(torch.autocast(device, dtype, enabled=enabled))
            return self._run(*chunk)

    def chunks(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the chunks of tensors that have the same tokens."""
        return zip(*(_chunks(x, self.module.token_chunks, self.dim) for x in tensors), strict=True)


class _RunInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _ModuleCall, *tensors: Tensor) -> Tensor:
        inputs = tensors[: call.count]
        ctx.call = call
        ctx.save_for_backward(*(inputs if call.node is None else ()))
        out = call.forward(inputs)
        if not torch.compiler.is_compiling():
            call.after = Snapshot(inside(call.module))
        return out

    @staticmethod
    @differentiable_once("a module in chunks of tokens")
    def backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> tuple[Any, ...]:
        call: _ModuleCall = ctx.call
        weights, wanted = [*call.module.parameters()], ctx.needs_input_grad[1:]
        if call.after is not None:
            call.after.check_since_forward(call.module, "mlp_chunks")
            _check_trained(call.module, weights, wanted[call.count :])
        inputs = saved if call.node is None else call.node.saved_tensors
        sums: list[Tensor | None] = [None for _ in weights]
        joined = [_Joined(x, call.dim) if want else None for x, want in zip(inputs, wanted, strict=False)]
        for *chunk, dout in call.chunks([*inputs, grad]):
            leaves = [x.detach().requires_grad_(want) for x, want in zip(chunk, wanted, strict=False)]
            with torch.enable_grad():
                out = call.run(leaves)
            sources = [x for x, want in zip([*leaves, *weights], wanted, strict=True) if want]
            results = iter(torch.autograd.grad(out, sources, dout, allow_unused=True))
            del out, leaves
            for n, want in enumerate(wanted):
                part = next(results) if want else None
                if part is not None and n >= call.count:
                    sums[n - call.count] = added(sums[n - call.count], part)
                elif part is not None and (target := joined[n]) is not None:
                    target.add(part)
        grads = [None if x is None else x.to(weight.dtype) for x, weight in zip(sums, weights, strict=True)]
        return None, *(None if x is None else x.whole() for x in joined), *grads


def _check_trained(module: nn.Module, weights: Sequence[Tensor], wanted: Sequence[bool]) -> None:
    """Refuse weights that no longer need a gradient, or now need one, since the module's forward."""
    if [x.requires_grad for x in weights] != [*wanted]:
        raise ValueError(
            f"requires_grad of weights of {type(module).__name__} has changed since its forward, which mlp_chunks runs "
            "again in the backward; change it after the backward"
        )


def _chunks(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """Split a dim into chunks; a DTensor's local shards are split, so that no data moves."""
    return [_global(part, x) for part in _local(x).chunk(count, dim)]


class _Joined:
    """Joins chunks in one tensor, which is allocated with the first chunk; a DTensor's local shards are joined."""

    def __init__(self, like: Tensor, dim: int) -> None:
        self._length, self._dim, self._filled = _local(like).shape[dim], dim, 0
        self._whole: Tensor | None = None
        self._first: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Append a chunk."""
        x = _local(part)
        if self._whole is None:
            self._first = part if isinstance(part, DTensor) else None
            self._whole = x.new_empty((*x.shape[: self._dim], self._length, *x.shape[self._dim + 1 :]))
        self._whole.narrow(self._dim, self._filled, x.shape[self._dim]).copy_(x)
        self._filled += x.shape[self._dim]

    def whole(self) -> Any:
        """Return the joined tensor; None without any chunk."""
        return None if self._whole is None else _global(self._whole, self._first)


def _global(x: Tensor, like: Tensor | None) -> Tensor:
    """Return local values as a DTensor, if ``like`` is one."""
    return DTensor.from_local(x, like.device_mesh, like.placements, run_check=False) if isinstance(like, DTensor) else x


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
