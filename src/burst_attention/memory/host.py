"""Keep copies of CUDA tensors in pinned host memory. On one H100 it freed less than planned."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from .store import MOST_WRITES, check_unchanged


@dataclass(eq=False)
class HostTicket:
    """A copy in host memory.

    Attributes:
        device: the device of the tensor.
        copy: the copy, in pinned memory; None once it is freed.
        written: the event after which the copy may be read.
        ahead: the tensor that was read ahead, and the event after which it may be used.
    """

    device: torch.device
    copy: Tensor | None
    written: torch.cuda.Event
    ahead: tuple[Tensor, torch.cuda.Event] | None = None


class HostStore:
    """Copies tensors to pinned host memory and back, on a separate CUDA stream."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._writes: deque[tuple[torch.cuda.Event, Tensor, int]] = deque()
        self._ahead: HostTicket | None = None

    def put(self, x: Tensor) -> HostTicket:
        """Start to copy ``x``; see :meth:`Store.put`."""
        if not x.is_cuda:
            raise ValueError(
                f"offload='host' keeps tensors of GPUs in host memory, and this tensor is on {str(x.device)!r}; "
                "pass memory=Memory(offload='disk:DIR')"
            )
        self.release(MOST_WRITES - 1)
        x = x.detach()
        if x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device)
        stream, written = self._streams[x.device], torch.cuda.Event()
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            copy.copy_(x, non_blocking=True)
            written.record(stream)
        self._writes.append((written, x, x._version))
        return HostTicket(x.device, copy, written)

    def fetch(self, ticket: HostTicket) -> None:
        """Start to copy the tensor back; see :meth:`Store.fetch`."""
        if ticket.ahead is not None:
            return
        if self._ahead is not None:
            self._ahead.ahead = None
        assert ticket.copy is not None
        stream, read = self._streams[ticket.device], torch.cuda.Event()
        with torch.cuda.stream(stream):
            x = ticket.copy.to(ticket.device, non_blocking=True)
            read.record(stream)
        ticket.ahead, self._ahead = (x, read), ticket

    def get(self, ticket: HostTicket) -> Tensor:
        """Return the tensor; see :meth:`Store.get`. The current stream waits for it, the process does not."""
        self.release(MOST_WRITES)
        self.fetch(ticket)
        assert ticket.ahead is not None
        (x, read), ticket.ahead, self._ahead = ticket.ahead, None, None
        current = torch.cuda.current_stream(ticket.device)
        current.wait_event(read)
        x.record_stream(current)  # it was allocated on the other stream
        return x

    def free(self, ticket: HostTicket) -> None:
        """Drop the copy. torch reuses pinned memory only after the copies that are under way."""
        ticket.copy = ticket.ahead = None

    def release(self, most: int) -> None:
        """Release tensors whose copies are done; wait until at most ``most`` are under way.

        The store holds each tensor until then, so its memory can't be reused too early.
        """
        while self._writes and (len(self._writes) > most or self._writes[0][0].query()):
            written, x, version = self._writes.popleft()
            written.synchronize()
            check_unchanged(x, version)
