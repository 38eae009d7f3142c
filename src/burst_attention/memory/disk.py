"""Keep copies of tensors in a file: written and read by threads, verified by a checksum.

Bytes go straight between the file and the tensors. The file is not mapped, because mapped pages count as resident
memory. No other process can open it.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .host import ELSEWHERE, MOST_WRITES, HostStore, OffloadError, check_unchanged

_BLOCK = 4096  # bytes; records start at multiples of it
_THREADS = 2  # one tensor can be written and another one read
_Source = tuple[Tensor, int, torch.cuda.Event | None]  # in CPU memory; its version; the event after which it is ready


@dataclass(eq=False)
class DiskTicket:
    """A record of the file. ``empty``: the tensor's shape; ``written``: its checksum; ``ahead``: a read."""

    start: int
    size: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    written: Future[int]
    reads: list[Future[None]] = field(default_factory=list)
    ahead: tuple[Tensor, Future[None]] | None = None
    freed: bool = False

    @property
    def used(self) -> bool:
        """Whether the record's bytes in the file are still needed, or a thread reads or writes them."""
        return not (self.freed and self.written.done() and all(read.done() for read in self.reads))


class DiskStore:
    """Keeps tensors of any device in one nameless file of ``folder``, a local disk; freed records are used again."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        self._file = RecordFile(Path(folder))
        self._threads = ThreadPoolExecutor(_THREADS, "burst-offload")
        self._host = HostStore()
        self._records: list[DiskTicket] = []  # in the file's order
        self._writes: deque[DiskTicket] = deque()
        self._ahead: DiskTicket | None = None

    def put(self, x: Tensor) -> DiskTicket:
        """Start to write ``x``, which nothing may change afterwards; wait first while MOST_WRITES are under way."""
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"only plain tensors can be kept in a file, not {type(x).__name__}; pass its local tensor")
        self._finish_writes(MOST_WRITES - 1)
        size = -(-max(x.nbytes, 1) // _BLOCK) * _BLOCK
        start = self._first_free(size)
        self._file.grow(start + size)
        written = self._threads.submit(_write, self._file, start, [self._in_host_memory(x)])
        ticket = DiskTicket(start, size, x.shape, x.dtype, x.device, written)
        self._writes.append(ticket)
        insort(self._records, ticket, key=lambda record: record.start)
        return ticket

    def fetch(self, ticket: DiskTicket) -> None:
        """Start to read the tensor into CPU memory; drop one that was read ahead and not taken."""
        if ticket.ahead is not None:
            return
        if self._ahead is not None:
            self._ahead.ahead = None
        self._file.check()
        pinned = ticket.device.type == "cuda"
        target = torch.empty(ticket.shape, dtype=ticket.dtype, device="cpu", pin_memory=pinned)
        read = self._threads.submit(_read, self._file, ticket.start, target, ticket.written)
        ticket.reads.append(read)
        ticket.ahead, self._ahead = (target, read), ticket

    def get(self, ticket: DiskTicket) -> Tensor:
        """Return the tensor, or raise OffloadError if its bits have changed or can't be read."""
        self._host.release(0)
        self.fetch(ticket)
        assert ticket.ahead is not None
        (target, read), ticket.ahead, self._ahead = ticket.ahead, None, None
        read.result()
        return target.to(ticket.device, non_blocking=True)

    def free(self, ticket: DiskTicket) -> None:
        """Let a later put use the record's bytes. Garbage collection may call it at any time."""
        ticket.freed, ticket.ahead = True, None

    def close(self) -> None:
        """Wait for the threads and close the file, which removes it."""
        self._threads.shutdown()
        self._file.close()

    def _in_host_memory(self, x: Tensor) -> _Source:
        x = x.detach().contiguous()
        if not x.is_cuda:
            return x, x._version, None
        held = self._host.put(x)
        assert held.copy is not None
        return held.copy, held.copy._version, held.written

    def _finish_writes(self, most: int) -> None:
        """Wait until at most ``most`` writes are under way; raise the error of one that failed."""
        while self._writes and (len(self._writes) > most or self._writes[0].written.done()):
            ticket = self._writes.popleft()
            wait([ticket.written])
            if not ticket.freed:
                ticket.written.result()

    def _first_free(self, size: int) -> int:
        """Return the first byte of the first gap of ``size`` bytes between the records, or after them."""
        self._records = [record for record in self._records if record.used]
        start = 0
        for record in self._records:
            if record.start - start >= size:
                break
            start = record.start + record.size
        return start


def _write(file: RecordFile, start: int, box: list[_Source]) -> int:
    """Write the tensor in ``box``; return its checksum. Empty the box, so that the tensor is free afterwards."""
    source, version, ready = box.pop()
    if ready is not None:
        ready.synchronize()
    checksum = file.write(start, _bytes(source))
    check_unchanged(source, version)
    return checksum


def _read(file: RecordFile, start: int, target: Tensor, written: Future[int]) -> None:
    checksum = written.result()  # threads take tasks in order, so the write has begun and can end
    file.read(start, _bytes(target), checksum)


def _bytes(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, as a view of its memory."""
    return x.reshape(-1).view(torch.uint8).numpy().data


_CHUNK = 1 << 20  # bytes; a chunk is still in the processor's cache when its checksum is computed


class RecordFile:
    """Records of bytes at places that the caller chooses, in a file without a name, which ends with the process."""

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
        """Reserve space on the disk, so that the file has at least ``size`` bytes."""
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
        """Write ``memory`` at byte ``start``; return its checksum."""
        return self._move("written", lambda view, place: os.pwrite(self._fd, view, place), start, memory)

    def read(self, start: int, memory: memoryview, checksum: int) -> None:
        """Fill ``memory`` from byte ``start``; raise OffloadError if the checksum is another."""
        self.check()
        actual = self._move("read", lambda view, place: os.preadv(self._fd, [view], place), start, memory)
        if actual != checksum:
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
