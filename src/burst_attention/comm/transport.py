"""Exchanges between the ranks of one group: batched point-to-point messages, waited for with a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .verdict import ONE_ORDER


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


# Up to this size, all tensors for one peer in one exchange are packed into one message. A gloo message costs three
# packets and three thread wake-ups, about 100 microseconds. Copying this many bytes takes about 10.
PACKED_BYTES = 1 << 16
HISTORIES = 1 << 52  # float64 holds each; the high bits are the best mixed
CALLS = 1 << 20  # histories that tags tell apart; gloo's tags have 31 bits
NAMED = 16  # ranks of a group in an error
MARK_TAG = 0xB2  # of the numbers of calls; those of :mod:`.link` come before it, the bits of calls above it


class ExchangeError(RuntimeError):
    """A peer did not send or take a message within the deadline, or its connection broke.

    Attributes:
        peer: the rank of the group that this rank waited for; None if it is unknown, or if no message was tried.
    """

    peer: int | None = None


@dataclass(eq=False)
class Pending:
    """An exchange in flight. Holds its buffers until it has been waited for."""

    label: str  # names the step and the phase in errors
    operations: list[Operation]
    works: list[Any]  # torch's handles to wait for
    packed: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)  # (message to receive, tensors to fill)
    later: list[Receive] = field(default_factory=list)  # receives to start with the sends


@dataclass
class Health:
    """The state of one process group."""

    failure: str | None = None  # an earlier error on the group
    timeout: float | None = None  # seconds, of transports of the group that have no timeout
    history: int = 0  # a digest of all calls and backwards so far, in their order; equal on all ranks
    agreements: int = 0  # exchanges of records so far, of any plan; equal on all ranks
    begun: tuple[int, int] | None = None  # the call whose backward runs, and ``agreements`` when it began
    measured: dict[tuple[int, ...], Any] = field(default_factory=dict)  # links, by the nodes of the ranks
    marked: int = 0  # the call whose number was last sent beside its tensors, and those messages in flight
    marks: dict[tuple[type, int], tuple[Tensor, Any]] = field(default_factory=dict)
    lines: Any = None  # :class:`.lines.Lines` for small messages, once they are open

    def note(self, what: int) -> int:
        """Add an event to the history; return the new history, which marks the event's messages."""
        self.history = (self.history * 6_364_136_223_846_793_005 + what + 1) % HISTORIES
        return self.history

    def next_call(self) -> int:
        """Return the number of a new call, the same on ranks with the same history."""
        return self.note(0)

    def note_backward(self, number: int) -> int:
        """Note that the backward of a call begins; return the number that marks its messages."""
        return self.note(number)

    def fail(self, label: str, error: BaseException) -> None:
        """Mark the group as failed: other ranks now wait for messages that this rank will never send."""
        self.failure = self.failure or f"{label}: {type(error).__name__} on this rank"

    @contextmanager
    def failing(self, label: str) -> Iterator[None]:
        """Call :meth:`fail` if the block raises. Other ranks count on the messages of the block."""
        try:
            yield
        except BaseException as error:
            self.fail(label, error)
            raise


@dataclass(eq=False)
class Transport:
    """Messages between the ranks of ``group``, with counts of the bytes moved."""

    group: Any  # a ProcessGroup; None for a world of one
    timeout: float | None = None  # seconds that one exchange may take; None for the health's, or the group's own
    tag: int = 0  # separates these messages from others on the same group
    health: Health = field(default_factory=Health)  # shared by all transports of one group
    sent: int = 0  # payload bytes
    received: int = 0
    waited: float = 0.0  # seconds of the host in :meth:`wait`; almost 0 on CUDA, where a stream waits instead

    def __post_init__(self) -> None:
        self.rank = 0 if self.group is None else self.group.rank()
        self.world = 1 if self.group is None else self.group.size()

    @property
    def deadline(self) -> float | None:
        """Seconds that one exchange may take; None for the group's own timeout."""
        return self.health.timeout if self.timeout is None else self.timeout

    def check(self, label: str) -> None:
        """Raise ExchangeError if the group has failed before."""
        if self.health.failure and self.world > 1:  # alone, no rank can have missed a message
            raise ExchangeError(
                f"rank {self.rank}: {label}: this process group failed before ({self.health.failure}); "
                f"destroy it and make a new one"
            )

    @contextmanager
    def naming(self, label: str) -> Iterator[None]:
        """Raise errors of torch's collectives inside this context as ExchangeError, and mark the group as failed.

        ``label`` names the collective and its call. The context must not contain other code that may raise.
        """
        self.check(label)
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            problem = f"could not finish {label} after {time.monotonic() - started:.1f} s: {_cause(error)}"
            raise self.failed(problem, f"{label}: could not finish") from error

    def post(self, sends: Sequence[Send], receives: Sequence[Receive], *, label: str, call: int = 0) -> Pending:
        """Start an exchange without waiting for it. ``label`` names the step and the phase in errors.

        ``call``: the number of its call. On gloo and between threads, messages of different calls don't match, so
        ranks that run backwards in different orders wait until the deadline. NCCL has no tags: there ranks send each
        other the number, and compare it when their next call begins. Between two ranks, messages of one exchange match
        in the order given.
        """
        self.check(label)
        for send in sends:
            self.sent += send.tensor.nbytes
        for receive in receives:
            self.received += receive.tensor.nbytes
        # Wait for receives first: the sends are usually done by then.
        operations: list[Operation] = [each for each in receives if each.tensor.numel()]
        operations += [each for each in sends if each.tensor.numel()]
        messages, packed = pack(operations)
        pending = Pending(label, messages, [], packed)
        if operations:
            try:
                if call and not self._has_tags(pending.operations):
                    self._mark(call, pending.operations)
                pending.works = self._start(pending.operations, self.tag + (call * CALLS // HISTORIES << 8))
            except ExchangeError:
                raise
            except RuntimeError as error:
                peers = sorted({each.peer for each in operations})
                problem = f"could not start messages with rank {', '.join(map(str, peers))}"
                raise self._failure(problem, label, 0.0, error, peers[0] if len(peers) == 1 else None) from error
        return pending

    def _has_tags(self, operations: Sequence[Operation]) -> bool:
        return all(each.tensor.is_cpu for each in operations)

    def _mark(self, call: int, operations: Sequence[Operation]) -> None:
        """Exchange a call's number with its peers on the CPU; raise if the call before was not the same.

        Nobody waits for a number in its own call, so the host runs ahead of its peers by one call at most.
        """
        marks = self.health.marks
        if call != self.health.marked:
            arrived = Pending("the order of calls", [kind(peer, x) for (kind, peer), (x, _) in marks.items()], [])
            arrived.works = [work for _, work in marks.values()]
            operations_before = arrived.operations
            self.wait(arrived)
            marks.clear()
            odd = [operation.peer for operation in operations_before if operation.tensor.item() != self.health.marked]
            if odd:
                raise self._other_order(odd[0])
            self.health.marked = call
        for operation in operations:
            if (key := (type(operation), operation.peer)) not in marks:
                number = torch.tensor([call if isinstance(operation, Send) else -1], device="cpu")
                marks[key] = number, self._start_one(type(operation)(operation.peer, number), MARK_TAG)

    def _other_order(self, peer: int) -> ExchangeError:
        self.health.failure = f"rank {peer} made another call than this rank"
        error = ExchangeError(
            f"rank {self.rank}: rank {peer} made another call, or the same calls in another order; the results of the "
            f"last two calls are wrong. Make all calls and run their backwards in one order on every rank"
        )
        error.peer = peer
        return error

    def _start(self, operations: Sequence[Operation], tag: int) -> list[Any]:
        """Start the operations; return works to wait for, one per operation or one for all."""
        if all(operation.tensor.is_cpu for operation in operations):
            return [self._start_one(operation, tag) for operation in operations]
        batch = [
            dist.P2POp(
                dist.isend if isinstance(operation, Send) else dist.irecv,
                operation.tensor,
                group=self.group,
                group_peer=operation.peer,
                tag=tag,
            )
            for operation in operations
        ]
        return dist.batch_isend_irecv(batch)

    def _has_line(self, operation: Operation) -> bool:
        lines = self.health.lines
        return lines is not None and lines.carries(operation.tensor, operation.peer)

    def _start_one(self, operation: Operation, tag: int) -> Any:
        """Do what dist.isend and dist.irecv do on gloo, without their checks; or use a line to the peer."""
        sends = isinstance(operation, Send)
        if self._has_line(operation):
            return self.health.lines.post(operation.tensor, operation.peer, tag, sends=sends)
        start = self.group.send if sends else self.group.recv
        tensor = torch.view_as_real(operation.tensor) if operation.tensor.is_complex() else operation.tensor
        return start([tensor], operation.peer, tag)

    def wait(self, pending: Pending) -> None:
        """Finish an exchange by the deadline, on CUDA the watchdog's; raise ExchangeError, which names the peer."""
        started = time.monotonic()
        one_each = len(pending.works) == len(pending.operations)  # NCCL returns one work for the whole batch
        # On CUDA a wait blocks only the stream; with a deadline it would block the host.
        limit = None if any(each.tensor.is_cuda for each in pending.operations) else self.deadline
        for n, work in enumerate(pending.works):
            try:
                if limit is None:
                    work.wait()
                else:
                    left = max(0.001, limit - (time.monotonic() - started))
                    work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                what = str(pending.operations[n]) if one_each else "exchange with peers"
                peer = pending.operations[n].peer if one_each else None
                seconds = time.monotonic() - started
                raise self._failure(f"could not {what}", pending.label, seconds, error, peer) from error
        self.waited += time.monotonic() - started
        for whole, parts in pending.packed:
            for bytes_in, part in zip(whole.split([part.nbytes for part in parts]), parts, strict=True):
                _bytes(part).copy_(bytes_in)
        pending.operations, pending.works, pending.packed = [], [], []

    def send_last(self, sends: Sequence[Send]) -> None:
        """Send what a failed group still can, within a second. Raise nothing: gloo breaks connections that stall."""
        ends, works = time.monotonic() + min(1.0, self.deadline or 1.0), []
        for send in sends:
            with suppress(RuntimeError):
                works += self._start([send], self.tag)
        for work in works:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.001, ends - time.monotonic())))

    def all_to_all(self, leaving: Sequence[Tensor], rows: Sequence[int], *, label: str, call: int = 0) -> list[Tensor]:
        """Send ``leaving[r]`` to each other rank r; return what each rank r sends here, ``rows[r]`` rows (dim 0)."""
        hops = range(1, self.world)
        ahead, behind = ([(self.rank + step * hop) % self.world for hop in hops] for step in (1, -1))
        arriving = [
            x if rank == self.rank else x.new_empty(count, *x.shape[1:])
            for rank, (x, count) in enumerate(zip(leaving, rows, strict=True))
        ]
        sends = [Send(peer, leaving[peer].contiguous()) for peer in ahead]
        receives = [Receive(peer, arriving[peer]) for peer in behind]
        self.wait(self.post(sends, receives, label=label, call=call))
        return arriving

    def expect(self, every: Sequence[Tensor], *, label: str) -> Pending:
        """Start to receive ``every[r]`` from each other rank r, before what this rank sends is computed.

        A message of gloo leaves once its receiver has said that it waits, so that the sender computes meanwhile. If
        the computation raises, call :meth:`Health.fail`. End with :meth:`gather`.
        """
        self.check(label)
        now, later = list[Receive](), list[Receive]()
        for hop in range(1, self.world):
            peer = (self.rank - hop) % self.world
            receive = Receive(peer, every[peer])
            # NCCL would hold the sends back until all has arrived. Lines need no word from the receiver.
            waits = not receive.tensor.is_cpu or self._has_line(receive)
            (later if waits else now).append(receive)
        pending = self.post([], now, label=label) if now else Pending(label, [], [])
        pending.later = later
        return pending

    def gather(self, expected: Pending, own: Tensor) -> None:
        """Send ``own`` to all other ranks, which expect it; wait until everything that was expected is here."""
        ahead = [(self.rank + hop) % self.world for hop in range(1, self.world)]
        posted = self.post([Send(peer, own) for peer in ahead], expected.later, label=expected.label)
        if expected.works:
            posted.operations[:0], posted.works[:0] = expected.operations, expected.works
            posted.packed += expected.packed
        self.wait(posted)

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if the group can't carry tensors on ``device``."""
        if self.group is None or device.type == "cpu":
            return
        backend = backend_of(self.group, device)
        if backend in ("none", "gloo"):
            raise ValueError(
                f"tensors on {device} need a group with a backend for them, but this group's is {backend}; "
                f"make it with init_process_group('cpu:gloo,cuda:nccl')"
            )

    def warm_up(self, device: torch.device) -> None:
        """Send one byte round the ring, because NCCL needs every rank in a group's first batch."""
        send, receive = (torch.zeros(1, dtype=torch.uint8, device=device) for _ in range(2))
        ahead, behind = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        self.wait(self.post([Send(ahead, send)], [Receive(behind, receive)], label="warm-up"))

    def failed(self, problem: str, failure: str, peer: int | None = None) -> ExchangeError:
        """Return the error of an exchange that failed because of ``peer``, and mark the group as failed."""
        self.health.failure = failure
        error = ExchangeError(
            f"rank {self.rank} {problem}. A rank of its group ({self._ranks()}) has stopped, or made another call. "
            f"Look at the errors of the other ranks first. {ONE_ORDER}"
        )
        error.peer = peer
        return error

    def _ranks(self) -> str:
        """Return the ranks of the group as errors name them: by their numbers among all processes."""
        ranks = [*range(self.world)]
        if isinstance(self.group, dist.ProcessGroup):
            with suppress(KeyError, RuntimeError, ValueError):  # a destroyed group
                ranks = dist.get_process_group_ranks(self.group)
        return f"ranks {', '.join(map(str, ranks[:NAMED]))}{' and more' if len(ranks) > NAMED else ''} of the job"

    def _failure(self, what: str, label: str, seconds: float, error: RuntimeError, peer: int | None) -> ExchangeError:
        return self.failed(f"{what} in {label} after {seconds:.1f} s: {_cause(error)}", f"{label}: {what}", peer)


def _cause(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def backend_of(group: Any, device: torch.device) -> str:
    """Return the name of a group's backend for a device, or ``none``."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return "none"


def pack(operations: Sequence[Operation]) -> tuple[list[Operation], list[tuple[Tensor, list[Tensor]]]]:
    """Pack small CPU tensors to or from one peer into one message; return messages and (message, tensors to fill)."""
    if len(operations) <= 2 and len({*map(type, operations)}) == len(operations):
        return [*operations], []
    together: dict[tuple[type[Operation], int], list[Tensor]] = {}
    for operation in operations:
        together.setdefault((type(operation), operation.peer), []).append(operation.tensor)
    messages: list[Operation] = []
    filled = []
    for (kind, peer), tensors in together.items():
        size = sum(x.nbytes for x in tensors)
        if len(tensors) == 1 or size > PACKED_BYTES or not all(x.is_cpu for x in tensors):
            messages += [kind(peer, x) for x in tensors]
        elif kind is Send:
            messages.append(Send(peer, torch.cat([_bytes(x) for x in tensors])))
        else:
            whole = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever torch's default device
            messages.append(Receive(peer, whole))
            filled.append((whole, tensors))
    return messages, filled


def _bytes(x: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as a 1-D uint8 view."""
    return x.detach().view(-1).view(torch.uint8)
