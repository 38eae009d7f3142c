"""What the two passes of a call are to the sweep: what travels, what a pair gives, how partial results are joined.

A forward merges (out, lse) by online softmax, a backward adds up gradients; each says what its results are rounded to
on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..kernels.contract import BackwardInputs, Continuing, Kernel
from ..kernels.merge import add_, blank_output, merge_
from ..kernels.precision import accumulation_dtype, wire_dtype
from ..plan.rows import Direction, Side
from ..plan.tile import Tiles

Tensors = tuple[Tensor, ...]  # dim 2 of each is the rows of a shard: [B, H, rows, ...] or [B, H, rows]
Running = Callable[[], Tensors | None]


class Pass(Protocol):
    """What differs between a forward and a backward."""

    @property
    def direction(self) -> Direction:
        """Which of the two it is."""
        ...

    @property
    def own(self) -> Mapping[Side, Tensors]:
        """What this rank holds of each side, and what travels of it."""
        ...

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        """Partial results of one pair, for the sides that get any.

        ``running()``: the query side's total so far, its rows of this pair, in the accumulation dtype; None if there is
        none. What is folded into it in place is no partial result.
        """
        ...

    def blank(self, side: Side, rows: int) -> Tensors:
        """The identity of :meth:`combine`, in the accumulation dtype."""
        ...

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        """Fold ``part`` into ``total`` in place."""
        ...

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        """What partial results are rounded to before they are sent."""
        ...


@dataclass(frozen=True, eq=False)
class Forward:
    """Queries q [B, Hq, Sq, D] meet keys k [B, Hkv, Sk, D] and values v [B, Hkv, Sk, Dv]; (out, lse) result."""

    direction: ClassVar[Direction] = Direction.FORWARD

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    kernel: Kernel

    @property
    def own(self) -> Mapping[Side, Tensors]:
        return {Side.QUERY: (self.q,), Side.KEY: (self.k, self.v)}

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (q,), (k, v) = query, key
        if isinstance(self.kernel, Continuing) and (total := running()):
            self.kernel.extend(q, k, v, tiles, self.scale, *total)
            return {}
        return {Side.QUERY: self.kernel.forward(q, k, v, tiles, self.scale)}

    def blank(self, side: Side, rows: int) -> Tensors:
        return blank_output(self.q, self.v, rows, accumulation_dtype(self.q.dtype))

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        merge_(*total, *part)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        wide = accumulation_dtype(self.q.dtype)
        return (wide if exact else wire_dtype(self.q.dtype)), wide


@dataclass(frozen=True, eq=False)
class Backward:
    """With dout [B, Hq, Sq, Dv] and, per query row, ``stats`` = (lse, D) [B, Hq, Sq, 2]; (dq) and (dk, dv) result."""

    direction: ClassVar[Direction] = Direction.BACKWARD

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    stats: Tensor
    scale: float
    kernel: Kernel
    alone: bool = False  # one pair is all there is: nothing is added to what it gives

    @property
    def own(self) -> Mapping[Side, Tensors]:
        return {Side.QUERY: (self.dout, self.q, self.stats), Side.KEY: (self.k, self.v)}

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (dout, q, stats), (k, v) = query, key
        lse, delta = stats.unbind(-1)
        dq, dk, dv = self.kernel.backward(BackwardInputs(dout, q, k, v, lse, delta, tiles, self.scale, self.alone))
        return {Side.QUERY: (dq,), Side.KEY: (dk, dv)}

    def blank(self, side: Side, rows: int) -> Tensors:
        like = (self.q,) if side is Side.QUERY else (self.k, self.v)
        return tuple(x.new_zeros(*x.shape[:2], rows, x.shape[3], dtype=accumulation_dtype(x.dtype)) for x in like)

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        for a, b in zip(total, part, strict=True):
            add_(a, b)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        dtype = accumulation_dtype(self.q.dtype) if exact else wire_dtype(self.q.dtype)
        return (dtype,) if side is Side.QUERY else (dtype, dtype)
