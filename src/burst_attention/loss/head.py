"""A model's head: how logits come of hidden states, and the products that they take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True)
class LogitForm:
    """What a model makes of its head's product: ``factor * product``, with a cap softcap * tanh(that / softcap).

    Attributes:
        factor: 1.0 for none.
        softcap: what no logit passes; None for no cap.
    """

    factor: float = 1.0
    softcap: float | None = None

    def apply_(self, product: torch.Tensor) -> torch.Tensor:
        """Logits of the product, in its place."""
        if self.factor != 1.0:
            product.mul_(self.factor)
        return product if self.softcap is None else product.div_(self.softcap).tanh_().mul_(self.softcap)


@dataclass(frozen=True, eq=False)
class Head:
    """How a model makes logits [..., V] of hidden states [..., E]: ``form`` of ``hidden @ weight.T + bias``.

    Attributes:
        weight: [V, E].
        bias: [V]; None for none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    form: LogitForm = LogitForm()

    @property
    def options(self) -> dict[str, Any]:
        """All but the weight, as keywords of the functions of :mod:`burst_attention.loss`."""
        return {"bias": self.bias, "factor": self.form.factor, "softcap": self.form.softcap}

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] of hidden [..., E] in its dtype, all at once and without a gradient: for a few tokens."""
        return self.form.apply_(F.linear(hidden, self.weight, self.bias))

    def chunk(self, hidden: torch.Tensor, weight: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """[n, V] in the compute dtype, of hidden [n, E] and the weight as :func:`product` takes them."""
        logits = product(hidden, weight.T, compute)
        return self.form.apply_(logits if self.bias is None else logits.add_(self.bias))


def operand(x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """x as the products take it: as it is on CUDA (see :func:`product`), else in the compute dtype."""
    return x if x.is_cuda else x.to(compute)


def product(a: torch.Tensor, b: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """a @ b in the compute dtype. Products of two halves are exact in fp32, and CUDA sums and returns them in it."""
    return a @ b if a.dtype == compute else torch.mm(a, b, out_dtype=compute)


def default_chunk(tokens: int, vocabulary: int, width: int) -> int:
    """How many tokens' logits exist at once, of ``tokens`` tokens [width] and a head [vocabulary, width]."""
    elements = max(CHUNK_ELEMENTS, tokens * width)
    return max(1, min(elements // max(vocabulary, 1), math.ceil(tokens / 4)))
