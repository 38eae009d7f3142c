"""A model's head: the logits of hidden states, and the matrix products for them.

Under tensor parallelism each rank holds some rows of the head's weight, and so some of the vocabulary's logits
(Megatron-LM, arXiv 1909.08053, section 3). Every rank of that axis has the same hidden states and labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..attention.passes import is_dtensor
from ..comm.agreement import Agreement, over_axis
from ..comm.collectives import gather, sum_
from ..comm.link import connect

CHUNK_ELEMENTS = 2**22
AXIS = "tp"  # the name of a mesh's axis whose ranks have equal tokens


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
class HeadPart:
    """The rows of a head's weight that this rank of a tensor-parallel axis holds, and exchanges with the others."""

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]  # rows by rank

    @property
    def first(self) -> int:
        """The first token id of this rank."""
        return sum(self.sizes[: self.rank])

    @cached_property
    def agreement(self) -> Agreement:
        """The agreement of the axis."""
        return connect(self.group, None)[1]

    def place(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (row of this part, whether the part has it) for token ids [n]. A row is 0 where it is not here."""
        row = target - self.first
        inside = (row >= 0) & (row < self.sizes[self.rank])
        return torch.where(inside, row, 0), inside

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor of one shape, by rank: [ranks, ...]."""
        return gather(own, self.group, "the gathering of parts of logits")

    def sum_(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, in place."""
        return sum_(own, self.group, "a sum of the loss over a cut head")

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of all parts, from this rank's [..., V of the part]."""
        wide = F.pad(logits, (0, max(self.sizes) - logits.shape[-1]))
        return torch.cat([x[..., :n] for x, n in zip(self.gather(wide), self.sizes, strict=True)], -1)


def is_cut(weight: Any) -> bool:
    """Return whether a weight [V, E], or bias [V], is a DTensor that is cut by the vocabulary over the axis "tp".

    FSDP2 cuts weights alike, over ranks that have other tokens, so the name of the axis decides.
    """
    if not is_dtensor(weight) or weight.device_mesh.mesh_dim_names != (AXIS,):
        return False
    (placement,) = weight.placements
    return bool(placement.is_shard(0)) and type(placement).__name__ == "Shard"  # not a strided one


@contextmanager
def entering(call: str, weight: Any) -> Iterator[None]:
    """Guard checks of ``call``: if they raise on a rank, all ranks of the axis that cuts the head's weight raise."""
    if not is_cut(weight) or weight.device_mesh.size() == 1:
        yield
        return
    with connect(weight.device_mesh.get_group(), None)[1].entering(over_axis(call)):
        yield


@dataclass(frozen=True, eq=False)
class Head:
    """A model's head: logits [..., V] are ``form`` of ``hidden @ weight.T + bias``, hidden states are [..., E]."""

    weight: torch.Tensor  # [V, E]; with a part, its rows
    bias: torch.Tensor | None = None  # [V], or the part's; None for no bias
    form: LogitForm = LogitForm()
    part: HeadPart | None = None  # None: this rank has the whole vocabulary

    @staticmethod
    def of(weight: Any, bias: Any = None, form: LogitForm = LogitForm()) -> Head:
        """Return a head of tensors, or of DTensors that are cut by the vocabulary."""
        if not is_cut(weight) or weight.device_mesh.size() == 1:
            whole = is_cut(weight)  # on an axis of one rank
            return Head(weight.to_local() if whole else weight, bias.to_local() if is_cut(bias) else bias, form)
        if bias is not None and not (is_cut(bias) and bias.device_mesh == weight.device_mesh):
            raise TypeError("bias is not cut like lm_head_weight; cut both by the vocabulary, along one axis")
        mesh, ranks, rows = weight.device_mesh, weight.device_mesh.size(), weight.shape[0]
        size = -(-rows // ranks)  # as torch.chunk cuts
        sizes = tuple(max(0, min(rows, size * (n + 1)) - size * n) for n in range(ranks))
        part = HeadPart(mesh.get_group(), mesh.get_local_rank(), sizes)
        local = weight.to_local()
        if not min(sizes) or local.shape[0] != sizes[part.rank]:
            raise ValueError(
                f"lm_head_weight has {rows} rows, cut into {local.shape[0]} on rank {part.rank} of {ranks}; every rank "
                "needs at least one row, and all but the last the same number"
            )
        return Head(local, None if bias is None else bias.to_local(), form, part)

    def local(self) -> Head:
        """Return the head with this rank's part of a weight that is cut by the vocabulary."""
        return Head.of(self.weight, self.bias, self.form)

    @property
    def vocabulary(self) -> int:
        """How many tokens the head knows."""
        return self.weight.shape[0] if self.part is None else sum(self.part.sizes)

    def agree(self, call: str, fields: Mapping[str, Any]) -> None:
        """Check that all ranks of the head's axis make the same call, before they exchange parts of it."""
        if self.part is not None:
            self.part.agreement.agree(over_axis(call), fields, remedy=SAME_ON_AXIS)

    @property
    def options(self) -> dict[str, Any]:
        """Return all but the weight, as keyword arguments for the functions of :mod:`burst_attention.loss`."""
        return {"bias": self.bias, "factor": self.form.factor, "softcap": self.form.softcap}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return all logits [..., V] of hidden [..., E], in its dtype and without a gradient."""
        with torch.no_grad():
            logits = self.form.apply_(F.linear(hidden, self.weight, self.bias))
            return logits if self.part is None else self.part.whole(logits)

    def differentiable_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return all logits [..., V] with a gradient; each rank of the head's axis computes the same loss of them."""
        if self.part is None:
            return self.form.apply(F.linear(hidden, self.weight, self.bias))
        own = F.linear(SummedGradient.apply(hidden, self.part.group, True), self.weight, self.bias)
        return self.form.apply(_Whole.apply(own, self.part))

    def chunk(self, hidden: torch.Tensor, weight: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """Return logits [n, V] in the compute dtype, with a part its own.

        Hidden [n, E] and the weight come from :func:`operand`.
        """
        logits = product(hidden, weight.T, compute)
        return self.form.apply_(logits if self.bias is None else logits.add_(self.bias))


class SummedGradient(torch.autograd.Function):
    """Return a tensor unchanged; sum its gradient over a group. Each rank computes a part of what follows from it.

    ``exact``: sum in fp32 at least, and round once; else in the gradient's dtype, in as few bytes.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, exact: bool) -> torch.Tensor:
        """Return ``x``."""
        ctx.group, ctx.exact = group, exact
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the sum over the group. A copy is summed: others may hold the given gradient."""
        dtype = torch.float32 if ctx.exact and grad.dtype != torch.float64 else grad.dtype
        total = grad.to(dtype, memory_format=torch.contiguous_format, copy=True)
        sum_(total, ctx.group, "a sum of gradients over a tensor-parallel axis, in a backward")
        return total.to(grad.dtype), None, None


class _Whole(torch.autograd.Function):
    """Gather the logits of all parts; the gradient of this rank's part is a slice of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, part: HeadPart) -> torch.Tensor:
        ctx.part = part
        return part.whole(logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.narrow(-1, ctx.part.first, ctx.part.sizes[ctx.part.rank]), None


SAME_ON_AXIS = "The ranks of a tensor-parallel axis compute the same tokens: pass the same on all of them"


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
