"""Block sizes: a fixed choice, or the fastest of several candidates if ``burst calibrate`` has measured them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...plan.tile import Tile, Tiles
from ..contract import BackwardInputs, on_device_of
from ..prove import Remembered

_MEASURING = threading.Lock()  # ranks may be threads on one device and would disturb each other's measurements
_MEASURED = ("forward", "backward_queries", "backward_keys")
_KINDS = ("full", "banded", "many")


class Sizes(NamedTuple):
    """Query rows (m) and keys (n) of a block, and compile options of a program."""

    m: int
    n: int
    warps: int
    stages: int
    tma: bool = False  # the inner loop loads with the tensor memory accelerator, if addresses and strides allow


# By compute capability (major), program and the larger head dimension. Chosen from machine code, which `burst bench
# compiled` prints: every product by wgmma or tcgen05, no spilled registers, few instructions for each product.
_FIXED = {
    9: {
        "forward": {64: Sizes(128, 128, 8, 2), 128: Sizes(128, 128, 8, 2), 256: Sizes(128, 64, 8, 2)},
        "backward_queries": {64: Sizes(128, 128, 8, 2), 128: Sizes(128, 128, 8, 2), 256: Sizes(128, 32, 8, 2)},
        "backward_keys": {64: Sizes(64, 128, 8, 2), 128: Sizes(64, 128, 8, 2), 256: Sizes(32, 64, 8, 2)},
    },
    10: {
        "forward": {64: Sizes(128, 128, 8, 2), 128: Sizes(128, 64, 8, 3), 256: Sizes(128, 64, 8, 1)},
        "backward_queries": {
            64: Sizes(128, 64, 8, 2),
            96: Sizes(64, 64, 8, 2),
            128: Sizes(128, 64, 8, 2),
            192: Sizes(128, 64, 8, 1),
            256: Sizes(64, 64, 8, 1),
        },
        "backward_keys": {
            64: Sizes(64, 128, 8, 2),
            128: Sizes(64, 64, 8, 2),
            192: Sizes(64, 64, 8, 1),
            256: Sizes(32, 64, 8, 1),
        },
    },
}


# By compute capability (major) and program: the first Triton that needs fewer instructions with the tensor memory
# accelerator. Before 3.9, delta and lse of `backward_keys` then spill registers.
_TMA = {9: {"backward_queries": (3, 6), "backward_keys": (3, 9)}}


def fixed_sizes(program: str, widths: tuple[int, int], dtype: torch.dtype, major: int) -> Sizes:
    """Return the sizes for head dimensions (D, Dv) on a GPU of compute capability ``major``; 0 for any since Ampere."""
    widest = max(widths)
    if dtype == torch.float32:
        return Sizes(32, 32, 4, 1) if widest > 64 else Sizes(64, 32, 4, 1)
    if major in _FIXED:
        table = _FIXED[major][program]
        sizes = table[min(width for width in table if width >= widest)]
        since = _TMA.get(major, {}).get(program)
        return sizes._replace(tma=since is not None and widest <= 128 and _triton() >= since)
    return Sizes(64, 32, 8, 1) if widest > 128 else Sizes(64, 64, 4, 2)


def _triton() -> tuple[int, ...]:
    """Return the major and minor version of Triton."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def fixed_key(program: str, q: Tensor, v: Tensor) -> tuple[str, tuple[int, int], torch.dtype, int]:
    """Return the arguments of :func:`fixed_sizes` for tensors like these."""
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 0
    return program, (q.shape[3], v.shape[3]), q.dtype, major


def candidates(program: str, widths: tuple[int, int], dtype: torch.dtype, major: int) -> list[Sizes]:
    """Return the few sizes to try, the fixed choice first. Sizes that don't fit the GPU fail and are skipped."""
    fixed = fixed_sizes(program, widths, dtype, major)
    if dtype == torch.float32:
        return [fixed, Sizes(64, 64, 8, 1)]
    tried = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2)]
    return [fixed, *(sizes for sizes in (Sizes(*size) for size in tried) if sizes != fixed)]


def kind_of(tiles: Tiles) -> str:
    """Classify tiles by the kind that determines the best sizes: ``full``, ``banded`` or ``many``."""
    if len(tiles) > 16:
        return "many"
    return "full" if all(tile.full for tile in tiles) else "banded"


@dataclass(eq=False)
class Tuner:
    """Measures sizes on representative tensors; remembers the fastest in a file."""

    file: Remembered = field(default_factory=lambda: Remembered("triton-sizes-3.json"))  # of the third programs
    known: dict[str, Sizes] | None = None  # None before the file is read

    def sizes(self, program: str, q: Tensor, v: Tensor, tiles: Tiles) -> Sizes:
        """Return the sizes for ``program`` on tensors like these: measured ones if known, else the fixed choice."""
        if self.known is None:
            self.known = self.read()
        return self.known.get(self.key(program, q, v, kind_of(tiles))) or fixed_sizes(*fixed_key(program, q, v))

    def measure_all(self, kernel: Any, q: Tensor, v: Tensor) -> None:
        """Measure the sizes of every program and kind of tiles for tensors like q and v, and remember them."""
        with _MEASURING:
            for program in _MEASURED:
                for kind in _KINDS:
                    sizes = self.measure(kernel, program, q, v, kind)
                    self.file.add({self.key(program, q, v, kind): sizes._asdict()})
            self.known = self.read()

    def key(self, program: str, q: Tensor, v: Tensor, kind: str) -> str:
        """Return everything that the best sizes depend on."""
        import triton

        device = torch.cuda.get_device_name(q.device)
        widths = f"{q.shape[3]}x{v.shape[3]}"
        return f"{device} | triton {triton.__version__} | {program} | {widths} | {q.dtype.itemsize} bytes | {kind}"

    def measure(self, kernel: Any, program: str, q: Tensor, v: Tensor, kind: str, rows: int = 4096) -> Sizes:
        """Return the fastest candidate, over ``rows`` tokens of 8 heads, that agrees with the fixed choice."""
        from triton.testing import do_bench

        fixed, *others = candidates(*fixed_key(program, q, v))
        trial = Trial(kernel, program, q, v, kind, rows)
        with on_device_of(q):
            right = trial.results(fixed)  # if even the fixed choice fails, raise its error
            best, least = fixed, do_bench(lambda: trial.run(fixed), warmup=5, rep=20)
            for sizes in others:
                try:
                    if not alike(trial.results(sizes), right):
                        continue
                    took = do_bench(lambda sizes=sizes: trial.run(sizes), warmup=5, rep=20)
                except torch.OutOfMemoryError:
                    raise  # the sizes may be fine
                except Exception:  # these sizes don't fit; the exception type depends on Triton's version
                    continue
                if took < least:
                    best, least = sizes, took
        return best

    def read(self) -> dict[str, Sizes]:
        """Read the remembered sizes; return an empty dict if the file is missing or invalid."""
        try:
            return {key: Sizes(**sizes) for key, sizes in self.file.read().items()}
        except TypeError:
            return {}


class Trial:
    """Calls of ``program`` on random tensors like q and v: ``rows`` tokens, 8 heads, from a separate generator."""

    def __init__(self, kernel: Any, program: str, q: Tensor, v: Tensor, kind: str, rows: int) -> None:
        make = torch.Generator(q.device).manual_seed(0)
        query, key, value, dout = (
            torch.empty(1, 8, rows, x.shape[3], dtype=x.dtype, device=q.device).normal_(generator=make)
            for x in (q, q, v, v)
        )
        self._kernel, self._program = kernel, program
        lse, delta = torch.zeros(2, 1, 8, rows, device=q.device)
        self.inputs = BackwardInputs(dout, query, key, value, lse, delta, _tiles(kind, rows), q.shape[3] ** -0.5)
        like = {"forward": (value,), "backward_queries": (query,), "backward_keys": (key, value)}[program]
        self._outputs = [torch.empty(x.shape, device=q.device) for x in like]
        if program == "forward":
            self._outputs.append(torch.empty(value.shape[:3], device=q.device))

    def run(self, sizes: Sizes, *, carry: bool = False) -> None:
        """Run the program once with these sizes; ``carry`` extends the earlier results."""
        if self._program == "forward":
            x = self.inputs
            self._kernel.run_forward((x.q, x.k, x.v), tuple(self._outputs), x.tiles, x.scale, sizes, carry=carry)
            return
        keys = self._program == "backward_keys"
        self._kernel.run_backward(self.inputs, tuple(self._outputs), sizes, keys=keys)

    def results(self, sizes: Sizes) -> list[Tensor]:
        """Return the results of one call; for a forward, also those of a call with ``carry``."""
        self.run(sizes)
        results = [x.clone() for x in self._outputs]
        if self._program == "forward":
            self.run(sizes, carry=True)
            results += [x.clone() for x in self._outputs]
        return results


def alike(results: list[Tensor], right: list[Tensor]) -> bool:
    """Return whether the results agree up to the effect of the summation order."""
    return all(bool((x - y).norm() <= 1e-2 * y.norm()) for x, y in zip(results, right, strict=True))


def _tiles(kind: str, rows: int) -> Tiles:
    if kind == "full":
        return Tiles(np.array([Tile(0, rows, 0, rows, 1 - rows, rows - 1)]))
    count = 1 if kind == "banded" else 32
    size = rows // count
    return Tiles(
        np.array([Tile(n * size, n * size + size, n * size, n * size + size, 0, size - 1) for n in range(count)])
    )
