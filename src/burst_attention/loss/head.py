"""A model's head: the logits of hidden states, and the matrix products for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True)
class LogitForm:
    """How a product becomes logits: y = ``factor * product``, with a cap ``softcap * tanh(y / softcap)``."""

    factor: float = 1.0
    softcap: float | None = None  # the bound of the logits' magnitude; None for no cap

    def apply(self, product: torch.Tensor) -> torch.Tensor:
        """Return the logits of the product, differentiable."""
        product = product if self.factor == 1.0 else product * self.factor
        return product if self.softcap is None else (product / self.softcap).tanh() * self.softcap

    def apply_(self, product: torch.Tensor) -> torch.Tensor:
        """Turn the product into logits in place."""
        if self.factor != 1.0:
            product.mul_(self.factor)
        return product if self.softcap is None else product.div_(self.softcap).tanh_().mul_(self.softcap)


@dataclass(frozen=True, eq=False)
class Head:
    """A model's head: logits [..., V] are ``form`` of ``hidden @ weight.T + bias``, hidden states are [..., E]."""

    weight: torch.Tensor  # [V, E]
    bias: torch.Tensor | None = None  # [V]; None for no bias
    form: LogitForm = LogitForm()

    @property
    def options(self) -> dict[str, Any]:
        """Return all but the weight, as keyword arguments for the functions of :mod:`burst_attention.loss`."""
        return {"bias": self.bias, "factor": self.form.factor, "softcap": self.form.softcap}

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return all logits [..., V] of hidden [..., E], in its dtype and without a gradient."""
        return self.form.apply_(F.linear(hidden, self.weight, self.bias))

    def chunk(self, hidden: torch.Tensor, weight: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """Return logits [n, V] in the compute dtype. Hidden [n, E] and the weight come from :func:`operand`."""
        logits = product(hidden, weight.T, compute)
        return self.form.apply_(logits if self.bias is None else logits.add_(self.bias))


def operand(x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """Return x as :func:`product` takes it: unchanged on CUDA, else in the compute dtype."""
    return x if x.is_cuda else x.to(compute)


def product(a: torch.Tensor, b: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """Return a @ b in the compute dtype; CUDA sums half-precision products in fp32 without a cast first."""
    return a @ b if a.dtype == compute else torch.mm(a, b, out_dtype=compute)


def default_chunk(tokens: int, vocabulary: int, width: int) -> int:
    """Return how many tokens' logits may exist at the same time; the head's weight is [vocabulary, width]."""
    # Logits and their gradients in fp32 then take as much memory as the hidden states in bf16.
    elements = max(CHUNK_ELEMENTS, tokens * width // 4)
    return max(1, min(elements // max(vocabulary, 1), math.ceil(tokens / 4)))
