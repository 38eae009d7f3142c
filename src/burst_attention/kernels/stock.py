"""What kernels over stock attention functions share: a launch for each part of the tiles, merged or added up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import accumulation_dtype
from .merge import blank_output, merge_
from .pieces import Piece
from .poison import contained_backward, contained_forward
from .surrogate import Gradients, Share, shares
from .widths import check_width, same_width

Launch = TypeVar("Launch", Tile, Piece)  # rows [q_start, q_stop) x columns [k_start, k_stop)


class Stock(ABC, Generic[Launch]):
    """A kernel that cuts tiles into launches; the tensors of each have one head dim, a multiple of something."""

    continues: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def multiple(self) -> int:
        """Of head dims."""

    @property
    @abstractmethod
    def widest(self) -> int | None:
        """Head dim; None for no limit."""

    @abstractmethod
    def check_place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ValueError for devices and dtypes that it can't do."""

    @abstractmethod
    def launches(self, tiles: Tiles) -> Iterable[Launch]:
        """Disjoint, and together the tiles."""

    @abstractmethod
    def run_forward(self, launch: Launch, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse) of a launch's rows; lse -inf for a row that sees nothing in it."""

    @abstractmethod
    def run_backward(self, launch: Launch, inputs: tuple[Tensor, ...], lse: Tensor, scale: float) -> Sequence[Tensor]:
        """(dq, dk, dv) of a launch's rows and columns, from (dout, q, k, v, out)."""

    def computed(self, x: Tensor, *, backward: bool) -> Tensor:
        """``x`` in what is computed in."""
        return x

    def leaves_rows_blind(self, launch: Launch) -> bool:
        """May a row of it see nothing?"""
        return False

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        self.check_place(device, dtype)
        check_width(self.name, max(head_dims), self.widest)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        return contained_forward(partial(self._forward, tiles=tiles, scale=scale), q, k, v, tiles)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        launches = list(self.launches(tiles))
        value_dim = v.shape[-1]
        q, k, v = same_width(*(self.computed(x, backward=False) for x in (q, k, v)), multiple=self.multiple)
        if len(launches) == 1 and _covers(launches[0], q, k) and not self.leaves_rows_blind(launches[0]):
            out, lse = self.run_forward(launches[0], q, k, v, scale)
            return out[..., :value_dim], lse
        out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
        for launch in launches:
            rows = slice(launch.q_start, launch.q_stop)
            merge_(out[:, :, rows], lse[:, :, rows], *self.run_forward(launch, q, k, v, scale))
        return out[..., :value_dim], lse

    def extend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, out: Tensor, lse: Tensor) -> None:
        raise NotImplementedError("merge what forward gives")

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        tiles: Tiles,
        scale: float,
        *,
        final: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = partial(self._backward, tiles=tiles, scale=scale)
        return contained_backward(run, dout, q, k, v, lse, delta, tiles)

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        tiles: Tiles,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        launches = list(self.launches(tiles))
        dout, q, k, v = (self.computed(x, backward=True) for x in (dout, q, k, v))
        calls = shares(dout, delta, widest=self.widest)
        if len(calls) == len(launches) == 1 and _covers(launches[0], q, k):
            grads = self.run_backward(launches[0], self._padded(calls[0], q, k, v), lse, scale)
            dq, dk, dv = (grad[..., : x.shape[-1]] for grad, x in zip(grads, (q, k, v), strict=True))
            return dq, dk, dv
        sums = Gradients(q, k, v)
        for share in calls:
            inputs = self._padded(share, q, k, v)
            for launch in launches:
                rows, columns = slice(launch.q_start, launch.q_stop), slice(launch.k_start, launch.k_stop)
                sums.add(self.run_backward(launch, inputs, lse, scale), rows, columns, share)
        return sums.dq, sums.dk, sums.dv

    def _padded(self, share: Share, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """dout, q, k, v, out."""
        values = v if share.values else torch.zeros_like(v)
        return same_width(share.dout, q, k, values, share.out, multiple=self.multiple)


def _covers(launch: Tile | Piece, q: Tensor, k: Tensor) -> bool:
    return (launch.q_start, launch.q_stop, launch.k_start, launch.k_stop) == (0, q.shape[2], 0, k.shape[2])
