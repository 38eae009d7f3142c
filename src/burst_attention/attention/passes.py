"""Forward and backward as the sweep sees them.

Each pass defines what circulates, what a pair of shards yields, and how to combine partial results. A forward merges
(out, lse) by online softmax. A backward adds up gradients. Each also defines the dtypes of results on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.contract import BackwardInputs, Continuing, Kernel
from ..kernels.merge import add_, blank_output, merge_
from ..kernels.precision import accumulation_dtype, wire_dtype
from ..plan.groups import WHOLE, Groups
from ..plan.rows import Direction, Payload, Side
from ..plan.tile import Tiles

Tensors = tuple[Tensor, ...]  # dim 2 of each holds a shard's rows: [B, H, rows, ...] or [B, H, rows]
Running = Callable[[], Tensors | None]


def part_of(tensors: Tensors, parts: int, part: int) -> Tensors:
    """Return views of one of ``parts`` equal parts of the heads."""
    if parts == 1:
        return tensors
    return tuple(x.narrow(1, part * (x.shape[1] // parts), x.shape[1] // parts) for x in tensors)


def cache(q: Tensor, k: Tensor, v: Tensor, heads: int, rows: int, *, results: bool) -> Tensors:
    """Make the cache of a sequence group for one head group: q, k, v, out and lse; empty if not cached."""
    if not rows:
        return tuple(q.new_empty(0) for _ in range(5))
    counts = q.shape[1] // heads, *(max(1, k.shape[1] // heads),) * 2  # surplus groups share a key-value head
    inputs = (x.new_empty(x.shape[0], n, rows, x.shape[3]) for x, n in zip((q, k, v), counts, strict=True))
    out = (q.shape[0], counts[0], rows, v.shape[3]) if results else (0,)
    return *inputs, q.new_empty(out), q.new_empty(out[:3], dtype=accumulation_dtype(q.dtype))


@dataclass(frozen=True, eq=False)
class Forward:
    """The forward pass: (out, lse) from q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv].
     ``keeping``: buffers to fill with the sequence group's q, k, v for one head group, and maybe out, lse; None: no
    cache.
    """

    direction: ClassVar[Direction] = Direction.FORWARD

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    kernel: Kernel
    groups: Groups = WHOLE
    keeping: Tensors | None = None

    @property
    def own(self) -> Mapping[Side, Tensors]:
        """The tensors of each side that this rank holds and that circulate."""
        return {Side.QUERY: (self.q,), Side.KEY: (self.k, self.v)}

    @property
    def own_slice(self) -> Mapping[Side, tuple[Tensor | None, ...]]:
        """The buffers that cache the sequence group's q, k, v, by side; None for a tensor that is not cached."""
        return {} if self.keeping is None else {Side.QUERY: self.keeping[:1], Side.KEY: self.keeping[1:3]}

    @property
    def own_results(self) -> Tensors:
        """The buffers that cache the results of the whole sequence for one head group; () to cache none."""
        return (self.keeping or ())[3:]

    def payload(self, side: Side, payload: Payload) -> tuple[int, ...]:
        """Return the indices of the side's tensors that belong to the payload."""
        return (0,) if side is Side.QUERY else (0, 1)

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        """Compute one pair; return partial results by side, {} if a kernel extended ``running()`` in place."""
        (q,), (k, v) = query, key
        if isinstance(self.kernel, Continuing) and (total := running()):
            self.kernel.extend(q, k, v, tiles, self.scale, *total)
            return {}
        return {Side.QUERY: self.kernel.forward(q, k, v, tiles, self.scale)}

    def empty(self, side: Side, rows: int, dtypes: tuple[torch.dtype, ...]) -> Tensors:
        """Allocate partial results of some rows, for one part of the heads: here (out, lse)."""
        (q,) = part_of((self.q,), self.groups.query, 0)
        shape = (*q.shape[:2], rows)
        return q.new_empty(*shape, self.v.shape[3], dtype=dtypes[0]), q.new_empty(shape, dtype=dtypes[1])

    def blank(self, side: Side, rows: int) -> Tensors:
        """Return the identity of :meth:`combine`, in the accumulation dtype, for one part of the heads."""
        (q,) = part_of((self.q,), self.groups.query, 0)
        return blank_output(q, self.v, rows, accumulation_dtype(q.dtype))

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        """Fold ``part`` into ``total`` in place."""
        merge_(*total, *part)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        """Return the dtypes that partial results are rounded to before they are sent."""
        wide = accumulation_dtype(self.q.dtype)
        return (wide if exact else wire_dtype(self.q.dtype)), wide

    def final_dtypes(self, side: Side) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the final results."""
        return self.q.dtype, accumulation_dtype(self.q.dtype)


@dataclass(frozen=True, eq=False)
class Backward:
    """The backward pass: (dq) and (dk, dv). Its methods are those of :class:`Forward`.
     dout is [B, Hq, Sq, Dv]. ``stats``: (lse, D) per row, [B, Hq, Sq, 2]; None if ``keeping`` (what the forward cached)
    or ``results`` (of a rank that computes all its pairs) has out and lse. lse is 0, not -inf, in rows that see
    nothing. ``alone``: a single pair gives the whole result. ``of_lse``: D may include a gradient of the lse.
    """

    direction: ClassVar[Direction] = Direction.BACKWARD

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    stats: Tensor | None
    scale: float
    kernel: Kernel
    alone: bool = False
    groups: Groups = WHOLE
    keeping: Tensors | None = None
    results: Tensors | None = None
    of_lse: bool = False

    @property
    def own(self) -> Mapping[Side, Tensors]:
        # If out and lse are cached, these two only hold their places: ``own_slice`` has the tensors.
        results = (self.results or (self.q[..., :0], self.q[..., 0])) if self.stats is None else (self.stats,)
        return {Side.QUERY: (self.dout, self.q, *results), Side.KEY: (self.k, self.v)}

    @property
    def own_slice(self) -> Mapping[Side, tuple[Tensor | None, ...]]:
        if self.keeping is None:
            return {}
        results = (None,) if self.stats is not None else self.keeping[3:]
        return {Side.QUERY: (None, self.keeping[0], *results), Side.KEY: self.keeping[1:3]}

    @property
    def own_results(self) -> Tensors:
        return ()

    def payload(self, side: Side, payload: Payload) -> tuple[int, ...]:
        if side is Side.KEY:
            return 0, 1
        return {
            Payload.ALL: (0, 1, 2),
            Payload.INPUTS: (1,),
            Payload.GRADIENTS: (0, 2),
            Payload.OUTPUT_GRADIENT: (0,),
        }[payload]

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (dout, q, *results), (k, v) = query, key
        out, lse, delta = (*results, None) if self.stats is None else (None, *results[0].unbind(-1))
        assert lse is not None
        inputs = BackwardInputs(dout, q, k, v, lse, delta, tiles, self.scale, self.alone, out, self.of_lse)
        dq, dk, dv = self.kernel.backward(inputs)
        return {Side.QUERY: (dq,), Side.KEY: (dk, dv)}

    def empty(self, side: Side, rows: int, dtypes: tuple[torch.dtype, ...]) -> Tensors:
        like = part_of((self.q,) if side is Side.QUERY else (self.k, self.v), self.groups.count(side), 0)
        made = zip(like, dtypes, strict=True)
        return tuple(x.new_empty(*x.shape[:2], rows, x.shape[3], dtype=dtype) for x, dtype in made)

    def blank(self, side: Side, rows: int) -> Tensors:
        return tuple(x.zero_() for x in self.empty(side, rows, self.wire_dtypes(side, exact=True)))

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        for a, b in zip(total, part, strict=True):
            add_(a, b)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        dtype = accumulation_dtype(self.q.dtype) if exact else wire_dtype(self.q.dtype)
        return (dtype,) if side is Side.QUERY else (dtype, dtype)

    def final_dtypes(self, side: Side) -> tuple[torch.dtype, ...]:
        return (self.q.dtype,) if side is Side.QUERY else (self.q.dtype, self.q.dtype)


Pass = Forward | Backward
