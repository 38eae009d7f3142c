"""The Triton implementation of the kernel contract."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...plan.tile import Tiles
from ..contract import WIDEST, BackwardInputs, Kernel, blank_output, check_width, on_device_of
from . import programs
from .blocks import BlockTables
from .tuning import Sizes, Tuner, fixed_key, fixed_sizes

MOST_HEADS = 65535
MOST_ROWS = 256  # of a block
CARRY_ROWS = 32  # of a program that writes a surrogate output
# Triton's interpreter has global state: the current program and a patched language, shared by all threads.
_INTERPRETING = threading.Lock()
# Triton 3.10 turns the fusion of multiply and add off by default, which makes kernels slower and rounds more often.
OPTIONS = {"enable_fp_fusion": True}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _launch(program: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Launch a program on the device of its first tensor. The interpreter runs one launch at a time."""
    first = next(x for x in arguments if isinstance(x, Tensor))
    with on_device_of(first), _INTERPRETING if interpreted() else nullcontext():
        program[grid](*arguments, **constants, **OPTIONS)


@dataclass(eq=False)
class Triton(Kernel):
    """FlashAttention-2's forward and backward over lists of banded tiles, one launch for any number of tiles.

    Partial results are fp32. Block sizes, measured by ``burst calibrate`` if ``tuned``, fix the order of sums.
    """

    continues = True
    tuned: bool = True
    softcap: float | None = None  # None for plain scores
    tables: BlockTables = field(default_factory=BlockTables)
    tuner: Tuner = field(default_factory=Tuner)
    launch: Callable[..., None] = _launch  # (program, grid, *arguments, **constants)

    @property
    def name(self) -> str:
        return "triton"

    def untuned(self) -> Triton:
        return replace(self, tuned=False)

    def capped(self, softcap: float) -> Triton:
        return replace(self, softcap=softcap)

    def exact_partials(self, dtype: torch.dtype) -> bool:
        return True

    def check(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
        check_width(self.name, max(head_dims), WIDEST)
        if device.type != "cuda" and not interpreted():
            raise ValueError(
                f"kernel='triton' runs on cuda, the tensors are on {device}; use kernel='aten', or set "
                "TRITON_INTERPRET=1 before Python starts to run it without a GPU"
            )
        if dtype not in DTYPES:
            raise ValueError(f"kernel='triton' does not take {dtype}; use kernel='reference'")
        if interpreted() and dtype == torch.bfloat16:
            raise ValueError(
                "kernel='triton' gives wrong bf16 products in Triton's interpreter; use float16 or float32"
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = blank_output(q, v, q.shape[2], torch.float32)
        self.run_forward((q, k, v), (out, lse), tiles, scale, self._sizes("forward", q, v, tiles))
        return out, lse

    def extend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, out: Tensor, lse: Tensor) -> None:
        self.run_forward((q, k, v), (out, lse), tiles, scale, self._sizes("forward", q, v, tiles), carry=True)

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv): one program for dq, another for dk and dv."""
        q, k, v = inputs.q, inputs.k, inputs.v
        inputs = replace(inputs, delta=inputs.row_delta())
        dq, dk, dv = (
            torch.empty(x.shape, dtype=x.dtype if inputs.final else torch.float32, device=x.device) for x in (q, k, v)
        )
        for keys, outputs in ((False, (dq,)), (True, (dk, dv))):
            sizes = self._sizes("backward_keys" if keys else "backward_queries", q, v, inputs.tiles)
            self.run_backward(inputs, outputs, sizes, keys=keys)
        return dq, dk, dv

    def run_backward(self, inputs: BackwardInputs, outputs: tuple[Tensor, ...], sizes: Sizes, *, keys: bool) -> None:
        """Write (dq), or with ``keys`` (dk, dv), to ``outputs``."""
        q, k, v, dout = (in_reach(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        tiles = inputs.tiles
        block = sizes.n if keys else sizes.m
        batch, heads, length = (k if keys else q).shape[:3]
        table = self.tables.get(tiles, keys=keys, size=block, length=length, device=q.device)
        lse, delta = inputs.lse, inputs.row_delta()
        streamed, step = ((0, 3), sizes.m) if keys else ((1, 2), sizes.n)
        tensors: tuple[Any, ...] = (q, k, v, dout)
        tma = sizes.tma and all(describable(tensors[n], step) for n in streamed)
        if keys:  # it loads these in each step
            lse, delta = stats_of(lse, delta, sizes.m, together=tma)
        strides = [n for x in (*tensors, lse, delta) for n in x.stride()[:3]]
        if tma:
            tensors = tuple(described(x, step) if n in streamed else x for n, x in enumerate(tensors))
        tail = (table.tiles, table.offsets, table.ids, inputs.scale, self.softcap or 1.0)
        other = (q if keys else k).shape[2]
        counts = (heads, q.shape[1] // k.shape[1], length, other)
        program = programs.backward_keys if keys else programs.backward_queries
        fixed = {"CAPPED": self.softcap is not None, "TMA": tma, "EVEN": tma or other % step == 0}
        fixed |= ({} if keys else {"SAME": tma or same(k, v)}) | constants(q, v, sizes)
        grid = grid_of(length, block, batch, heads)
        self.launch(program, grid, *tensors, lse, delta, *outputs, *tail, *counts, *strides, **fixed)

    def run_forward(
        self,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, Tensor],
        tiles: Tiles,
        scale: float,
        sizes: Sizes,
        *,
        carry: bool = False,
    ) -> None:
        """Write fp32 (out, lse) of (q, k, v) to ``outputs``, or with ``carry`` extend them. Last dims are dense."""
        q, k, v = (in_reach(x) for x in inputs)
        batch, heads, length = q.shape[:3]
        table = self.tables.get(tiles, keys=False, size=sizes.m, length=length, device=q.device)
        strides = [n for x in (q, k, v, *outputs) for n in x.stride()[:3]]
        tail = (table.tiles, table.offsets, table.ids, scale, self.softcap or 1.0)
        counts = (heads, heads // k.shape[1], length, k.shape[2])
        grid = grid_of(length, sizes.m, batch, heads)
        fixed = {"CARRY": carry, "CAPPED": self.softcap is not None, "EVEN": k.shape[2] % sizes.n == 0}
        fixed["SAME"] = same(k, v)
        fixed |= constants(q, v, sizes)
        self.launch(programs.forward, grid, q, k, v, *outputs, *tail, *counts, *strides, **fixed)

    def _sizes(self, program: str, q: Tensor, v: Tensor, tiles: Tiles) -> Sizes:
        # Sizes fix the summation order, and measured sizes may differ between machines.
        if not self.tuned or interpreted() or torch.are_deterministic_algorithms_enabled():
            return fixed_sizes(*fixed_key(program, q, v))
        return self.tuner.sizes(program, q, v, tiles)


def grid_of(length: int, block: int, batch: int, heads: int) -> tuple[int, int]:
    """Return the launch grid: (row blocks, batch x heads). Raise ValueError if CUDA's grids can't be as large."""
    if batch * heads > MOST_HEADS:
        raise ValueError(
            f"kernel='triton' takes batch x heads up to {MOST_HEADS}, not {batch} x {heads}; split the batch"
        )
    return -(-length // block), batch * heads


def constants(q: Tensor, v: Tensor, sizes: Sizes) -> dict[str, Any]:
    """Return the compile-time arguments that all programs share."""
    return {
        "D": q.shape[3],
        "E": v.shape[3],
        "BLOCK_D": power_of_two(q.shape[3]),
        "BLOCK_E": power_of_two(v.shape[3]),
        "M": sizes.m,
        "N": sizes.n,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
    }


def carried(dout: Tensor, delta: Tensor) -> Tensor:
    """Return the surrogate output of half precision ``dout`` [B, H, rows, Dv] and ``delta`` in one pass."""
    out = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    (batch, heads, length), width = dout.shape[:3], dout.shape[3]
    sizes = {"E": width, "BLOCK_E": power_of_two(width), "M": CARRY_ROWS}
    strides, most = (*dout.stride()[:3], *delta.stride()), torch.finfo(dout.dtype).max
    grid = grid_of(length, CARRY_ROWS, batch, heads)
    _launch(programs.carry, grid, dout, delta, out, heads, length, *strides, most, **sizes)
    return out


def stats_of(lse: Tensor, delta: Tensor, block: int, *, together: bool) -> tuple[Tensor, Tensor]:
    """Return lse in base 2 and delta, [B, H, rows], with zeros up to a whole ``block``: loads then need no bounds.

    Each is dense, or with ``together`` each is a column of one dense tensor.
    """
    missing = -lse.shape[2] % block
    lse, delta = (pad(x, (0, missing)) if missing else x for x in (lse * math.log2(math.e), delta))
    if together:
        stats = torch.stack((lse, delta), -1)
        return stats[..., 0], stats[..., 1]
    return lse.contiguous(), delta.contiguous()


def describable(x: Tensor, rows: int) -> bool:
    """Return whether the tensor memory accelerator can load blocks of ``rows`` of ``x`` [B, H, S, D] as it lies.

    Addresses and strides, and D so that a dense copy lies no worse, are whole units of 16 bytes (CUDA's driver API,
    cuTensorMapEncodeTiled). A box, up to 128 bytes wide, is no larger than the tensor (pytorch/helion#2555).
    """
    units = [n * x.itemsize for n in (*x.stride()[:3], x.shape[3])]
    if x.data_ptr() % 16 or not all(n > 0 and n % 16 == 0 for n in units) or not x.numel():
        return False
    last = sum((count - 1) * n for count, n in zip(x.shape, x.stride(), strict=True))
    box = min(power_of_two(x.shape[3]), 128 // x.itemsize)
    # Triton 3.9 adds up the bytes in 32 bits, to work around a driver's fault with small tensors (triton#9235).
    return x.shape[2] >= rows and x.shape[3] >= box and (last + 1) * x.itemsize < 2**31


def described(x: Tensor, rows: int) -> Any:
    """Return a descriptor of ``x`` [B, H, S, D], by which a program loads blocks of ``rows``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, power_of_two(x.shape[3])])


def same(k: Tensor, v: Tensor) -> bool:
    """Return whether one set of offsets serves blocks of both."""
    return k.stride(2) == v.stride(2) and power_of_two(k.shape[3]) == power_of_two(v.shape[3])


def in_reach(x: Tensor) -> Tensor:
    """Return ``x`` [B, H, rows, D], or a copy if its rows are too far apart for a block's 32-bit offsets."""
    return x if x.stride(2) < 2**31 // MOST_ROWS else x.contiguous()


def power_of_two(width: int) -> int:
    """Return the smallest power of two >= ``width`` and 32: Triton 3.6 compiles 16 wrongly beside 64 on H100."""
    return max(32, 1 << (width - 1).bit_length())


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the programs, on any device."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
