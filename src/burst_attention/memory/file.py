"""A file of this process: locked while in use, verified when it is read, removed at the end."""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from .store import ELSEWHERE, OffloadError

_PREFIX, _SUFFIX = "burst-offload-", ".bin"
_CHUNK = 1 << 20  # bytes; a chunk is still in the processor's cache when its checksum is computed


class RecordFile:
    """Records of bytes at places that the caller chooses.

    Args:
        folder: an existing folder. Files there that a killed process left are removed.

    Raises:
        ValueError: the folder is missing, or files can't be created or locked in it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            _remove_leftovers(folder)
            self._fd, self.path = _create(folder)
        except OSError as error:
            raise ValueError(
                f"no file can be kept in the folder {str(folder)!r}: {error.strerror}. "
                "Pass an existing folder on a local disk that this process may write to"
            ) from error
        self._status, self._size = os.fstat(self._fd), 0
        self.close = weakref.finalize(self, _remove, self._fd, self.path, os.getpid())

    def grow(self, size: int) -> None:
        """Reserve space on the disk, so that the file has at least ``size`` bytes.

        Raises:
            OffloadError: the disk is full, or the file is not as this process left it.
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
            OffloadError: the read failed or ended early, or the bytes have another checksum, or the file was removed,
                replaced or truncated.
        """
        self.check()
        found = self._move("read", lambda view, place: os.preadv(self._fd, [view], place), start, memory)
        if found != checksum:
            raise OffloadError(
                f"{self.path}: {len(memory)} bytes at byte {start} are not those that were written. "
                f"Let no other program write to it, and check the disk, or {ELSEWHERE}"
            )

    def check(self) -> None:
        """Raise OffloadError if the file was closed, removed, replaced or truncated."""
        if not self.close.alive:
            raise OffloadError(f"{self.path}: it was closed. Make a new DiskStore")
        what = ""
        try:
            now = os.stat(self.path)
            if not os.path.samestat(now, self._status):
                what = "another file has replaced it"
            elif now.st_size < self._size:
                what = f"it was truncated from {self._size} to {now.st_size} bytes"
        except OSError as error:
            what = f"it was removed or can't be reached ({error.strerror})"
        if what:
            raise OffloadError(f"{self.path}: {what}. Leave it alone while the process runs, or {ELSEWHERE}")

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
                        f"{self.path}: only {place - start} of {len(memory)} bytes at byte {start} could be {done}. "
                        f"Leave the file alone while the process runs, and check the disk, or {ELSEWHERE}"
                    )
                rest = rest[moved:]
            total += _sum(chunk)
        return total % 2**64

    def _failure(self, what: str, error: OSError) -> OffloadError:
        why = f"{what}: {error.strerror}"
        return OffloadError(f"{self.path}: {why}. Free space there or check the disk, or {ELSEWHERE}")


def _sum(chunk: memoryview) -> int:
    """Return the sum of 64-bit words; the bytes after the last whole word count as one word."""
    whole = len(chunk) // 8 * 8
    words = np.frombuffer(chunk[:whole], np.uint64)
    return int(np.add.reduce(words)) + int.from_bytes(chunk[whole:], "little")


def _create(folder: Path) -> tuple[int, str]:
    """Create a file and lock it; return its descriptor and path. The lock ends with the process."""
    while True:
        fd, path = tempfile.mkstemp(_SUFFIX, f"{_PREFIX}{os.getpid()}-", folder)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)  # another process took it for a leftover before it was locked


def _remove_leftovers(folder: Path) -> None:
    """Remove the files of processes that have ended: their locks are free."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError), open(path, "r+b") as file:  # OSError: in use, another user's, or just removed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _remove(fd: int, path: str, process: int) -> None:
    with suppress(OSError):
        if os.getpid() == process and os.path.samestat(os.fstat(fd), os.stat(path)):  # not in a forked child
            os.unlink(path)
    os.close(fd)
