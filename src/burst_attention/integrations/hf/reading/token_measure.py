"""Measure whether what a layer computes for a token depends on other tokens.

Layers in low precision may scale by a statistic of their input. Their work is done by kernels, so they are run.
"""

from __future__ import annotations

import copy
import threading
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_SEEDED = threading.Lock()  # ranks may be threads, which share torch's random state
_TOKENS = 16  # products in low precision take multiples of 16
_FACTOR = 13.0  # large for a statistic, small for the range of 8-bit floats, and no power of two
# Relative L2. Equal rows in tensors of equal shapes give equal results; another scale of 8-bit integers changes 1e-2.
_BOUND = 1e-4
_COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def width_of(layer: nn.Module) -> int | None:
    """Return a linear layer's number of input features; None for other layers."""
    width = getattr(layer, "in_features", None)
    return width if isinstance(width, int) else None


def has_plain_weight(layer: nn.Module) -> bool:
    """Return whether a layer's weight is a tensor of torch's own, so that torch's product runs."""
    weight: Any = getattr(layer, "weight", None)
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    return weight is None or type(weight) in (torch.Tensor, nn.Parameter)


def key(layer: nn.Module) -> Any:
    """Return a key that layers share if they compute alike, so that one measurement is enough for them."""
    weight: Any = getattr(layer, "weight", None)
    flatten = getattr(weight, "__tensor_flatten__", None)
    switches = tuple(sorted((name, x) for name, x in vars(layer).items() if isinstance(x, (bool, float, str))))
    return type(layer), type(weight), layer.extra_repr(), switches, repr(flatten()[1]) if flatten else ""


def reason(layer: nn.Module, width: int, dtype: torch.dtype, *, trusted: bool) -> str | None:
    """Run a layer on random tokens. Return why it can't run on shards, or None.

    Args:
        width: features of the layer's input, [1, 16, width].
        dtype: the model's. The input has the weight's, if that is one to compute in.
        trusted: whether a layer that can't take the input is left as it is. Its products may round otherwise if other
            tokens change (experts get other numbers of rows), so the bound is that of the dtype.
    """
    try:
        mixes = _depends(layer, width, dtype, trusted)
    except Exception as error:
        if trusted:
            return None
        why = f"fails on random tokens ({type(error).__name__}: {error})"
        return f"{why}, so nothing tells whether it treats each independently; move the model to its device first"
    if not mixes:
        return None
    return (
        "was run on random tokens: results of a token depend on other tokens, and each rank would see only its shard; "
        "scale each token or row by itself"
    )


def _depends(layer: nn.Module, width: int, dtype: torch.dtype, rounds: bool) -> bool:
    """Return whether outputs or gradients of some tokens depend on values of others."""
    tensors = chain(layer.parameters(), layer.buffers())
    held = next((x for x in tensors if not x.is_meta), torch.empty(0))
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype in _COMPUTED:
        dtype = weight.dtype
    random = torch.Generator().manual_seed(1)
    tokens_in = torch.randn(1, _TOKENS, width, generator=random).to(held.device, dtype)
    ones, zeros = (torch.full((_TOKENS, 1), value, device=held.device, dtype=dtype) for value in (1.0, 0.0))
    large, none = ones.clone(), ones.clone()
    large[::2], none[::2] = _FACTOR, zeros[::2]
    twin, bound = _twin(layer, held.device), max(_BOUND, 16 * torch.finfo(dtype).eps) if rounds else _BOUND
    # Of every second token the values, then their gradients, are made large, where they add nothing to the weights'. In
    # the second case that holds for products alone: what has a bias makes something of zeros.
    for before, after, all_of_it in (((ones, none), (large, none), True), ((none, ones), (none, large), not rounds)):
        (tokens, weights), (others, moved) = (_results(twin, tokens_in, *x) for x in (before, after))
        pairs = [*zip(tokens, others, strict=True), *(zip(weights, moved, strict=True) if all_of_it else ())]
        if any(_differ(x, y, bound) for x, y in pairs):
            return True
    if not rounds:
        return False
    # Behind as many others, tokens must give what they give alone: nothing counts them, or knows their places.
    front = torch.randn(tokens_in.shape, generator=random).to(tokens_in)
    alone, again, behind = (
        _results(twin, x, *(ones.new_ones(x.shape[1], 1),) * 2, kept=slice(None), seed=seed)[0][0]
        for x, seed in ((tokens_in, 0), (tokens_in, 1), (torch.cat([front, tokens_in], 1), 0))
    )
    if _differ(again, alone, bound):  # it draws random values, which is refused elsewhere, in its own words
        return False
    return _differ(behind[:, -alone.shape[1] :], alone, bound)


def _results(
    layer: nn.Module,
    inputs: torch.Tensor,
    values: torch.Tensor,
    slopes: torch.Tensor,
    *,
    kept: slice = slice(1, None, 2),
    seed: int = 0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the output and gradient of the ``kept`` tokens, and the weights' gradients; leave the random state."""
    devices = [inputs.device] if inputs.is_cuda else []
    with _SEEDED, torch.enable_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        inputs = (inputs * values).requires_grad_()
        out = layer.forward(inputs)
        if not isinstance(out, torch.Tensor) or out.shape[:2] != inputs.shape[:2]:
            raise TypeError("it returns no tensor [1, tokens, ...]")
        if not out.requires_grad:
            return [out[:, kept]], []
        features = torch.linspace(0.5, 1.5, out.shape[-1], device=out.device, dtype=out.dtype)
        trained = [x for x in layer.parameters() if x.requires_grad and x.dim() > 1]  # no bias
        slope = (features * slopes.to(out.dtype)).expand_as(out)
        own, *others = torch.autograd.grad(out, [inputs, *trained], slope, allow_unused=True)
        tokens = [out.detach()[:, kept], *([] if own is None else [own[:, kept]])]
        return tokens, [x for x in others if x is not None]


def _differ(x: torch.Tensor, y: torch.Tensor, bound: float) -> bool:
    x, y = x.double(), y.double()
    return not bool((x - y).norm() <= bound * y.norm())


def _twin(layer: nn.Module, device: torch.device) -> nn.Module:
    """Return the layer without hooks, with copies of its buffers, and with random weights for absent ones."""
    twin = copy.copy(layer)
    own: dict[str, Any] = vars(twin)
    own["_parameters"] = {name: _present(x, device) for name, x in layer._parameters.items()}
    own["_buffers"] = {name: None if x is None else x.clone() for name, x in layer._buffers.items()}
    own["_modules"] = {name: x and _twin(x, device) for name, x in layer._modules.items()}
    return twin


def _present(weight: Any, device: torch.device) -> Any:
    """Return a weight, or random values in its place if it is sharded or on the meta device."""
    absent = weight is not None and (weight.is_meta or isinstance(weight, DTensor))
    if not absent or weight.dtype not in _COMPUTED:
        return weight
    made = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).mul_(0.02)
    return made.to(device, weight.dtype).requires_grad_(weight.requires_grad)
