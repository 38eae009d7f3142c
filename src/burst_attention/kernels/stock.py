"""Base class of kernels over stock attention functions: launch parts of tiles and combine the results.

Stock backwards use ``out`` only to compute D = rowsum(dO * out). Any surrogate out' with that row sum works, so ``out``
need not be sent. In the accumulation dtype, out' is dO times D / |dO|^2. In half precision that would round D too
coarsely, so two columns of out' carry D: D divided by the largest element of dO, rounded; and the rounding error
divided by the second largest. A row of dO that is 0 carries nothing. Then D is 0 too, unless the lse has a gradient: in
calls whose lse may have one, extra columns are appended. No decision depends on the values, so a GPU's host waits for
none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import (
    CAPPING,
    BackwardInputs,
    Kernel,
    accumulation_dtype,
    blank_output,
    check_gpu,
    check_width,
    converted,
    head_blocks,
    merge_,
    store_,
    widened,
)


def surrogate_output(dout: Tensor, delta: Tensor) -> Tensor:
    """Return out' [B, H, rows, Dv] in dout's dtype with rowsum(dout * out') = delta, up to rounding.

    ``delta`` [B, H, rows] is in fp32 or fp64, and 0 in rows in which dout is 0.
    """
    if dout.is_cuda and dout.dtype != delta.dtype:
        from .triton.kernel import carried  # PyTorch for CUDA brings Triton; one launch in place of 25

        return carried(dout, delta)
    fill = _project if dout.dtype == delta.dtype else _carry
    out = dout.new_empty(dout.shape)
    for heads in head_blocks(dout, torch.float64):  # several temporaries
        fill(out[:, heads], dout[:, heads], delta[:, heads])
    return out


def _project(out: Tensor, dout: Tensor, delta: Tensor) -> None:
    """Write dout * delta / |dout|^2, computed with dout scaled to 1, because squares may underflow or overflow."""
    size = torch.maximum(dout.amax(-1), dout.amin(-1).neg_())
    empty = size.logical_not()
    torch.div(dout, size.masked_fill_(empty, 1.0).unsqueeze(-1), out=out)
    square = torch.linalg.vecdot(out, out).masked_fill_(empty, 1.0)
    out.mul_(torch.div(delta, size).div_(square).unsqueeze(-1))


def _carry(out: Tensor, dout: Tensor, delta: Tensor) -> None:
    """Write the two columns that carry delta; the second is clamped, where it carries delta's own rounding error."""
    size = torch.abs(dout, out=out)
    at = size.topk(min(2, dout.shape[-1]), -1).indices
    carriers = converted(dout.gather(-1, at), delta.dtype)
    empty = torch.logical_not(carriers, out=carriers.new_empty(carriers.shape, dtype=torch.bool))
    carriers.masked_fill_(empty, 1.0)  # what a column says does not count where dout is 0
    first, second = carriers[..., 0], carriers[..., -1]  # a single column carries what it can
    parts, most = dout.new_empty(carriers.shape), torch.finfo(dout.dtype).max
    high = delta / first
    high = high.copy_(parts[..., 0].copy_(high))  # rounded
    if at.shape[-1] > 1:
        parts[..., 1].copy_(torch.addcmul(delta, high, first, value=-1).div_(second).clamp_(-most, most))
    out.fill_(0).scatter_(-1, at, parts)


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """One call of a stock backward. The gradients are the sum over all calls."""

    dout: Tensor
    out: Tensor
    values: bool = True  # whether v is passed; if not, zeros are passed and dV is discarded


def backward_calls(
    dout: Tensor, delta: Tensor, *, widest: int | None, of_lse: bool = False
) -> tuple[BackwardCall, ...]:
    """Return the stock backward calls that together compute with D = ``delta``; usually one.

    In fp16, and if D may include a gradient of the lse (``of_lse``), columns are appended. If that exceeds the head
    dimension ``widest``, one call has D = 0 and a second D only: gradients are linear in (dO, D).
    """
    if not of_lse and dout.dtype != torch.float16:
        return (BackwardCall(dout, surrogate_output(dout, delta)),)
    wide, columns = appended_columns(dout, delta)
    if widest is None or wide.shape[-1] <= widest:
        return (BackwardCall(wide, columns),)
    ones, carried = torch.zeros_like(dout), torch.zeros_like(dout)
    ones[..., :PARTS], carried[..., :PARTS] = 1, columns[..., -PARTS:]
    return BackwardCall(dout, torch.zeros_like(dout)), BackwardCall(ones, carried, values=False)


PARTS = 3  # D is split into this many io-dtype numbers, whose sum is D up to rounding


def appended_columns(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dout, out') [..., Dv + 3]: dout is 1 in the new columns, out' holds delta in parts, v must be 0."""
    parts, rest = [], delta
    for _ in range(PARTS):
        part = rest.to(dout.dtype)
        parts.append(part)
        rest = rest - part.to(rest.dtype)
    columns = torch.stack(parts, -1)
    return torch.cat([dout, torch.ones_like(columns)], -1), torch.cat([torch.zeros_like(dout), columns], -1)


@dataclass(frozen=True)
class Piece:
    """Rows x columns of a pair for one launch. Neither ``causal`` nor ``masked``: everything is visible."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False
    reverse: bool = False  # read rows and columns backwards, which turns a window's start into a causal triangle
    masked: tuple[Tile, ...] = ()  # only the entries of these tiles are visible


NAN_FREE = 92600  # cuDNN's version from which dQ is right with 64 keys more than a multiple of 128


def cudnn_gives_nan(rows: int, columns: int, version: int | None) -> bool:
    """Return whether this version of cuDNN has given NaN for such a launch; None for an unknown version.

    It has for a single query or key with a negative lse, and in dQ on Hopper where the keys are 64 more than a multiple
    of 128 and lse is below -88.7, which no one knows before the launch.
    """
    return min(rows, columns) == 1 or (columns % 128 == 64 and (version or 0) < NAN_FREE)


Launch = TypeVar("Launch", Tile, Piece)  # rows [q_start, q_stop) x columns [k_start, k_stop)


HeadDims: TypeAlias = tuple[int, int]  # of q and k, and of v


class StockInputs(NamedTuple):
    """What a stock backward reads. ``delta``: D in fp32, for ops that take it; ``out`` is then 0."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None = None


class Ops:
    """A stock attention function, forward and backward, of head dimensions up to ``widest``; None for no limit.

    ``seen`` says what a launch sees. An lse is natural, [B, Hq, Sq] in fp32 (fp64 for fp64).
    """

    name: str
    multiple: int = 8  # head dimensions are padded to a multiple of this
    widest: int | None = None

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ValueError if the device or dtype is not supported."""
        check_gpu(self.name, device, dtype, range(8, 13))

    def check_dims(self, head_dims: HeadDims, device: torch.device) -> None:
        """Raise ValueError if the head dimensions are not supported on ``device``."""
        check_width(self.name, max(head_dims), self.widest_on(device))

    def widest_on(self, device: torch.device) -> int | None:
        """Return the largest head dimension on ``device``; None for no limit."""
        return self.widest

    def fitted(self, head_dims: HeadDims, device: torch.device) -> HeadDims:
        """Return the head dimensions to which inputs are padded."""
        width = -(-max(head_dims) // self.multiple) * self.multiple
        return width, width

    def takes_delta(self, head_dims: HeadDims, device: torch.device) -> bool:
        """Return whether a backward with out = 0 can be given D."""
        return False

    def capped(self, softcap: float) -> Ops:
        """Return the same functions with capped scores. Raise ValueError if they can't cap scores."""
        raise ValueError(f"kernel={self.name!r} has no soft cap; {CAPPING}")

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the backward of such inputs runs."""
        return dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Any, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        raise NotImplementedError

    def backward(self, x: StockInputs, seen: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Stock(Kernel, ABC, Generic[Launch]):
    """A kernel that cuts tiles into launches of ``ops``. All tensors of a launch are padded to one head dimension."""

    ops: Ops

    @property
    def name(self) -> str:
        return self.ops.name

    @abstractmethod
    def launches(self, tiles: Tiles) -> Iterable[Launch]:
        """Cut the tiles into disjoint launches that cover them."""

    @abstractmethod
    def run_forward(self, launch: Launch, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of a launch's rows. A row that sees nothing in this launch has lse -inf."""

    @abstractmethod
    def run_backward(self, launch: Launch, x: StockInputs, scale: float) -> Sequence[Tensor]:
        """Return (dq, dk, dv) of a launch's rows and columns."""

    def computed(self, x: Tensor, *, backward: bool) -> Tensor:
        """Convert ``x`` to the dtype of the computation."""
        return x

    def leaves_rows_blind(self, launch: Launch) -> bool:
        """Return whether a row of the launch may see nothing."""
        return False

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        """Raise ValueError if the device, dtype or head dimension is not supported."""
        self.ops.check(device, dtype)
        self.ops.check_dims(head_dims, device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        """Run the launches and merge their (out, lse)."""
        launches = list(self.launches(tiles))
        value_dim = v.shape[-1]
        q, k, v = (self.computed(x, backward=False) for x in (q, k, v))
        dim, width = self.ops.fitted((q.shape[-1], value_dim), q.device)
        q, k, v = widened(q, dim), widened(k, dim), widened(v, width)
        if len(launches) == 1 and _covers(launches[0], q, k) and not self.leaves_rows_blind(launches[0]):
            out, lse = self.run_forward(launches[0], q, k, v, scale)
            return (out if out.shape[-1] == value_dim else out[..., :value_dim]), lse
        out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
        reached = 0  # rows before this one may have results
        for launch in launches:
            rows = slice(launch.q_start, launch.q_stop)
            fold = store_ if rows.start >= reached else merge_
            fold(out[:, :, rows], lse[:, :, rows], *self.run_forward(launch, q, k, v, scale))
            reached = max(reached, rows.stop)
        return out[..., :value_dim], lse

    def forward_whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Compute what :meth:`forward` does if every row sees every column."""
        rows, columns = q.shape[2], k.shape[2]
        return self.forward(q, k, v, Tiles(np.array([(0, rows, 0, columns, 1 - columns, rows - 1)])), scale)

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Run the launches and add up their (dq, dk, dv)."""
        scale, launches = inputs.scale, list(self.launches(inputs.tiles))
        dout, q, k, v = (self.computed(x, backward=True) for x in (inputs.dout, inputs.q, inputs.k, inputs.v))
        takes_delta = inputs.out is None and self.ops.takes_delta((q.shape[-1], v.shape[-1]), q.device)
        delta = inputs.row_delta() if takes_delta else None
        calls: tuple[BackwardCall, ...]
        if inputs.out is not None:
            calls = (BackwardCall(dout, self.computed(inputs.out, backward=True)),)
        elif delta is not None:
            calls = (BackwardCall(dout, torch.zeros_like(dout)),)
        else:
            widest = self.ops.widest_on(q.device)
            calls = backward_calls(dout, inputs.row_delta(), widest=widest, of_lse=inputs.of_lse)

        if len(calls) == len(launches) == 1 and _covers(launches[0], q, k):
            grads = self.run_backward(launches[0], self._padded(calls[0], q, k, v, inputs.lse, delta), scale)
            dq, dk, dv = (grad[..., : x.shape[-1]] for grad, x in zip(grads, (q, k, v), strict=True))
            return dq, dk, dv
        sums = [torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in (q, k, v)]
        for call in calls:
            x = self._padded(call, q, k, v, inputs.lse, delta)
            for launch in launches:
                rows, columns = slice(launch.q_start, launch.q_stop), slice(launch.k_start, launch.k_stop)
                parts = zip(sums, self.run_backward(launch, x, scale), (rows, columns, columns), strict=True)
                for total, part, where in parts:
                    if call.values or total is not sums[2]:
                        total[:, :, where].add_(part[..., : total.shape[-1]])
        return sums[0], sums[1], sums[2]

    def _padded(
        self, call: BackwardCall, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor | None
    ) -> StockInputs:
        dim, width = self.ops.fitted((q.shape[-1], call.dout.shape[-1]), q.device)
        values = v if call.values else torch.zeros_like(v)
        dout, values, out = (widened(x, width) for x in (call.dout, values, call.out))
        return StockInputs(dout, widened(q, dim), widened(k, dim), values, out, lse, delta)


def _covers(launch: Tile | Piece, q: Tensor, k: Tensor) -> bool:
    return (launch.q_start, launch.q_stop, launch.k_start, launch.k_stop) == (0, q.shape[2], 0, k.shape[2])
