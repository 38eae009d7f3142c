"""The contract of tile kernels: what they take and return, in which dtypes, and how their results combine.

A kernel computes the tiles of one pair on one device; it knows no ranks. Partial results are merged by online softmax
(arXiv 2403.09347, equation 4; arXiv 1805.02867) or added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan.tile import Tile, Tiles

HALVES = (torch.bfloat16, torch.float16)
WIDEST = 256  # maximum head dimension of GPU kernels
DTYPES = (torch.float64, torch.float32, *HALVES)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def converted(x: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Return ``x`` in ``dtype``: a dense copy, by one operator, or ``x`` itself if it has that dtype."""
    return x if x.dtype == dtype and not copy else x.new_empty(x.shape, dtype=dtype).copy_(x)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are sent: fp32 for fp16, which a partial sum can overflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def widened(x: Tensor, width: int) -> Tensor:
    """Zero-pad the last dim to ``width``. Zeros change no scores or outputs."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def major_capability(device: torch.device) -> int:
    """Return the major number of a GPU's compute capability; 0 for another device."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def check_width(name: str, width: int, widest: int | None) -> None:
    """Raise ValueError if the head dimension ``width`` exceeds ``widest``; None for no limit."""
    if widest is not None and width > widest:
        raise ValueError(f"kernel={name!r} takes head dims up to {widest}, not {width}; use kernel='reference'")


def check_gpu(name: str, device: torch.device, dtype: torch.dtype, capabilities: range) -> None:
    """Raise ValueError unless the device is a GPU of these compute capabilities (major) and the dtype bf16 or fp16."""
    if device.type != "cuda":
        raise ValueError(f"kernel={name!r} runs on cuda, the tensors are on {device}; use kernel='aten'")
    major = major_capability(device)
    if major not in capabilities:
        raise ValueError(
            f"kernel={name!r} is for compute capability {capabilities.start}.x to {capabilities.stop - 1}.x, {device} "
            f"has {major}.x; use kernel='triton'"
        )
    if dtype not in HALVES:
        raise ValueError(f"kernel={name!r} does not take {dtype}; use kernel='triton' or 'reference'")


def no_dropout(like: Tensor) -> tuple[Tensor, ...]:
    """Return a generator state that is never used."""
    return tuple(torch.zeros((), dtype=torch.int64, device=like.device) for _ in range(2))


# The most bytes of a temporary copy, on CPUs and on GPUs: smaller blocks cost operators, larger ones memory.
BLOCK_BYTES = (1 << 22, 1 << 28)


def head_blocks(x: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Yield slices of the heads of ``x`` [B, H, rows, D], so that a copy of one in ``dtype`` takes little memory."""
    heads, size = x.shape[1], x.numel() * dtype.itemsize
    most = max(1, heads * BLOCK_BYTES[x.is_cuda] // max(1, size))
    for first in range(0, heads, most):
        yield slice(first, min(first + most, heads))


def _blocks_to_widen(x: Tensor, dtype: torch.dtype) -> Iterable[slice]:
    return [slice(None)] if x.dtype == dtype else head_blocks(x, dtype)


def blank_output(q: Tensor, v: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the identity of :func:`merge_`: out 0 [B, Hq, rows, Dv] and lse -inf [B, Hq, rows]."""
    batch, heads = q.shape[:2]
    return q.new_zeros(batch, heads, rows, v.shape[-1], dtype=dtype), q.new_full(
        (batch, heads, rows), -math.inf, dtype=dtype
    )


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Fold (part_out, part_lse) into (out, lse) in place, in the accumulation dtype.

    l = logaddexp(l1, l2); out = out1 e^(l1 - l) + out2 e^(l2 - l). A side with lse -inf has weight 0.
    """
    total = torch.logaddexp(lse, part_lse)
    weight = torch.exp(part_lse - total).masked_fill_(torch.isneginf(part_lse), 0.0)  # -inf - -inf would be NaN
    weight = converted(weight, out.dtype).unsqueeze(-1)
    for heads in _blocks_to_widen(part_out, out.dtype):
        out[:, heads].lerp_(converted(part_out[:, heads], out.dtype), weight[:, heads])
    lse.copy_(total)


def store_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Do what :func:`merge_` does if (out, lse) is blank."""
    out.copy_(part_out)
    lse.copy_(part_lse)


def add_(total: Tensor, part: Tensor) -> None:
    """Add ``part`` [B, H, rows, D] to ``total`` in place."""
    if part.is_cuda:  # which widens as it reads
        total.add_(part)
        return
    for heads in _blocks_to_widen(part, total.dtype):
        total[:, heads].add_(converted(part[:, heads], total.dtype))  # += would also copy the sum to itself


def row_dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rowsum(a * b) [B, H, rows] of two tensors [B, H, rows, D], computed in ``dtype``."""
    wide = b.dtype if b.is_cuda else dtype  # a GPU widens as it reads
    pairs = ((converted(a[:, at], dtype), converted(b[:, at], wide)) for at in head_blocks(a, dtype))
    parts = [(x * y).sum(-1) for x, y in pairs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


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


class Kernel:
    """Attention over all tiles of one pair: queries [B, Hq, Sq, D], keys [B, Hkv, Sk, D], values [B, Hkv, Sk, Dv].

    The tensors contain only rows that some tile covers. They may be strided, with a dense last dim, and are read-only.
    Hq % Hkv == 0. Tiles are disjoint. Each row and each column of a tile has at least one visible entry. ``scale`` > 0.
    """

    continues: ClassVar[bool] = False  # whether it has :meth:`extend`

    @property
    def name(self) -> str:
        raise NotImplementedError

    def exact_partials(self, dtype: torch.dtype) -> bool:
        """Return whether results for ``dtype`` inputs are accumulated and returned in fp32 (fp64 for fp64)."""
        raise NotImplementedError

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        """Raise ValueError with a remedy if the kernel does not support these. ``head_dims``: (of q and k, of v)."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out [B, Hq, Sq, Dv], lse [B, Hq, Sq] fp32 or fp64). Rows without a tile get out 0 and lse -inf."""
        raise NotImplementedError

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of these tiles only, in the shapes of q, k, v.

        P = exp(scale q k' - lse), dV = P' dO, dS = P * (dO v' - delta), dQ = scale dS k, dK = scale dS' q
        (FlashAttention-2, arXiv 2307.08691, algorithm 2).
        """
        raise NotImplementedError

    def extend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, out: Tensor, lse: Tensor) -> None:
        """Fold these tiles into the running (out, lse) of their rows, in place and in the accumulation dtype.

        Same result as :func:`merge_`, but without another pass over memory. ``out`` and ``lse`` may be strided.
        """
        raise NotImplementedError

    def capped(self, softcap: float) -> Kernel:
        """Return the same kernel with c tanh(s / c) in place of each score s (Gemma 2, arXiv 2408.00118), c > 0.

        Raise ValueError if it can't cap scores.
        """
        raise ValueError(f"kernel={self.name!r} has no soft cap; {CAPPING}")

    def untuned(self) -> Kernel:
        """Return the same kernel with one fixed configuration, if it measures which one is fastest."""
        return self


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
