"""Write and hash a safetensors file in pieces, with pauses: ``save_file`` copies all data and slows training."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .manifest import PART, fingerprint

REST = 8.0  # seconds of rest per second of processor time
LONGEST_REST = 1.0
AT_ONCE = 16  # pieces before the first rest: small files need none
TRIAL = 1 << 23  # bytes of the trial that measures a disk


class Pace:
    """Pauses after pieces of work, in proportion to their processor time; ``rested`` counts their seconds."""

    def __init__(self) -> None:
        self.rested = 0.0
        self._hurry = threading.Event()
        self._pieces, self._used = 0, 0.0

    def hurry(self) -> None:
        """End the current rest and skip all later ones."""
        self._hurry.set()

    def rest(self) -> None:
        """Rest after a piece of work. Call it from one thread only."""
        if self._hurry.is_set():
            return
        used, began = time.thread_time(), time.monotonic()
        self._pieces += 1
        if self._pieces > AT_ONCE:
            self._hurry.wait(min(REST * (used - self._used), LONGEST_REST))
        self.rested += time.monotonic() - began
        self._used = time.thread_time()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str], metadata: Mapping[str, str], pace: Pace
) -> str:
    """Write contiguous CPU tensors, with safetensors' dtype ``names``; return the SHA-256 that the file must have."""
    # Same order as safetensors, widest dtype first, so that each tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (_header(ordered, tensors, names, metadata), *_parts(ordered, tensors)):
            digest.update(part)
            file.write(part)
            pace.rest()
    return digest.hexdigest()


def _header(
    ordered: list[str], tensors: Mapping[str, Tensor], names: Mapping[str, str], metadata: Mapping[str, str]
) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in ordered:
        tensor = tensors[name]
        offsets = [at, at := at + tensor.nbytes]
        header[name] = {"dtype": names[name], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parts(ordered: list[str], tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    for name in ordered:
        data: Any = tensors[name].view(-1).view(torch.uint8).numpy().data
        yield from (data[start : start + PART] for start in range(0, len(data), PART))


def sync_file(path: Path) -> None:
    """Sync a file to disk; later reads come from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_to_write(folder: Path, size: int) -> float:
    """Estimate the seconds to write and read back ``size`` bytes in a new ``folder``, by two trial files."""
    folder.mkdir(parents=True)
    few, many = (_seconds_of_trial(folder / f"trial-{n}.safetensors", n) for n in (TRIAL // 8, TRIAL))
    each = max(many - few, many / 8) / (TRIAL - TRIAL // 8)
    return max(0.0, few - each * (TRIAL // 8)) + each * size


def _seconds_of_trial(path: Path, size: int) -> float:
    pace = Pace()
    pace.hurry()
    trial = torch.zeros(size, dtype=torch.uint8)
    began = time.monotonic()
    write_tensors(path, {"trial": trial}, {"trial": "U8"}, {}, pace)
    sync_file(path)
    fingerprint(path)
    return time.monotonic() - began
