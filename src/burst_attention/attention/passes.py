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
from ..plan.groups import WHOLE, Groups
from ..plan.rows import Direction, Payload, Side
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

    @property
    def own_slice(self) -> Mapping[Side, tuple[Tensor | None, ...]]:
        """Of the buffers that a forward keeps for its backward the tensors that are there; None: no such tensor yet."""
        ...

    def payload(self, side: Side, payload: Payload) -> tuple[int, ...]:
        """Which of the side's tensors these are."""
        ...

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        """Partial results of one pair, for the sides that get any.

        ``running()``: the query side's total so far, its rows of this pair, in the accumulation dtype; None if there is
        none. What is folded into it in place is no partial result.
        """
        ...

    def blank(self, side: Side, rows: int) -> Tensors:
        """The identity of :meth:`combine`, in the accumulation dtype, for one part of the heads."""
        ...

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        """Fold ``part`` into ``total`` in place."""
        ...

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        """What partial results are rounded to before they are sent."""
        ...

    def final_dtypes(self, side: Side) -> tuple[torch.dtype, ...]:
        """What results are rounded to when nothing will be added to them."""
        ...


def part_of(tensors: Tensors, parts: int, part: int) -> Tensors:
    """One of so many equal parts of the heads: views."""
    if parts == 1:
        return tensors
    return tuple(x.narrow(1, part * (x.shape[1] // parts), x.shape[1] // parts) for x in tensors)


def kept_shapes(q: Tensor, k: Tensor, v: Tensor, heads: int, rows: int) -> list[tuple[int, ...]]:
    """The shapes of what a forward keeps of its context slice's q, k and v, one of ``heads`` groups; [0] if no rows."""
    if not rows:
        return [(0,)] * 3
    counts = q.shape[1] // heads, *(max(1, k.shape[1] // heads),) * 2  # groups beyond the key-value heads share them
    return [(x.shape[0], n, rows, x.shape[3]) for x, n in zip((q, k, v), counts, strict=True)]


@dataclass(frozen=True, eq=False)
class Forward:
    """Queries q [B, Hq, Sq, D] meet keys k [B, Hkv, Sk, D] and values v [B, Hkv, Sk, Dv]; (out, lse) result."""

    direction: ClassVar[Direction] = Direction.FORWARD

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    kernel: Kernel
    groups: Groups = WHOLE
    keeping: Tensors | None = None  # q, k and v of a context slice, one head group's; to be filled

    @property
    def own(self) -> Mapping[Side, Tensors]:
        return {Side.QUERY: (self.q,), Side.KEY: (self.k, self.v)}

    @property
    def own_slice(self) -> Mapping[Side, tuple[Tensor | None, ...]]:
        return {} if self.keeping is None else {Side.QUERY: self.keeping[:1], Side.KEY: self.keeping[1:]}

    def payload(self, side: Side, payload: Payload) -> tuple[int, ...]:
        return (0,) if side is Side.QUERY else (0, 1)

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (q,), (k, v) = query, key
        if isinstance(self.kernel, Continuing) and (total := running()):
            self.kernel.extend(q, k, v, tiles, self.scale, *total)
            return {}
        return {Side.QUERY: self.kernel.forward(q, k, v, tiles, self.scale)}

    def blank(self, side: Side, rows: int) -> Tensors:
        (q,) = part_of((self.q,), self.groups.query, 0)
        return blank_output(q, self.v, rows, accumulation_dtype(q.dtype))

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        merge_(*total, *part)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        wide = accumulation_dtype(self.q.dtype)
        return (wide if exact else wire_dtype(self.q.dtype)), wide

    def final_dtypes(self, side: Side) -> tuple[torch.dtype, ...]:
        return self.q.dtype, accumulation_dtype(self.q.dtype)


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
    groups: Groups = WHOLE
    keeping: Tensors | None = None  # as the forward filled them; of q, k and v only shapes count then, but for rows

    @property
    def own(self) -> Mapping[Side, Tensors]:
        return {Side.QUERY: (self.dout, self.q, self.stats), Side.KEY: (self.k, self.v)}

    @property
    def own_slice(self) -> Mapping[Side, tuple[Tensor | None, ...]]:
        if self.keeping is None:
            return {}
        return {Side.QUERY: (None, self.keeping[0], None), Side.KEY: self.keeping[1:]}

    def payload(self, side: Side, payload: Payload) -> tuple[int, ...]:
        if side is Side.KEY:
            return 0, 1
        return {Payload.ALL: (0, 1, 2), Payload.INPUTS: (1,), Payload.GRADIENTS: (0, 2)}[payload]

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (dout, q, stats), (k, v) = query, key
        lse, delta = stats.unbind(-1)
        dq, dk, dv = self.kernel.backward(BackwardInputs(dout, q, k, v, lse, delta, tiles, self.scale, self.alone))
        return {Side.QUERY: (dq,), Side.KEY: (dk, dv)}

    def blank(self, side: Side, rows: int) -> Tensors:
        like = part_of((self.q,) if side is Side.QUERY else (self.k, self.v), self.groups.count(side), 0)
        return tuple(x.new_zeros(*x.shape[:2], rows, x.shape[3], dtype=accumulation_dtype(x.dtype)) for x in like)

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        for a, b in zip(total, part, strict=True):
            add_(a, b)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        dtype = accumulation_dtype(self.q.dtype) if exact else wire_dtype(self.q.dtype)
        return (dtype,) if side is Side.QUERY else (dtype, dtype)

    def final_dtypes(self, side: Side) -> tuple[torch.dtype, ...]:
        return (self.q.dtype,) if side is Side.QUERY else (self.q.dtype, self.q.dtype)
