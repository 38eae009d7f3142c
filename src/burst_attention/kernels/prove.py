"""Compare a kernel with the reference on the current device, before ``auto`` chooses it; remember what passed."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import BackwardInputs, Kernel, finite_lse, row_dot
from .reference import Reference


def user_folder() -> Path:
    """Return the user's cache folder, which may not exist. Raise RuntimeError without a home folder."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "burst-attention"


@dataclass(frozen=True)
class Remembered:
    """A file of facts by key. Where it can't be read or written, nothing is remembered."""

    name: str
    folder: Path | None = None  # None for the user's cache folder

    @property
    def path(self) -> Path:
        """The file."""
        return (user_folder() if self.folder is None else self.folder) / self.name

    def read(self) -> dict[str, Any]:
        """Return the facts; an empty dict if the file is missing or invalid."""
        try:
            facts = json.loads(self.path.read_text())
        except (OSError, ValueError, RuntimeError):  # RuntimeError: no home folder
            return {}
        return facts if isinstance(facts, dict) else {}

    def add(self, facts: Mapping[str, Any]) -> None:
        """Merge ``facts`` into the file. Replacing it atomically is safe with concurrent writers."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(self.read() | dict(facts), file, indent=1)
            os.replace(file.name, self.path)
        except (OSError, RuntimeError):
            pass


_PROVED = Remembered("proved-kernels.json")
_OTHERS = (
    *("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels"),
    "nvidia-cudnn-frontend",
)

# Full and causal tiles, whose corners are aligned to the bottom right. FlashAttention 4 compiles a program for each
# kind of window, and others for a single block of rows or columns, so all tiles have several blocks. Sizes are odd, and
# some rows and columns have no tile.
PLAIN = (Tile(0, 301, 0, 301, 0, 300), Tile(301, 640, 10, 290, -279, 338), Tile(640, 781, 5, 330, -184, 140))
# Windows over a square, and over a tall and a wide rectangle, which differ by the corner they are aligned to; tall and
# limited on the left only.
BANDED = (
    Tile(0, 301, 0, 301, 0, 99),
    Tile(301, 640, 20, 221, -40, 170),
    Tile(640, 781, 5, 330, -250, 60),
    Tile(850, 1031, 3, 153, -149, 90),
)
ROWS, COLUMNS = 1034, 337
# For scores near -100, where the exponentials of padding overflow. cuDNN before 9.26 gives NaN for 192 columns, so
# another kernel computes them; 160 it computes itself.
FAR = (Tile(0, 256, 0, 192, -191, 255), Tile(256, 512, 0, 160, -159, 255))
FAR_ROWS, FAR_COLUMNS = 512, 192
# Fewer rows and columns than a block of the Triton programs, which then load by addresses, not by descriptors.
FEW = (Tile(0, 45, 0, 37, -36, 30),)
FEW_ROWS, FEW_COLUMNS = 45, 37
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # relative L2


def check_once(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    *,
    fixed_order: bool,
    softcap: float | None = None,
    banded: bool = True,
) -> None:
    """Call :func:`check_against_reference`, unless the same kernel passed it before on such a device."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    versions = torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), _sources(), *_packages()
    key = " | ".join(map(str, (kernel.name, gpu, *versions, dtype, head_dims, fixed_order, softcap, banded)))
    if key in _PROVED.read():
        return
    check_against_reference(kernel, device, dtype, head_dims, fixed_order=fixed_order, softcap=softcap, banded=banded)
    _PROVED.add({key: True})


@functools.cache
def _sources() -> str:
    """Return a digest of our kernels' sources."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


@functools.cache
def _packages() -> tuple[str, ...]:
    """Return the versions of the packages that kernels come from, as far as they are installed."""
    installed = importlib.metadata.distributions()
    versions = {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version for each in installed}
    return tuple(f"{name} {versions[name]}" for name in _OTHERS if name in versions)


def check_against_reference(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    *,
    fixed_order: bool = True,
    softcap: float | None = None,
    banded: bool = True,
) -> None:
    """Raise ArithmeticError unless ``kernel`` agrees with the fp64 reference, bit-equal twice in ``fixed_order``.

    ``banded``: also windows; if not, only full and causal tiles.
    """
    judge = Reference(softcap)
    kinds = (PLAIN, BANDED) if banded else (PLAIN,)
    make = torch.Generator().manual_seed(0)
    shapes = ((4, ROWS, head_dims[1]), (4, ROWS, head_dims[0]), (2, COLUMNS, head_dims[0]), (2, COLUMNS, head_dims[1]))
    # Models have [B, S, H, D] in memory.
    dout, q, k, v = (
        torch.randn(2, rows, heads, dim, generator=make, device="cpu").to(dtype).transpose(1, 2)
        for heads, rows, dim in shapes
    )
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        for tiles in kinds:
            _check(kernel, judge, device, (dout, q, k, v), 0.0, fixed_order, tiles)
        far = _first_rows((dout, q, k, v), FAR_ROWS, FAR_COLUMNS)
        far[1][..., 0], far[2][..., 0] = 100 * head_dims[0] ** 0.5, -1
        _check(kernel, judge, device, far, 0.0, fixed_order, FAR)
        if kernel.continues:  # others would compile programs for these sizes that no mask needs
            few = _first_rows((dout, q, k, v), FEW_ROWS, FEW_COLUMNS)
            _check(kernel, judge, device, few, 0.0, fixed_order, FEW)
        # In rows with dO = 0, D comes only from the lse's gradient, and no column of dO can carry it.
        dout[:, :, 100:200] = 0
        for tiles in kinds:
            _check(kernel, judge, device, (dout, q, k, v), 1.0, fixed_order, tiles)


def _first_rows(tensors: tuple[Tensor, ...], rows: int, columns: int) -> tuple[Tensor, ...]:
    """Return copies of the first ``rows`` of dout and q and ``columns`` of k and v."""
    return tuple(x[:, :, :n].clone() for x, n in zip(tensors, (rows, rows, columns, columns), strict=True))


def _check(
    kernel: Kernel,
    judge: Reference,
    device: torch.device,
    tensors: tuple[Tensor, ...],
    dlse: float,
    fixed_order: bool,
    table: tuple[Tile, ...],
) -> None:
    tiles = Tiles(np.array(table, np.int64))
    dtype, scale = tensors[0].dtype, tensors[1].shape[3] ** -0.5
    dout, q, k, v = (x.double() for x in tensors)
    out, lse = judge.forward(q, k, v, tiles, scale)
    seen = finite_lse(lse)
    delta = row_dot(dout, out, torch.float64) - dlse
    expected = (out, lse, *judge.backward(BackwardInputs(dout, q, k, v, seen, delta, tiles, scale)))
    dout, q, k, v = (x.to(device) for x in tensors)
    lse, delta = torch.stack((seen, delta), -1).to(device, torch.float32).unbind(-1)  # strided, as in the sweep
    names = ("out", "lse", "dq", "dk", "dv")
    inputs = BackwardInputs(dout, q, k, v, lse, delta, tiles, scale, of_lse=dlse != 0)
    runs = [(*kernel.forward(q, k, v, tiles, scale), *kernel.backward(inputs)) for _ in range(2)]
    results = [*zip(names, runs[0], expected, strict=True)]
    if kernel.continues:
        total = _continued(kernel, q, k, v, tiles, scale)
        results += zip(("out after extend", "lse after extend"), total, expected[:2], strict=True)
    for name, mine, right in results:
        error = _distance(mine.cpu(), right)
        if not error <= BOUNDS[dtype]:
            raise ArithmeticError(
                f"its {name} is wrong on this device: relative L2 error {error:.1e}, allowed {BOUNDS[dtype]:.0e}"
            )
    for name, mine, again in zip(names, *runs, strict=True):
        if fixed_order and not torch.equal(mine, again):
            raise ArithmeticError(f"its {name} differs from run to run on this device")


def _continued(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the tiles' first column halves, extended by the second halves in strided buffers."""
    halves: tuple[list[Tile], list[Tile]] = [], []
    for tile in tiles:
        middle = tile.columns // 2
        for half, columns in zip(halves, ((0, middle), (middle, tile.columns)), strict=True):
            if (part := tile.part((0, tile.rows), columns)) is not None:
                half.append(part)
    first, second = (Tiles(np.array(half, np.int64)) for half in halves)
    out, lse = (
        torch.cat([x, x], 1)[:, x.shape[1] :] for x in (y.float() for y in kernel.forward(q, k, v, first, scale))
    )
    kernel.extend(q, k, v, second, scale, out, lse)
    return out, lse


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error over finite entries; inf if the non-finite positions differ."""
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(actual), finite):
        return float("inf")
    actual, expected = (x.double().masked_fill(~finite, 0.0) for x in (actual, expected))
    return ((actual - expected).norm() / expected.norm()).item()
