"""The Triton programs as compiled for GPUs that may be absent.

    burst bench compiled [--capabilities 90 100] [--head-dims 128 192x128] [--before OLD_PROGRAMS.py]

Each program is compiled with the arguments of a run: real sizes, strides and alignments, and the fixed block sizes for
that GPU. Figures are read from the machine code. Nothing runs, so they are no speeds."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.kernels.contract import BackwardInputs
from burst_attention.kernels.triton.tuning import Sizes
from burst_attention.plan.tile import Tile, Tiles

from ..arguments import WrittenArguments, asked

Program = Literal["forward", "backward_queries", "backward_keys"]
PROGRAMS: tuple[Program, ...] = ("forward", "backward_queries", "backward_keys")
TOKENS, HEADS = 16384, 16
UNIT = 64 * 64 * 16  # multiply-adds of the smallest warp group instruction on half precision
PRODUCT = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA)")
# How instructions are called in PTX.
COUNTED = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma.sync": r"\bmma\.sync",
    "cp.async": r"\bcp\.async\.c[ga]\b",
    "TMA": r"\bcp\.async\.bulk\.tensor",
}
COLUMNS = ("program", "sm", "D", "rows x keys", "warps", "stages", "registers", "stack", "shared", *COUNTED)
LEGEND = {
    "stack": "bytes a thread, spilled registers included",
    "shared": "KiB a block",
    "inner": "instructions of an unmasked step of the inner loop; on sm_100 one warp alone issues some of them",
    "per product": "those of all warps, for each 64 x 64 x 16 product",
    "s": "processor seconds to compile, tools included",
}


@dataclass(frozen=True)
class Compiled:
    """One program for one GPU: what ptxas reports and what the code contains."""

    name: str
    capability: int
    dims: tuple[int, int]
    sizes: Sizes
    registers: int
    stack: int
    shared: int
    counts: dict[str, int]
    inner: int  # instructions in the innermost loop
    products: float  # of that loop's step, in units of 64 x 64 x 16
    seconds: float

    @property
    def per_product(self) -> float:
        """Return the instructions that all warps issue for each unit of products; NaN where no loop was found."""
        return self.inner * self.sizes.warps / self.products if self.inner else math.nan

    def row(self) -> dict[str, str]:
        m, n, warps, stages, _ = self.sizes
        size = (f"{m} x {n}", warps, stages, self.registers, self.stack, f"{self.shared / 1024:.0f}")
        place = (self.name, f"{self.capability}", f"{self.dims[0]}, {self.dims[1]}")
        cells = dict(zip(COLUMNS, (*place, *size, *self.counts.values()), strict=True))
        cells |= {"inner": self.inner, "per product": f"{self.per_product:.0f}", "s": f"{self.seconds:.1f}"}
        return {name: str(cell) for name, cell in cells.items()}


class Absent:
    """Stands for the driver of a GPU that may be absent: Triton then compiles, and can't launch."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 227 * 1024})

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def loaded(file: Path) -> Any:
    """Return another version of the programs."""
    spec = importlib.util.spec_from_file_location("other_programs", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(
    name: str,
    capability: int,
    dims: tuple[int, int],
    sizes: Sizes,
    *,
    tokens: int = TOKENS,
    programs: Any = None,
) -> Compiled:
    """Compile the program ``name`` for ``capability`` (90 or 100) and head dimensions (D, E), with Triton's cache."""
    from triton.runtime import driver

    from burst_attention.kernels.triton.kernel import OPTIONS, Triton

    made: list[tuple[Any, float]] = []

    def compile_only(program: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
        program = getattr(programs, name) if programs is not None else program
        started = processor_seconds()
        known = {*program.arg_names, "num_warps", "num_stages"}
        constants = {label: value for label, value in constants.items() if label in known}
        if "EVEN" not in program.arg_names:  # an earlier version, without the other side's length
            at = [type(x) for x in arguments].index(float) + 5
            arguments = (*arguments[:at], *arguments[at + 1 :])
        result = program.warmup(*arguments, grid=grid, **constants, **OPTIONS)
        made.append((result, processor_seconds() - started))

    kernel, size = Triton(launch=compile_only), sizes
    q, k, v, dout = (_tensor(tokens, dim) for dim in (dims[0], *dims, dims[1]))
    tiles = Tiles(np.array([Tile(0, tokens, 0, tokens, 0, tokens - 1)]))
    lse, delta = (torch.empty(1, HEADS, tokens, device="meta") for _ in range(2))
    driver.set_active(Absent(capability))
    try:
        if name == "forward":
            out = torch.empty(v.shape, device="meta")
            kernel.run_forward((q, k, v), (out, lse), tiles, dims[0] ** -0.5, size)
        else:
            keys = name == "backward_keys"
            outputs = tuple(torch.empty_like(x) for x in ((k, v) if keys else (q,)))
            inputs = BackwardInputs(dout, q, k, v, lse, delta, tiles, dims[0] ** -0.5)
            kernel.run_backward(inputs, outputs, size, keys=keys)
    finally:
        driver.set_active(None)
    [(result, took)] = made
    registers, stack, code = _disassembled(result.asm["cubin"])
    counts = {label: len(re.findall(pattern, result.asm["ptx"])) for label, pattern in COUNTED.items()}
    widths = {"forward": (1, 1), "backward_queries": (2, 1), "backward_keys": (2, 2)}[name]
    work = sizes[0] * sizes[1] * sum(n * dim for n, dim in zip(widths, dims, strict=True)) / UNIT
    shared = result.metadata.shared
    return Compiled(name, capability, dims, sizes, registers, stack, shared, counts, inner_loop(code), work, took)


def processor_seconds() -> float:
    """Return the processor time of this process and its children."""
    return sum(os.times()[:4])


def _tensor(tokens: int, dim: int) -> Tensor:
    """Return a tensor without data [1, HEADS, tokens, dim], laid out as models have it."""
    return torch.empty(1, tokens, HEADS, dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)


def _disassembled(cubin: bytes) -> tuple[int, int, str]:
    """Return (registers, stack bytes, assembly)."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2]), code


def loops(code: str) -> Iterator[list[tuple[int, str]]]:
    """Yield the (address, instruction) of every loop: from the target of a conditional branch backward to the branch.

    Waits for a barrier stand aside and come back unconditionally, which is no loop.
    """
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.+?);", code, re.MULTILINE)]
    for at, text in lines:
        if text.startswith("@") and (target := _target(text)) is not None and target < at:
            yield [line for line in lines if target <= line[0] <= at]


def _target(text: str) -> int | None:
    found = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text)
    return int(found[1], 16) if found else None


def issued(loop: list[tuple[int, str]]) -> int:
    """Return the instructions of one pass that takes every forward branch without products: no mask is applied."""
    count, skip = 0, 0
    for at, text in loop:
        if at < skip:
            continue
        count += 1
        target = _target(text)
        if target is not None and target > at and not any(PRODUCT.search(t) for w, t in loop if at < w < target):
            skip = target
    return count


def inner_loop(code: str) -> int:
    """Return what the shortest loop with products issues: the innermost unmasked one. 0 if there is none."""
    return min((issued(body) for body in loops(code) if any(PRODUCT.search(text) for _, text in body)), default=0)


@dataclass(frozen=True, kw_only=True)
class CompiledArguments(WrittenArguments):
    capabilities: tuple[int, ...] = (90, 100)
    """Compute capabilities times 10."""
    head_dims: tuple[str, ...] = ("64", "96", "128", "192x128", "256")
    """D, or D and that of the values."""
    tokens: int = TOKENS
    """Loads check bounds unless this is a multiple of the blocks."""
    programs: tuple[Program, ...] = PROGRAMS
    before: str | None = None
    """A programs.py of an earlier version, to compile beside ours."""
    before_sizes: tuple[int, int, int, int] = (64, 64, 4, 2)
    """Its query rows, keys, warps and stages."""

    def dims(self) -> list[tuple[int, int]]:
        """Return (D, E) of every size."""
        pairs = [[int(part) for part in text.split("x")] for text in self.head_dims]
        return [(pair[0], pair[-1]) for pair in pairs]


def main(arguments: list[str]) -> None:
    a = asked(CompiledArguments(), __doc__, "burst bench compiled", arguments)
    import triton

    from burst_attention.kernels.triton.kernel import interpreted
    from burst_attention.kernels.triton.tuning import fixed_sizes

    if interpreted():
        raise SystemExit("burst bench compiled: Triton's interpreter compiles nothing; unset TRITON_INTERPRET")
    before = None if a.before is None else loaded(Path(a.before))
    rows, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # a cached program would take no time
        for capability, dims, name in itertools.product(a.capabilities, a.dims(), a.programs):
            sizes = fixed_sizes(name, dims, torch.bfloat16, capability // 10)
            now = compiled(name, capability, dims, sizes, tokens=a.tokens)
            rows.append(now.row())
            if before is not None:
                past = compiled(name, capability, dims, Sizes(*a.before_sizes), tokens=a.tokens, programs=before)
                rows.append(past.row() | {"program": f"{name}, before"})
                ratios.append(compared(now, past))
    console = console_of_tables()
    console.print(f"Triton {triton.__version__}; bf16, {a.tokens:,} tokens, {HEADS} heads", highlight=False)
    tables = {"programs": rows} | ({"now / before": ratios} if ratios else {})
    for title, table in tables.items():
        print_table(console, table, title=title, legend=LEGEND, keys=3)
    a.write(triton=triton.__version__, **tables)


def compared(now: Compiled, past: Compiled) -> dict[str, str]:
    """Return the ratios of two versions of a program."""
    figures = {"per product": now.per_product / past.per_product, "s": now.seconds / past.seconds}
    row = now.row()
    return {name: row[name] for name in COLUMNS[:3]} | {name: f"{ratio:.2f}" for name, ratio in figures.items()}
