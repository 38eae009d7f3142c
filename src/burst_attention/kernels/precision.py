"""Supported dtypes, head dimensions and devices, and how tensors are converted and padded for kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

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


def same_width(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Zero-pad the last dims to one width, a multiple of ``multiple``. Zeros change no scores or outputs."""
    widths = {x.shape[-1] for x in tensors}
    width = -(-max(widths) // multiple) * multiple
    if widths == {width}:
        return tensors
    return tuple(x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors)


def check_width(name: str, width: int, widest: int | None) -> None:
    """Raise ValueError if the head dimension ``width`` exceeds ``widest``; None for no limit."""
    if widest is not None and width > widest:
        raise ValueError(f"kernel={name!r} takes head dims up to {widest}, not {width}; use kernel='reference'")


def check_gpu(name: str, device: torch.device, dtype: torch.dtype, capabilities: range) -> None:
    """Raise ValueError unless the device is a GPU of these compute capabilities (major) and the dtype bf16 or fp16."""
    if device.type != "cuda":
        raise ValueError(f"kernel={name!r} runs on cuda, the tensors are on {device}; use kernel='aten'")
    major = torch.cuda.get_device_capability(device)[0]
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
