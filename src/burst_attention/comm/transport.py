"""Posted exchanges between the ranks of one group: batched point-to-point messages, each wait with a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Send(NamedTuple):
    """A contiguous tensor for ``peer``, a rank of the group."""

    peer: int
    tensor: Tensor

    def __str__(self) -> str:
        return f"send to rank {self.peer}"


class Receive(NamedTuple):
    """A contiguous tensor to be filled by ``peer``, a rank of the group."""

    peer: int
    tensor: Tensor

    def __str__(self) -> str:
        return f"receive from rank {self.peer}"


Operation = Send | Receive


class ExchangeError(RuntimeError):
    """A peer did not send or take a message within the deadline, or its connection broke."""


@dataclass(eq=False)
class Pending:
    """An exchange on the wire. Holds its buffers until it has been waited for."""

    label: str
    operations: list[Operation]
    works: list[Any]


@dataclass
class Health:
    """Of one process group: what went wrong on it before, for messages of a failed exchange may still be under way, and
    how many calls were made on it, by which a backward is told from another's."""

    failure: str | None = None
    calls: int = 0

    def next_call(self) -> int:
        """A number for a call: the same on all ranks, which agree on each call before they take it."""
        self.calls += 1
        return self.calls


@dataclass(eq=False)
class Transport:
    """Messages between the ranks of ``group``, with a count of what was moved.

    Args:
        group: a ProcessGroup; None for a world of one.
        timeout: seconds that one exchange may take; None for the group's own.
        tag: keeps these messages apart from others on the same group.
        health: shared by all transports of one group.

    ``sent`` and ``received`` count payload bytes.
    """

    group: Any
    timeout: float | None = None
    tag: int = 0
    health: Health = field(default_factory=Health)
    sent: int = 0
    received: int = 0

    def __post_init__(self) -> None:
        self.rank = 0 if self.group is None else self.group.rank()
        self.world = 1 if self.group is None else self.group.size()

    def post(self, sends: Sequence[Send], receives: Sequence[Receive], *, label: str) -> Pending:
        """Start an exchange and return at once. ``label`` names the step and the phase in an error.

        Between two ranks, messages of one exchange match in the order given; their sizes must have been agreed.
        """
        if self.health.failure:
            raise ExchangeError(
                f"rank {self.rank}: {label}: this process group failed before ({self.health.failure}); "
                f"destroy it and make a new one"
            )
        operations: list[Operation] = [each for each in sends if each.tensor.numel()]
        operations += [each for each in receives if each.tensor.numel()]
        self.sent += sum(each.tensor.nbytes for each in sends)
        self.received += sum(each.tensor.nbytes for each in receives)
        pending = Pending(label, operations, [])
        if operations:
            try:
                pending.works = self._start(operations)
            except RuntimeError as error:
                peers = ", ".join(str(peer) for peer in sorted({each.peer for each in operations}))
                raise self._failure(f"could not start messages with rank {peers}", label, 0.0, error) from error
        return pending

    def _start(self, operations: Sequence[Operation]) -> list[Any]:
        """Works to wait for: one for each operation, or one for all."""
        batch = [
            dist.P2POp(
                dist.isend if isinstance(each, Send) else dist.irecv,
                each.tensor,
                group=self.group,
                group_peer=each.peer,
                tag=self.tag,
            )
            for each in operations
        ]
        return dist.batch_isend_irecv(batch)

    def wait(self, pending: Pending) -> None:
        """Finish an exchange.

        Raises:
            ExchangeError: names this rank, the peer waited for, and the label. On CUDA the group's own watchdog ends a
                wait; on CPU the deadline is ``timeout``.
        """
        started = time.monotonic()
        one_each = len(pending.works) == len(pending.operations)  # NCCL gives one work for the whole batch
        # On CUDA a wait makes the stream wait; given a deadline it would be the host that does.
        limit = None if any(each.tensor.is_cuda for each in pending.operations) else self.timeout
        for n, work in enumerate(pending.works):
            try:
                if limit is None:
                    work.wait()
                else:
                    left = max(0.001, limit - (time.monotonic() - started))
                    work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                what = str(pending.operations[n]) if one_each else "exchange with peers"
                raise self._failure(f"could not {what}", pending.label, time.monotonic() - started, error) from error
        pending.operations, pending.works = [], []

    def all_to_all(
        self, leaving: Sequence[Sequence[Tensor]], arriving: Sequence[Sequence[Tensor]], *, label: str
    ) -> None:
        """Send the tensors of ``leaving[r]`` to each other rank r and fill those of ``arriving[r]`` with what r sends.

        This rank's own entries are not looked at.
        """
        hops = range(1, self.world)
        ahead, behind = ([(self.rank + step * hop) % self.world for hop in hops] for step in (1, -1))
        sends = [Send(peer, x.contiguous()) for peer in ahead for x in leaving[peer]]
        receives = [Receive(peer, x) for peer in behind for x in arriving[peer]]
        self.wait(self.post(sends, receives, label=label))

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if the group can't carry tensors on ``device``."""
        if self.group is None or device.type == "cpu":
            return
        try:
            backend = self.group._get_backend(device).name()
        except RuntimeError:
            backend = "none"
        if backend in ("none", "gloo"):
            raise ValueError(
                f"tensors on {device} need a group with a backend for them, this group's is {backend}; "
                f"make it with init_process_group('cpu:gloo,cuda:nccl')"
            )

    def warm_up(self, device: torch.device) -> None:
        """NCCL wants every rank in a group's first batch: pass one byte round the ring."""
        send, receive = (torch.zeros(1, dtype=torch.uint8, device=device) for _ in range(2))
        ahead, behind = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        self.wait(self.post([Send(ahead, send)], [Receive(behind, receive)], label="warm-up"))

    def _failure(self, what: str, label: str, seconds: float, error: RuntimeError) -> ExchangeError:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        text = (
            f"rank {self.rank} {what} in {label} after {seconds:.1f} s: {cause}. "
            f"That peer is down or stuck, or itself a victim of one that is: look at its own error first"
        )
        self.health.failure = f"{label}: {what}"
        return ExchangeError(text)
