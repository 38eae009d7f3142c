"""Keep copies of CUDA tensors in pinned host memory.

The host may run far ahead of the device, so it waits for nothing here. Before memory of the device is given up, the
compute stream waits for the copy that uses it. All of it is allocated on the compute stream, whose later work can then
reuse it at once: memory of another stream's, or marked by ``record_stream``, would be held for longer. A GPU has not
run this version.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, cuda

from .store import MOST_WRITES, check_unchanged

_ALIGNED = 512  # bytes
_CUT = 4  # a slab has at least this many buffers


@dataclass(eq=False)
class HostTicket:
    """A copy in host memory.

    Attributes:
        held: the tensor itself, until its memory is given up; its version counter is ``version``.
        device: the device of the tensor.
        copy: the copy, in pinned memory; None once it is freed.
        written: the event after which the copy may be read, and the tensor's memory reused.
        ahead: the tensor that was read ahead, and the event after which it may be used.
    """

    held: Tensor | None
    version: int
    device: torch.device
    copy: Tensor | None
    written: cuda.Event
    ahead: tuple[Tensor, cuda.Event] | None = None


class HostStore:
    """Copies tensors to pinned host memory and back, on a separate CUDA stream. At most three are on the device."""

    def __init__(self) -> None:
        self._memory = PinnedMemory()
        self._streams: dict[torch.device, cuda.Stream] = {}
        self._writes: deque[HostTicket] = deque()  # those with ``held``, the oldest first
        self._ahead: HostTicket | None = None

    def put(self, x: Tensor) -> HostTicket:
        """Start to copy ``x``; see :meth:`Store.put`."""
        self._check(x)
        self.release(MOST_WRITES - 1)
        x = x.detach()
        if x.device not in self._streams:
            self._streams[x.device] = cuda.Stream(x.device)
        stream, copy, written = self._streams[x.device], self._memory.take(x), cuda.Event()
        stream.wait_stream(cuda.current_stream(x.device))
        with cuda.stream(stream):
            copy.copy_(x, non_blocking=True)
            written.record(stream)
        self._writes.append(ticket := HostTicket(x, x._version, x.device, copy, written))
        return ticket

    def fetch(self, ticket: HostTicket) -> None:
        """Start to copy the tensor back; see :meth:`Store.fetch`."""
        if ticket.ahead is not None or ticket.held is not None:
            return
        if self._ahead is not None and self._ahead.ahead is not None:
            cuda.current_stream(self._ahead.device).wait_event(self._ahead.ahead[1])
            self._ahead.ahead = None
        assert ticket.copy is not None
        stream, read = self._streams[ticket.device], cuda.Event()
        x = torch.empty(ticket.copy.shape, dtype=ticket.copy.dtype, device=ticket.device)
        stream.wait_stream(cuda.current_stream(ticket.device))  # earlier work may use this memory until then
        with cuda.stream(stream):
            x.copy_(ticket.copy, non_blocking=True)
            read.record(stream)
        ticket.ahead, self._ahead = (x, read), ticket

    def get(self, ticket: HostTicket) -> Tensor:
        """Return the tensor; see :meth:`Store.get`. The current stream waits for it, the process does not."""
        if ticket.held is not None:
            x = ticket.held
            self._writes.remove(ticket)
            self._give_up(ticket)
            return x
        self.release(0)
        self.fetch(ticket)
        assert ticket.ahead is not None
        (x, read), ticket.ahead, self._ahead = ticket.ahead, None, None
        cuda.current_stream(ticket.device).wait_event(read)
        return x

    def free(self, ticket: HostTicket) -> None:
        """Drop the copy. Its buffer is used again by a later copy on the same stream."""
        ticket.copy = None

    def release(self, most: int) -> None:
        """Give up the device's memory of all but ``most`` tensors whose copies were started."""
        while len(self._writes) > most:
            self._give_up(self._writes.popleft())

    def _give_up(self, ticket: HostTicket) -> None:
        x, ticket.held = ticket.held, None
        assert x is not None
        check_unchanged(x, ticket.version)
        cuda.current_stream(ticket.device).wait_event(ticket.written)

    def _check(self, x: Tensor) -> None:
        if not x.is_cuda:
            raise ValueError(
                f"offload='host' keeps tensors of GPUs in host memory, and this tensor is on {str(x.device)!r}; "
                "pass memory=Memory(offload='disk:DIR')"
            )


class PinnedMemory:
    """Buffers of pinned memory, which are made once and used again.

    torch rounds a pinned allocation up to a power of two, so several buffers of one size are cut from one allocation.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[Any, int]]] = {}  # by size: (slab, first byte)

    def take(self, like: Tensor) -> Tensor:
        """Return a dense CPU tensor like ``like``. Its memory is free again once the tensor is gone."""
        size = -(-max(like.nbytes, 1) // _ALIGNED) * _ALIGNED
        free = self._free.setdefault(size, [])
        if not free:
            slab = self._allocate(1 << (_CUT * size - 1).bit_length()).untyped_storage()
            free += [(slab, start) for start in range(0, slab.nbytes() - size + 1, size)]
        storage, start = free.pop()
        # Not a view of the slab: views share the counter of changes in place.
        x = torch.empty(0, dtype=like.dtype)
        x.set_(storage, start // like.itemsize, like.shape, torch.empty(like.shape, device="meta").stride())
        weakref.finalize(x, free.append, (storage, start)).atexit = False
        return x

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
