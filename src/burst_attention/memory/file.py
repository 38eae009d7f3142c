"""A file of this process, which no other process can open: its data are verified when they are read."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from .store import ELSEWHERE, OffloadError

_CHUNK = 1 << 20  # bytes; a chunk is still in the processor's cache when its checksum is computed


class RecordFile:
    """Records of bytes at places that the caller chooses.

    The file has no name, so the system removes it when the process ends, however that happens.

    Args:
        folder: an existing folder.

    Raises:
        ValueError: the folder is missing, or files can't be created in it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115 - closed by the finalizer below
        except OSError as error:
            raise ValueError(
                f"no file can be kept in the folder {str(folder)!r}: {error.strerror}. "
                "Pass an existing folder on a local disk that this process may write to"
            ) from error
        self._fd, self._name, self._size = file.fileno(), f"the offload file in {str(folder)!r}", 0
        self.close = weakref.finalize(self, file.close)

    def grow(self, size: int) -> None:
        """Reserve space on the disk, so that the file has at least ``size`` bytes.

        Raises:
            OffloadError: the disk is full, or the file was closed.
        """
        self.check()
        if size <= self._size:
            return
        try:
            os.posix_fallocate(self._fd, self._size, size - self._size)
        except OSError as error:
            with suppress(OSError):  # give back what was reserved
                os.ftruncate(self._fd, self._size)
            raise self._failure(f"it could not grow from {self._size} to {size} bytes", error) from error
        self._size = size

    def write(self, start: int, memory: memoryview) -> int:
        """Write ``memory`` at byte ``start``; return its checksum.

        Raises:
            OffloadError: the disk is full or failed.
        """
        return self._move("written", lambda view, place: os.pwrite(self._fd, view, place), start, memory)

    def read(self, start: int, memory: memoryview, checksum: int) -> None:
        """Fill ``memory`` from byte ``start``.

        Raises:
            OffloadError: the read failed or ended early, the bytes have another checksum, or the file was closed.
        """
        self.check()
        found = self._move("read", lambda view, place: os.preadv(self._fd, [view], place), start, memory)
        if found != checksum:
            raise OffloadError(
                f"{self._name}: {len(memory)} bytes at byte {start} are not those that were written. "
                f"Check the disk, or {ELSEWHERE}"
            )

    def check(self) -> None:
        """Raise OffloadError if the file was closed."""
        if not self.close.alive:
            raise OffloadError(f"{self._name} was closed. Make a new DiskStore")

    def _move(self, done: str, call: Callable[[memoryview, int], int], start: int, memory: memoryview) -> int:
        """Call ``call(bytes, place in the file)`` until all bytes are moved; return their checksum."""
        total = 0
        for at in range(0, len(memory), _CHUNK):
            chunk = rest = memory[at : at + _CHUNK]
            while rest:
                place = start + at + len(chunk) - len(rest)
                try:
                    moved = call(rest, place)
                except OSError as error:
                    raise self._failure(f"{len(memory)} bytes at byte {start} could not be {done}", error) from error
                if not moved:
                    raise OffloadError(
                        f"{self._name}: only {place - start} of {len(memory)} bytes at byte {start} could be {done}. "
                        f"Check the disk, or {ELSEWHERE}"
                    )
                rest = rest[moved:]
            total += _sum(chunk)
        return total % 2**64

    def _failure(self, what: str, error: OSError) -> OffloadError:
        why = f"{what}: {error.strerror}"
        return OffloadError(f"{self._name}: {why}. Free space there or check the disk, or {ELSEWHERE}")


def _sum(chunk: memoryview) -> int:
    """Return the sum of 64-bit words; the bytes after the last whole word count as one word."""
    whole = len(chunk) // 8 * 8
    words = np.frombuffer(chunk[:whole], np.uint64)
    return int(np.add.reduce(words)) + int.from_bytes(chunk[whole:], "little")
