"""LAO: the tiles of one pair on one device, behind one contract."""

from __future__ import annotations

import torch

from .contract import Kernel

KERNELS = ("reference", "aten", "aten-fp32")


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
    else:
        raise ValueError(f"kernel={name!r} is unknown; choose one of auto, {', '.join(KERNELS)}")
    kernel.check(device, dtype)
    return kernel
