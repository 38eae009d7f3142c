"""LAO: the tiles of one pair on one device, behind one contract."""

from __future__ import annotations

import functools

import torch

from .contract import Kernel

KERNELS = ("reference", "aten", "aten-fp32", "triton")


@functools.cache
def _triton() -> Kernel:
    """One for all calls: it remembers block sizes and tables."""
    try:
        from .triton.kernel import Triton
    except ImportError as error:
        raise ValueError(f"kernel='triton' needs Triton ({error}): pip install 'burst-attention[gpu]'") from None
    return Triton()


def choose(name: str, *, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel called ``name``, checked for ``device`` and ``dtype``.

    ``auto`` takes ``aten`` on CPU, which rounds each tile to bf16 or fp16 inputs' dtype; ``aten-fp32`` does not and
    takes about a third longer. Elsewhere ``auto`` takes ``reference``.

    Raises:
        ValueError: the name is unknown, or the kernel can't do what is asked.
    """
    if name == "auto":
        name = "aten" if device.type == "cpu" else "reference"
    kernel: Kernel
    if name == "reference":
        from .reference import Reference

        kernel = Reference()
    elif name in ("aten", "aten-fp32"):
        from .aten import Aten

        kernel = Aten(upcast=name == "aten-fp32")
    elif name == "triton":
        kernel = _triton()
    else:
        raise ValueError(f"kernel={name!r} is unknown; choose one of auto, {', '.join(KERNELS)}")
    kernel.check(device, dtype)
    return kernel
