"""Ranks as threads of one process: the same exchanges, as copies between tensors of one device."""

from __future__ import annotations

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
    """One side of a message: the tensor to send, or to receive into; a work that can be waited for.

    Attributes:
        ready: on CUDA, when the tensor may be read or written.
        copied: on CUDA, when it has been.
    """

    tensor: Tensor
    patience: float
    ready: torch.cuda.Event | None
    copied: torch.cuda.Event | None = None
    failure: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until the copy was made (on CUDA: let this thread's stream wait); RuntimeError if it won't be."""
        if not self.done.wait(self.patience if timeout is None else timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self.failure:
            raise RuntimeError(self.failure)
        if self.copied is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.copied)


class Exchange:
    """Where the threads of a local world meet: sends and receives that wait for each other, in the order posted."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int, int, bool], deque[_Half]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ended: dict[int, str] = {}  # ranks that raised, and what

    def post(self, half: _Half, *, source: int, target: int, tag: int, sends: bool) -> None:
        """Meet the other side, or wait for it. Whoever comes second makes the copy; nobody blocks."""
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
        """End all waits for ``rank``, now and later; what it had sent before is still taken, as between processes."""
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
                told = [f"{list(x.tensor.shape)} {x.tensor.dtype}" for x in (sent, received)]
                raise RuntimeError(f"a message of {told[0]} met a buffer of {told[1]}")
            # Either thread makes the copy, in its own mode; a buffer of the other's inference mode takes no other.
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
                assert half.ready is not None  # both are on one device
                stream.wait_event(half.ready)
                half.tensor.record_stream(stream)
            received.tensor.copy_(sent.tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        sent.copied = received.copied = event


@dataclass(eq=False)
class LocalGroup:
    """One thread's place in a local world, in place of a process group: pass it as ``make_plan(..., group=group)``.

    Args:
        exchange: shared by all ranks.
        rank: this thread's.
        timeout: seconds that an exchange may take if its plan does not say.
    """

    exchange: Exchange
    own_rank: int
    timeout: float
    health: Health = field(default_factory=Health)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a local group is one thread's place in this process: it can't be pickled or deep-copied")

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.exchange.world


@dataclass(eq=False)
class LocalTransport(Transport):
    """Messages between threads."""

    def _start(self, operations: Sequence[Operation]) -> list[Any]:
        group: Any = self.group
        works = []
        for each in operations:
            sends = isinstance(each, Send)
            half = _Half(each.tensor, group.timeout, _recorded(each.tensor))
            source, target = (self.rank, each.peer) if sends else (each.peer, self.rank)
            group.exchange.post(half, source=source, target=target, tag=self.tag, sends=sends)
            works.append(half)
        return works

    def check_device(self, device: torch.device) -> None:
        """Any device will do."""


def _recorded(tensor: Tensor) -> torch.cuda.Event | None:
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
