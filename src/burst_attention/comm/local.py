"""Ranks as threads of one process: exchanges become copies between tensors of one device."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor

from .transport import Health, Operation, Send, Transport


@dataclass(eq=False)
class _Half:
    """One side of a message: the tensor to send or to receive into. It can be waited for, like torch's works."""

    tensor: Tensor
    patience: float  # seconds that a wait without a timeout may take
    ready: torch.cuda.Event | None  # on CUDA, the tensor may be read or written after it
    copied: torch.cuda.Event | None = None  # on CUDA, the copy is done after it
    failure: str | None = None  # why the message failed
    done: threading.Event = field(default_factory=threading.Event)  # the copy is made (on CUDA: started) or has failed

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until the copy is made (on CUDA: let this thread's stream wait). Raise RuntimeError if it fails."""
        if not self.done.wait(self.patience if timeout is None else timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self.failure:
            raise RuntimeError(self.failure)
        if self.copied is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.copied)


class Exchange:
    """The shared state of a local world: matches the threads' sends and receives in the order posted."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int, int, bool], deque[_Half]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ended: dict[int, str] = {}  # rank that raised -> its error

    def post(self, half: _Half, *, source: int, target: int, tag: int, sends: bool) -> None:
        """Match the other side, or queue until it comes. The side that comes second makes the copy; neither blocks."""
        with self._lock:
            others = self._waiting.get((source, target, tag, not sends))
            peer = target if sends else source
            if not others and peer in self._ended:
                half.failure = self._ended[peer]
                half.done.set()
                return
            if not others:
                self._waiting.setdefault((source, target, tag, sends), deque()).append(half)
                return
            other = others.popleft()
        sent, received = (half, other) if sends else (other, half)
        self._copy(sent, received)

    def fail(self, rank: int, failure: str) -> None:
        """Fail all waits for ``rank``, now and later. As with processes, its earlier messages are still delivered."""
        with self._lock:
            self._ended[rank] = failure
            waits = [key for key in self._waiting if (key[1] if key[3] else key[0]) == rank]
            left = [half for key in waits for half in self._waiting.pop(key)]
        for half in left:
            half.failure = failure
            half.done.set()

    def _copy(self, sent: _Half, received: _Half) -> None:
        try:
            if (sent.tensor.shape, sent.tensor.dtype) != (received.tensor.shape, received.tensor.dtype):
                shapes = [f"{list(x.tensor.shape)} {x.tensor.dtype}" for x in (sent, received)]
                raise RuntimeError(
                    f"a message of {shapes[0]} met a buffer of {shapes[1]}; their shapes and dtypes must be equal"
                )
            if all(map(_is_plain, (sent.tensor, received.tensor))):
                # As on a wire: bytes, and no operator of torch, whose start would take longer than a small copy.
                ctypes.memmove(received.tensor.data_ptr(), sent.tensor.data_ptr(), sent.tensor.nbytes)
                return
            # The other thread's buffer may be an inference tensor, which only inference mode can write.
            with torch.inference_mode():
                if sent.ready is None:
                    received.tensor.copy_(sent.tensor)
                else:
                    self._copy_on_stream(sent, received)
        except Exception as error:
            sent.failure = received.failure = str(error)
        finally:
            sent.done.set()
            received.done.set()

    def _copy_on_stream(self, sent: _Half, received: _Half) -> None:
        device = sent.tensor.device
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
        with torch.cuda.stream(stream):
            for half in (sent, received):
                assert half.ready is not None  # both tensors are on the same device
                stream.wait_event(half.ready)
                half.tensor.record_stream(stream)
            received.tensor.copy_(sent.tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        sent.copied = received.copied = event


@dataclass(eq=False)
class LocalGroup:
    """One thread's rank in a local world. Pass it as ``make_plan(..., group=group)`` like a process group."""

    exchange: Exchange  # shared by all ranks
    own_rank: int
    timeout: float  # seconds that an exchange may take if the plan has no timeout
    health: Health = field(default_factory=Health)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a local group belongs to one thread of this process; don't pickle or deep-copy it")

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.exchange.world


@dataclass(eq=False)
class LocalTransport(Transport):
    """Messages between threads."""

    def _has_tags(self, operations: Sequence[Operation]) -> bool:
        return True

    def _start(self, operations: Sequence[Operation], tag: int) -> list[Any]:
        group: Any = self.group
        works = []
        for operation in operations:
            sends = isinstance(operation, Send)
            half = _Half(operation.tensor, group.timeout, _recorded(operation.tensor))
            source, target = (self.rank, operation.peer) if sends else (operation.peer, self.rank)
            group.exchange.post(half, source=source, target=target, tag=tag, sends=sends)
            works.append(half)
        return works

    def check_device(self, device: torch.device) -> None:
        """Accept any device."""


def _is_plain(x: Tensor) -> bool:
    """Return whether a tensor's values are its bytes, one after the other, in this process's memory."""
    return x.is_cpu and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _recorded(tensor: Tensor) -> torch.cuda.Event | None:
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
