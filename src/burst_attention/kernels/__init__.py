"""Tile kernels: attention over the tiles of one pair on one device, all behind one contract (LAO)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import cudnn_graphs, flash
from .aten import Aten, CpuFlash, Cudnn, Efficient
from .contract import HALVES, Kernel, capturing
from .prove import check_once
from .reference import BLOCK, Reference
from .stock import PARTS
from .windowed import CudaFlash, Windowed

MANY_DOCUMENTS = 64  # from this number of documents on, one launch per tile costs too much

# The kernels that ``auto`` tries in half precision on a GPU, by compute capability (major), fastest first for full and
# causal tiles. Measured on one H100 (torch 2.11, cuDNN 9.19), bf16, 16 heads of 128, 16,384 tokens, forward / backward
# in TFLOP/s: causal: aten-cudnn 635 / 500, cudnn 621 / 500 (32 / 8 heads 574 / 513), triton 399 / 188, PyTorch's
# FlashAttention 2 300 / 299; window of 4,096: cudnn 577 / 481, triton 336 / 172, aten-flash 247 / 69, aten-cudnn
# 106 / 59. On an H200 NVIDIA publishes 702 / 606 for FlashAttention 4, causal, 64 / 8 heads. Other capabilities were
# not measured.
_RANKED: dict[int, tuple[str, ...]] = {
    8: ("flash2", "aten-flash", "triton"),
    9: ("flash4", "cudnn", "aten-cudnn", "flash3", "flash2", "aten-flash", "triton"),
    10: ("flash4", "cudnn", "aten-cudnn", "flash2", "triton"),
}
_PLAIN, _BANDED, _MANY = "full and causal tiles", "windows", "many documents"
_SEVERAL, _SEVERAL_BANDED = "several documents", "several documents with windows"
# These add in no fixed order, whatever they are asked for, and build a graph for each shape, in up to a second. Packed
# documents of ever new lengths would build some in each call.
_CUDNN = ("cudnn", "aten-cudnn")
_TAKE_DELTA = ("flash4", "triton")  # their backwards take D in fp32


@functools.cache
def _triton() -> Kernel:
    """Return the one shared Triton kernel, which caches block sizes and tables."""
    try:
        from .triton.kernel import Triton
    except ImportError as error:
        raise ValueError(f"kernel='triton' needs Triton ({error}): pip install 'triton>=3.6'") from None
    return Triton()


_MAKERS: dict[str, Callable[[], Kernel]] = {
    "reference": Reference,
    "aten": lambda: Aten(CpuFlash()),
    "aten-fp32": lambda: Aten(CpuFlash(), upcast=True),
    "aten-flash": lambda: Windowed(CudaFlash()),
    "aten-cudnn": lambda: Aten(Cudnn()),
    "cudnn": lambda: Windowed(cudnn_graphs.cudnn_graphs()),
    "aten-efficient": lambda: Aten(Efficient()),
    "flash2": lambda: Windowed(flash.flash_ops(2)),
    "flash3": lambda: Windowed(flash.flash_ops(3)),
    "flash4": lambda: Windowed(flash.flash_ops(4)),
    "triton": _triton,
    "blockwise": lambda: Reference(block=BLOCK),
}
KERNELS = tuple(_MAKERS)


def choose(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int] = (64, 64),
    documents: int = 1,
    banded: bool = False,
    softcap: float | None = None,
    exact_delta: bool = False,
) -> Kernel:
    """Return the kernel ``name``; raise ValueError if it is unknown or does not support the call.

    ``auto``: on the CPU ``aten``, which rounds each tile's result, or ``blockwise`` for a soft cap; on a GPU the first
    of :func:`candidates` that can be used here and agrees with the reference. ``head_dims``: of q and k, and of v.
    ``exact_delta``: backwards get D, and dO has no columns for it (:func:`~.stock.backward_calls`).
    """
    if name == "auto":
        wide = exact_delta and max(head_dims) + PARTS > 128
        return _choose_auto(device, dtype, head_dims, _kind(documents, banded), softcap, _ordered(), wide)[0]
    if name not in _MAKERS:
        raise ValueError(f"kernel={name!r} is unknown; choose one of auto, {', '.join(KERNELS)}")
    kernel = _MAKERS[name]()
    if softcap is not None:
        kernel = kernel.capped(softcap)
    kernel.check(device, dtype, head_dims)
    return kernel


def candidates(
    device: torch.device, dtype: torch.dtype, kind: str = _PLAIN, *, capped: bool = False, wide: bool = False
) -> tuple[str, ...]:
    """Return the kernels that ``auto`` tries, fastest first; deterministic ones if torch is asked for them.

    ``wide``: columns that carry D exceed 128, so that cuDNN needs two backward calls or runs at a lower rate. Kernels
    that take D come first; their order among others was not measured.
    """
    last = "blockwise" if capped else "reference"
    if device.type == "cpu":
        return ("blockwise",) if capped else ("aten",)
    if device.type != "cuda" or dtype == torch.float64:
        return (last,)
    if dtype not in HALVES:
        return "triton", last
    ranked = [*_RANKED[min(max(_capability(device), min(_RANKED)), max(_RANKED))]]
    if kind not in (_PLAIN, _SEVERAL):  # torch's own kernels are slow with windows
        ranked = [name for name in ranked if not name.startswith("aten-")]
    if kind == _MANY:  # Triton needs one launch for all documents
        ranked = ["triton", *(name for name in ranked if name.startswith("flash"))]
    if _ordered() or kind in (_SEVERAL, _SEVERAL_BANDED):
        ranked = [name for name in ranked if name not in _CUDNN]
    if wide and any(name in _CUDNN for name in ranked):
        ranked.sort(key=lambda name: name not in _TAKE_DELTA)
    return *ranked, last


def measure_block_sizes(device: torch.device) -> None:
    """Measure and remember Triton's block sizes on a GPU, bf16, heads of 64 and of 128: about a minute each."""
    kernel = _triton()
    for width in (64, 128):
        like = torch.empty(1, 1, 1, width, dtype=torch.bfloat16, device=device)
        kernel.tuner.measure_all(kernel, like, like)  # type: ignore[attr-defined]


def explain(
    *,
    device: torch.device | str | int,
    dtype: torch.dtype,
    head_dims: tuple[int, int] = (64, 64),
    documents: int = 1,
    banded: bool = False,
    softcap: float | None = None,
) -> str:
    """Return a sentence: which kernel ``auto`` takes for such a call, and which faster ones it can't use, and why."""
    kind, where = _kind(documents, banded), torch.device(device)
    kernel, refused = _choose_auto(where, dtype, head_dims, kind, softcap, _ordered(), False)
    faster = f"; faster, if they could be used: {', '.join(refused)}" if refused else ""
    return f"auto takes {kernel.name} for {dtype} on {where}, {kind}{faster}"


def _kind(documents: int, banded: bool) -> str:
    if documents >= MANY_DOCUMENTS:
        return _MANY
    if documents > 1:
        return _SEVERAL_BANDED if banded else _SEVERAL
    return _BANDED if banded else _PLAIN


def _ordered() -> bool:
    """Return whether the user asked PyTorch for results that don't change from run to run."""
    return torch.are_deterministic_algorithms_enabled()


def _capability(device: torch.device) -> int:
    """Return the major number of a GPU's compute capability; the least one without a GPU, to explain a choice."""
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else min(_RANKED)


@functools.cache
def _choose_auto(
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    kind: str,
    softcap: float | None,
    ordered: bool,
    wide: bool = False,
) -> tuple[Kernel, tuple[str, ...]]:
    if capturing():
        raise RuntimeError("kernel='auto' tests kernels on its first call; call it once before capturing a CUDA graph")
    refused = []
    for name in candidates(device, dtype, kind, capped=softcap is not None, wide=wide):
        try:
            kernel = choose(name, device=device, dtype=dtype, head_dims=head_dims, softcap=softcap)
            # Our tests cover the CPU kernels. GPUs, drivers and packages vary too much, so test the kernel here.
            if device.type != "cpu" and name not in ("reference", "blockwise"):
                # Whatever sizes were measured, the fixed ones always work.
                proof: dict[str, Any] = {"fixed_order": ordered, "softcap": softcap}
                check_once(kernel.untuned(), device, dtype, head_dims, **proof, banded=kind not in (_PLAIN, _SEVERAL))
        except torch.OutOfMemoryError:
            raise  # the kernel may be fine
        except Exception as error:  # a package may fail in any way; explain() lists the error
            refused.append(f"{name} ({str(error).strip().partition(chr(10))[0]})")
            continue
        return kernel, tuple(refused)
    raise ValueError(f"no kernel for {dtype} on {device}: {'; '.join(refused)}")
