"""Keep copies of CUDA tensors in pinned host memory. A GPU has not run this version.

The host may run far ahead of the device, so it waits for nothing here. Before memory of the device is given up, the
compute stream waits for the copy that uses it. All of it is allocated on the compute stream, whose later work can then
reuse it at once: memory of another stream's, or marked by ``record_stream``, would be held for longer.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, cuda

MOST_WRITES = 2  # copies under way: a layer's input is written while this layer and the next one run
ELSEWHERE = "pass another folder in memory=Memory(offload='disk:DIR')"  # the remedy of most errors


class OffloadError(RuntimeError):
    """A copy could not be written, or could not be read back unchanged. The message names the file and the remedy."""


def check_unchanged(x: Tensor, version: int) -> None:
    """Raise OffloadError if ``x`` was written to since its version counter was ``version``."""
    if x._version != version:
        raise OffloadError(
            f"a tensor of {list(x.shape)} was changed in place while it was copied. A layer must not change its input; "
            "clone it first, or pass memory=Memory(offload=None)"
        )


_ALIGNED = 512  # bytes
_WASTE = 1 / 8  # of a slab, which no search for another size is worth


@dataclass(eq=False)
class HostTicket:
    """A pinned copy. ``held``: the tensor, until its memory is given up; ``written``, ``ahead``: events to wait for."""

    held: Tensor | None
    version: int
    device: torch.device
    copy: Tensor | None
    written: cuda.Event
    ahead: tuple[Tensor, cuda.Event] | None = None


class HostStore:
    """Copies tensors to pinned host memory and back, on a separate CUDA stream. At most three are on the device."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, tuple[cuda.Stream, PinnedMemory]] = {}
        self._writes: deque[HostTicket] = deque()  # those with ``held``, the oldest first
        self._ahead: HostTicket | None = None
        self._reading: list[tuple[Tensor, cuda.Event]] = []  # what is read ahead
        weakref.finalize(self, _wait_for, self._reading).atexit = False

    def put(self, x: Tensor) -> HostTicket:
        """Start to copy a GPU's ``x``, which nothing may change afterwards; return a ticket."""
        self._check(x)
        self.release(MOST_WRITES - 1)
        x = x.detach()
        if x.device not in self._devices:
            self._devices[x.device] = cuda.Stream(x.device), self._pinned()
        stream, memory = self._devices[x.device]
        copy, written = memory.take(x), cuda.Event()
        stream.wait_stream(cuda.current_stream(x.device))
        with cuda.stream(stream):
            copy.copy_(x, non_blocking=True)
            written.record(stream)
        self._writes.append(ticket := HostTicket(x, x._version, x.device, copy, written))
        return ticket

    def fetch(self, ticket: HostTicket) -> None:
        """Start to copy the tensor back. A tensor that was read ahead and not taken is dropped."""
        if ticket.ahead is not None or ticket.held is not None:
            return
        if self._ahead is not None:
            self._ahead.ahead = None
        _wait_for(self._reading)
        assert ticket.copy is not None
        (stream, _), read = self._devices[ticket.device], cuda.Event()
        x = torch.empty(ticket.copy.shape, dtype=ticket.copy.dtype, device=ticket.device)
        stream.wait_stream(cuda.current_stream(ticket.device))  # earlier work may use this memory until then
        with cuda.stream(stream):
            x.copy_(ticket.copy, non_blocking=True)
            read.record(stream)
        ticket.ahead, self._ahead = (x, read), ticket
        self._reading.append(ticket.ahead)

    def get(self, ticket: HostTicket) -> Tensor:
        """Return a new tensor like ``x``, for which the current stream waits and the process does not."""
        if ticket.held is not None:
            x = ticket.held
            self._give_up(ticket)
            self._writes.remove(ticket)
            return x
        self.release(0)
        self.fetch(ticket)
        assert ticket.ahead is not None
        (x, _), ticket.ahead, self._ahead = ticket.ahead, None, None
        _wait_for(self._reading)
        return x

    def free(self, ticket: HostTicket) -> None:
        """Let a later copy on the same stream use the buffer. Garbage collection may call it at any time."""
        ticket.copy = None

    def release(self, most: int) -> None:
        """Give up the device's memory of all but ``most`` tensors whose copies were started."""
        while len(self._writes) > most:
            self._give_up(self._writes[0])
            self._writes.popleft()

    def _give_up(self, ticket: HostTicket) -> None:
        assert ticket.held is not None
        check_unchanged(ticket.held, ticket.version)  # again at the next try
        cuda.current_stream(ticket.device).wait_event(ticket.written)
        ticket.held = None

    def _pinned(self) -> PinnedMemory:
        return PinnedMemory()

    def _check(self, x: Tensor) -> None:
        if not x.is_cuda:
            raise ValueError(
                f"offload='host' keeps tensors of GPUs in host memory, and this tensor is on {str(x.device)!r}; "
                "pass memory=Memory(offload='disk:DIR')"
            )


def _wait_for(reading: list[tuple[Tensor, cuda.Event]]) -> None:
    """Let the compute stream wait for what is read, whose memory may be given up afterwards."""
    while reading:
        x, read = reading.pop()
        cuda.current_stream(x.device).wait_event(read)


class PinnedMemory:
    """Buffers of pinned memory, used again by copies on one stream; sizes within an eighth share them.

    torch rounds a pinned allocation up to a power of two, so several buffers are cut from one allocation where one
    alone would waste much of it. The host waits while memory is pinned, so slabs are as small as that allows.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[Any, int]]] = {}  # by size: (slab, first byte)
        self._made: dict[int, int] = {}  # buffers by size

    def take(self, like: Tensor) -> Tensor:
        """Return a dense CPU tensor like ``like``. Its memory is free again once the tensor is gone."""
        step = max(_ALIGNED, (1 << max(like.nbytes, 1).bit_length()) // 16)
        size = -(-max(like.nbytes, 1) // step) * step
        free = self._free.setdefault(size, [])
        if not free:
            for other in [each for each in self._made if len(self._free[each]) == self._made[each]]:
                del self._free[other], self._made[other]
            free = self._free.setdefault(size, [])
            least = 1 << (size - 1).bit_length()
            sizes = (least, 2 * least, 4 * least)
            slab = self._allocate(min(sizes, key=lambda x: max(x % size / x, _WASTE))).untyped_storage()
            free += [(slab, start) for start in range(0, slab.nbytes() - size + 1, size)]
            self._made[size] = self._made.get(size, 0) + len(free)
        storage, start = free.pop()
        # Not a view of the slab: views share the counter of changes in place.
        x = torch.empty(0, dtype=like.dtype, device="cpu")
        x.set_(storage, start // like.itemsize, like.shape, torch.empty(like.shape, device="meta").stride())
        weakref.finalize(x, free.append, (storage, start)).atexit = False
        return x

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
