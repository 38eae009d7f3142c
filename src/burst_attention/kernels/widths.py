"""Checks of head dimensions, devices and dtypes, and padding, for GPU and stock kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .precision import HALVES

WIDEST = 256  # maximum head dimension of GPU kernels


def same_width(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Zero-pad the last dims to one width, a multiple of ``multiple``. Zeros change no scores or outputs."""
    width = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
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
