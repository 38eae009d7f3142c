"""What a tile kernel promises. A kernel knows the tiles of one pair on one device, and nothing of ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """What a backward computes from: the pair of the forward, and its rows' dO, lse and D = rowsum(dO * out).

    dout [B, Hq, Sq, Dv]; lse and delta [B, Hq, Sq], fp32 or fp64, belong to the whole row; the rest as in the forward.
    ``final``: nothing will be added to the gradients, so they may be rounded to the io dtype already, once.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    tiles: Tiles
    scale: float
    final: bool = False


class Kernel(Protocol):
    """Attention over all tiles of one pair: queries [B, Hq, Sq, D], keys [B, Hkv, Sk, D], values [B, Hkv, Sk, Dv].

    The tensors hold just the rows that some tile touches, may be strided (the last dim is dense) and are never
    written to. Hq % Hkv == 0. Tiles are disjoint; every row and every column of a tile sees something. ``scale`` > 0.
    """

    @property
    def name(self) -> str: ...

    def exact_partials(self, dtype: torch.dtype) -> bool:
        """Are the results for inputs of ``dtype`` accumulated and returned in fp32 (fp64 for fp64)?"""
        ...

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        """Raise ValueError naming what this kernel can't do, and the remedy. ``head_dims``: of q and k, and of v."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        """(out [B, Hq, Sq, Dv], lse [B, Hq, Sq] fp32 or fp64); out 0 and lse -inf where no tile covers a row."""
        ...

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of these tiles alone, in the shapes of q, k, v.

        P = exp(scale q k' - lse), dV = P' dO, dS = P * (dO v' - delta), dQ = scale dS k, dK = scale dS' q
        (FlashAttention-2, arXiv 2307.08691, algorithm 2).
        """
        ...


@runtime_checkable
class Continuing(Kernel, Protocol):
    """A kernel that can go on with what it gave for other tiles of the same rows."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, out: Tensor, lse: Tensor) -> None:
        """Fold these tiles into the running (out, lse) of their rows, in place and in the accumulation dtype.

        It does what :func:`burst_attention.kernels.merge.merge_` does, without another pass over memory. ``out`` and
        ``lse`` may be strided.
        """
        ...


@runtime_checkable
class Measuring(Kernel, Protocol):
    """A kernel that measures on first use which of its programs is the fastest."""

    def untuned(self) -> Kernel:
        """The same with one fixed choice."""
        ...


def capturing() -> bool:
    """Is a CUDA graph being captured from the current stream? Builds without CUDA can't be asked."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Within it the device of ``x`` is CUDA's current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def band_seen(tile: Tile, device: torch.device) -> Tensor:
    """bool [rows, columns]: what of a tile is seen."""
    distance = torch.arange(tile.rows, device=device).unsqueeze(1) - torch.arange(tile.columns, device=device)
    return (distance >= tile.lo) & (distance <= tile.hi)
