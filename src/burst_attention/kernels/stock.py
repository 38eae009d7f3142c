"""Base class of kernels over stock attention functions: launch parts of tiles and combine the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import BackwardInputs
from .merge import blank_output, merge_, store_
from .pieces import Piece
from .precision import accumulation_dtype, check_width, same_width
from .surrogate import BackwardCall, GradientSums, backward_calls

Launch = TypeVar("Launch", Tile, Piece)  # rows [q_start, q_stop) x columns [k_start, k_stop)


class Ops(Protocol):
    """A stock attention function, forward and backward, of head dimensions up to ``widest``; None for no limit."""

    @property
    def name(self) -> str: ...

    @property
    def multiple(self) -> int: ...  # head dimensions are padded to a multiple of this

    @property
    def widest(self) -> int | None: ...

    @property
    def takes_delta(self) -> bool: ...  # whether a backward with out = 0 can be given D

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ValueError if the device or dtype is not supported."""
        ...


@dataclass(frozen=True)
class Stock(ABC, Generic[Launch]):
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
    def run_backward(
        self, launch: Launch, inputs: tuple[Tensor, ...], lse: Tensor, scale: float, *, delta: Tensor | None = None
    ) -> Sequence[Tensor]:
        """Return (dq, dk, dv) of a launch's rows and columns, from ``inputs`` (dout, q, k, v, out)."""

    def computed(self, x: Tensor, *, backward: bool) -> Tensor:
        """Convert ``x`` to the dtype of the computation."""
        return x

    def leaves_rows_blind(self, launch: Launch) -> bool:
        """Return whether a row of the launch may see nothing."""
        return False

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        """Raise ValueError if the device, dtype or head dimension is not supported."""
        self.ops.check(device, dtype)
        check_width(self.name, max(head_dims), self.ops.widest)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        """Run the launches and merge their (out, lse)."""
        launches = list(self.launches(tiles))
        value_dim = v.shape[-1]
        q, k, v = same_width(*(self.computed(x, backward=False) for x in (q, k, v)), multiple=self.ops.multiple)
        if len(launches) == 1 and _covers(launches[0], q, k) and not self.leaves_rows_blind(launches[0]):
            out, lse = self.run_forward(launches[0], q, k, v, scale)
            return out[..., :value_dim], lse
        out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
        reached = 0  # rows before this one may have results
        for launch in launches:
            rows = slice(launch.q_start, launch.q_stop)
            fold = store_ if rows.start >= reached else merge_
            fold(out[:, :, rows], lse[:, :, rows], *self.run_forward(launch, q, k, v, scale))
            reached = max(reached, rows.stop)
        return out[..., :value_dim], lse

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Run the launches and add up their (dq, dk, dv)."""
        lse, scale, launches = inputs.lse, inputs.scale, list(self.launches(inputs.tiles))
        dout, q, k, v = (self.computed(x, backward=True) for x in (inputs.dout, inputs.q, inputs.k, inputs.v))
        delta = inputs.row_delta() if inputs.out is None and self.ops.takes_delta else None
        calls: tuple[BackwardCall, ...]
        if inputs.out is not None:
            calls = (BackwardCall(dout, self.computed(inputs.out, backward=True)),)
        elif delta is not None:
            calls = (BackwardCall(dout, torch.zeros_like(dout)),)
        else:
            calls = backward_calls(dout, inputs.row_delta(), widest=self.ops.widest, of_lse=inputs.of_lse)
        if len(calls) == len(launches) == 1 and _covers(launches[0], q, k):
            grads = self.run_backward(launches[0], self._padded(calls[0], q, k, v), lse, scale, delta=delta)
            dq, dk, dv = (grad[..., : x.shape[-1]] for grad, x in zip(grads, (q, k, v), strict=True))
            return dq, dk, dv
        sums = GradientSums(q, k, v)
        for call in calls:
            tensors = self._padded(call, q, k, v)
            for launch in launches:
                rows, columns = slice(launch.q_start, launch.q_stop), slice(launch.k_start, launch.k_stop)
                sums.add(self.run_backward(launch, tensors, lse, scale, delta=delta), rows, columns, call)
        return sums.dq, sums.dk, sums.dv

    def _padded(self, call: BackwardCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return (dout, q, k, v, out), padded to one head dimension."""
        values = v if call.values else torch.zeros_like(v)
        return same_width(call.dout, q, k, values, call.out, multiple=self.ops.multiple)


def _covers(launch: Tile | Piece, q: Tensor, k: Tensor) -> bool:
    return (launch.q_start, launch.q_stop, launch.k_start, launch.k_stop) == (0, q.shape[2], 0, k.shape[2])
