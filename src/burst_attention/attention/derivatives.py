"""Refuse all derivatives except one backward. For some of the others torch would silently return zeros.

A torch operator drops forward-mode tangents silently. A function marked ``once_differentiable`` has no graph for its
gradients: ``torch.autograd.functional.jvp``, which differentiates twice, then returns zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_transforms(call: str, **tensors: Tensor | None) -> None:
    """Raise ValueError inside torch.func's transforms, and for tensors with a forward-mode tangent."""
    remedy = "use backward() or torch.autograd.grad"
    if torch._C._are_functorch_transforms_active():
        raise ValueError(f"{call} can't be transformed by torch.func (grad, jacrev, jvp, jacfwd, vmap, ...); {remedy}")
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(f"{name} has a tangent, but {call} has no forward-mode derivative; {remedy}")


def check_batches(call: str, *grads: Tensor) -> None:
    """Raise ValueError for gradients that torch has batched (``is_grads_batched``, ``vectorize``)."""
    if any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
        raise ValueError(f"{call} takes no batches of gradients; leave out is_grads_batched and vectorize")


def differentiable_once(call: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an autograd Function's backward so that its results refuse to be differentiated again."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``backward`` so that a second derivative raises an error."""

        def once(ctx: Any, *grads: Tensor) -> Any:
            saved = list(ctx.saved_tensors)
            again = torch.is_grad_enabled()
            sources = [x for x in (*grads, *saved) if again and x is not None and x.requires_grad]
            with torch.no_grad():
                results = backward(ctx, saved, *grads)
            if not sources:
                return results
            return tuple(None if x is None else _Refused.apply(call, x, *sources) for x in results)

        return once

    return decorate


class _Refused(torch.autograd.Function):
    """Ledger. in a gradient and the tensors it depends on; out the same gradient; back an error."""

    @staticmethod
    def forward(ctx: Any, call: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.call = call
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_second(ctx.call)


def refuse_second(call: str) -> NoReturn:
    """Raise RuntimeError because a gradient of ``call`` is differentiated."""
    raise RuntimeError(f"{call} can be differentiated once; second derivatives are not supported")
