"""What a tile kernel promises. A kernel knows the tiles of one pair on one device, and nothing of ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Kernel(Protocol):
    """Attention over all tiles of one pair: queries [B, Hq, Sq, D], keys [B, Hkv, Sk, D], values [B, Hkv, Sk, Dv].

    The tensors hold just the rows that some tile touches, may be strided (the last dim is dense) and are never
    written to. Hq % Hkv == 0. Tiles are disjoint; every row and every column of a tile sees something.
    """

    @property
    def name(self) -> str: ...

    @property
    def continues(self) -> bool:
        """Can :meth:`extend` be called?"""
        ...

    def exact_partials(self, dtype: torch.dtype) -> bool:
        """Are the results for inputs of ``dtype`` accumulated and returned in fp32 (fp64 for fp64)?"""
        ...

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        """Raise ValueError naming what this kernel can't do, and the remedy. ``head_dims``: of q and k, and of v."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        """(out [B, Hq, Sq, Dv], lse [B, Hq, Sq] fp32 or fp64); out 0 and lse -inf where no tile covers a row."""
        ...

    def extend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, out: Tensor, lse: Tensor) -> None:
        """Fold these tiles into the running (out, lse) of their rows, in place and in the accumulation dtype.

        The merge of :func:`burst_attention.kernels.merge.merge_` without a pass of its own over memory. ``out`` and
        ``lse`` may be strided.
        """
        ...

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
        """(dq, dk, dv) of these tiles alone, in the shapes of q, k, v.

        ``lse`` and ``delta`` [B, Hq, Sq] belong to the whole row: P = exp(scale q k' - lse), dV = P' dO,
        dS = P * (dO v' - delta), dQ = scale dS k, dK = scale dS' q (FlashAttention-2, arXiv 2307.08691, algorithm 2).
        ``final``: nothing will be added to them, so they may be rounded to the io dtype already, once.
        """
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


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a partial result of ``dtype`` inputs is rounded to before it is sent.

    fp16 stays in fp32: a part of a sum may overflow where the sum does not.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
