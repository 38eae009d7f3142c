"""The contract of tile kernels. A kernel computes the tiles of one pair on one device; it knows no ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .merge import row_dot

CAPPING = "for a soft cap use kernel='auto', 'triton', 'blockwise' or 'reference'"


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """Inputs of a backward: the forward's inputs and the rows' dO, lse and D = rowsum(dO * out).

    dout is [B, Hq, Sq, Dv]. lse and delta are [B, Hq, Sq] in fp32 or fp64 and cover the whole row, not only these
    tiles; lse is 0, not -inf, in rows that see nothing. The rest is as in the forward.

    Attributes:
        final: nothing is added to the gradients later, so the kernel may round them to the io dtype.
        out: [B, Hq, Sq, Dv], in place of D where the rank has the rows' results.
        of_lse: D may include a gradient of the lse, so it may differ from 0 where dO is 0.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor | None
    tiles: Tiles
    scale: float
    final: bool = False
    out: Tensor | None = None
    of_lse: bool = False

    def row_delta(self) -> Tensor:
        """Return D, [B, Hq, Sq]."""
        if self.delta is not None:
            return self.delta
        assert self.out is not None, "a backward needs D or out"
        return row_dot(self.dout, self.out, self.lse.dtype)


class Kernel(Protocol):
    """Attention over all tiles of one pair: queries [B, Hq, Sq, D], keys [B, Hkv, Sk, D], values [B, Hkv, Sk, Dv].

    The tensors contain only rows that some tile covers. They may be strided, with a dense last dim, and are read-only.
    Hq % Hkv == 0. Tiles are disjoint. Each row and each column of a tile has at least one visible entry. ``scale`` > 0.
    """

    @property
    def name(self) -> str: ...

    def exact_partials(self, dtype: torch.dtype) -> bool:
        """Return whether results for ``dtype`` inputs are accumulated and returned in fp32 (fp64 for fp64)."""
        ...

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        """Raise ValueError with a remedy if the kernel does not support these. ``head_dims``: (of q and k, of v)."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out [B, Hq, Sq, Dv], lse [B, Hq, Sq] fp32 or fp64). Rows without a tile get out 0 and lse -inf."""
        ...

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of these tiles only, in the shapes of q, k, v.

        P = exp(scale q k' - lse), dV = P' dO, dS = P * (dO v' - delta), dQ = scale dS k, dK = scale dS' q
        (FlashAttention-2, arXiv 2307.08691, algorithm 2).
        """
        ...


@runtime_checkable
class Continuing(Kernel, Protocol):
    """A kernel that can add tiles to an earlier result of the same rows."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, out: Tensor, lse: Tensor) -> None:
        """Fold these tiles into the running (out, lse) of their rows, in place and in the accumulation dtype.

        Same result as :func:`burst_attention.kernels.merge.merge_`, but without another pass over memory. ``out`` and
        ``lse`` may be strided.
        """
        ...


@runtime_checkable
class Capping(Kernel, Protocol):
    """A kernel that can cap scores: c tanh(s / c) takes the place of each score s (Gemma 2, arXiv 2408.00118)."""

    def capped(self, softcap: float) -> Kernel:
        """Return the same kernel with scores capped at ``softcap`` > 0. Raise ValueError if its package can't."""
        ...


@runtime_checkable
class Measuring(Kernel, Protocol):
    """A kernel that measures on first use which of its configurations is fastest."""

    def untuned(self) -> Kernel:
        """Return the same kernel with one fixed configuration."""
        ...


def finite_lse(lse: Tensor) -> Tensor:
    """Return ``lse`` with 0 in rows that see nothing: e^(-inf - 0) is 0, where e^(-inf - -inf) is NaN."""
    return lse.masked_fill(torch.isneginf(lse), 0.0)


def capturing() -> bool:
    """Return whether the current stream is being captured in a CUDA graph; False without CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of ``x`` CUDA's current one: Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def band_seen(tile: Tile, device: torch.device) -> Tensor:
    """Return bool [rows, columns]: the visible entries of a tile."""
    distance = torch.arange(tile.rows, device=device).unsqueeze(1) - torch.arange(tile.columns, device=device)
    return (distance >= tile.lo) & (distance <= tile.hi)
