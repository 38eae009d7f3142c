"""Block sizes: one fixed choice, or the fastest of some, measured once and remembered on disk."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...plan.tile import Tile, Tiles


class Sizes(NamedTuple):
    """Query rows and keys of a block, and how a program is compiled."""

    m: int
    n: int
    warps: int
    stages: int


def fixed_sizes(width: int, value_width: int, dtype: torch.dtype) -> Sizes:
    """What fits every GPU since Ampere."""
    widest = max(width, value_width)
    if dtype == torch.float32:
        return Sizes(32, 32, 4, 1) if widest > 64 else Sizes(64, 32, 4, 1)
    if widest > 128:
        return Sizes(64, 32, 8, 1)
    return Sizes(64, 64, 4, 2)


def candidates(width: int, value_width: int, dtype: torch.dtype) -> list[Sizes]:
    """What is tried; those that a GPU has no room for are passed over when they fail."""
    fixed = fixed_sizes(width, value_width, dtype)
    if dtype == torch.float32:
        return [fixed, Sizes(64, 64, 8, 1), Sizes(32, 64, 4, 1)]
    tried = [
        Sizes(m, n, warps, stages) for m in (64, 128) for n in (32, 64, 128) for warps in (4, 8) for stages in (2, 3)
    ]
    return [fixed, *tried]


def kind_of(tiles: Tiles) -> str:
    """What of the tiles decides the best sizes: ``full``, ``banded`` or ``many``."""
    if len(tiles) > 16:
        return "many"
    return "full" if all(tile.full for tile in tiles) else "banded"


@dataclass(eq=False)
class Tuner:
    """Measures sizes on representative tensors and keeps the fastest, in memory and in a file of the user's cache.

    Attributes:
        folder: of the file; the user's cache if None.
    """

    folder: Path | None = None
    known: dict[str, Sizes] = field(default_factory=dict)

    def sizes(self, kernel: Any, program: str, q: Tensor, v: Tensor, tiles: Tiles) -> Sizes:
        """For ``program`` of a Triton kernel, on tensors like these."""
        key = self.key(program, q, v, tiles)
        if key not in self.known:
            self.known.update(self.read())
        if key not in self.known:
            # Not under a graph's capture, which a measurement would be part of.
            if torch.cuda.is_current_stream_capturing():
                return fixed_sizes(q.shape[3], v.shape[3], q.dtype)
            self.known[key] = self.measure(kernel, program, q, v, kind_of(tiles))
            self.write()
        return self.known[key]

    def key(self, program: str, q: Tensor, v: Tensor, tiles: Tiles) -> str:
        """Everything that sizes are remembered by."""
        import triton

        device = torch.cuda.get_device_name(q.device)
        widths = f"{q.shape[3]}x{v.shape[3]}"
        return f"{device} | triton {triton.__version__} | {program} | {widths} | {q.dtype} | {kind_of(tiles)}"

    def measure(self, kernel: Any, program: str, q: Tensor, v: Tensor, kind: str, rows: int = 4096) -> Sizes:
        """The fastest candidate over ``rows`` tokens of 8 heads."""
        from triton.testing import do_bench

        best, least = fixed_sizes(q.shape[3], v.shape[3], q.dtype), float("inf")
        for sizes in candidates(q.shape[3], v.shape[3], q.dtype):
            call = _trial(kernel, program, q, v, sizes, kind, rows)
            try:
                took = do_bench(call, warmup=5, rep=20)
            except Exception:  # no room for these sizes, said in a different way by every version
                continue
            if took < least:
                best, least = sizes, took
        return best

    @property
    def path(self) -> Path:
        folder = self.folder or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "burst-attention"
        return folder / "triton-sizes.json"

    def read(self) -> dict[str, Sizes]:
        """What was measured before; nothing if the file is missing or broken."""
        try:
            return {key: Sizes(**sizes) for key, sizes in json.loads(self.path.read_text()).items()}
        except (OSError, ValueError, TypeError):
            return {}

    def write(self) -> None:
        """Add what is known to the file; others may write it at the same time, and none sees half of it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {key: sizes._asdict() for key, sizes in (self.read() | self.known).items()}
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(content, file, indent=1)
            os.replace(file.name, self.path)
        except OSError:
            pass  # a cache that can't be kept is measured again


def _trial(kernel: Any, program: str, q: Tensor, v: Tensor, sizes: Sizes, kind: str, rows: int) -> Callable[[], None]:
    """A call of ``program`` on tensors like q and v: ``rows`` tokens, 8 heads."""

    def like(x: Tensor) -> Tensor:
        return torch.randn(1, 8, rows, x.shape[3], dtype=x.dtype, device=q.device)

    inputs = (like(q), like(q), like(v))
    tiles = _tiles(kind, rows)
    numbers = torch.zeros(1, 8, rows, device=q.device)
    if program == "forward":
        results = (torch.empty(inputs[2].shape, device=q.device), numbers)
        return lambda: kernel.run_forward(inputs, results, tiles, 0.1, sizes)
    keys = program == "backward_keys"
    outputs = tuple(torch.empty(x.shape, device=q.device) for x in (inputs[1:] if keys else inputs[:1]))
    all_inputs = (*inputs, like(v), numbers, numbers)
    return lambda: kernel.run_backward(all_inputs, outputs, tiles, 0.1, sizes, keys=keys)


def _tiles(kind: str, rows: int) -> Tiles:
    if kind == "full":
        return Tiles(np.array([Tile(0, rows, 0, rows, 1 - rows, rows - 1)]))
    count = 1 if kind == "banded" else 32
    size = rows // count
    return Tiles(
        np.array([Tile(n * size, n * size + size, n * size, n * size + size, 0, size - 1) for n in range(count)])
    )
