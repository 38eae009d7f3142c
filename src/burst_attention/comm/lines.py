"""Lines: sockets between ranks, for small messages on the CPU.

A thread of gloo moves gloo's messages. Where every core computes, that thread waits for its turn. Over a line the
thread that sends writes, and the one that waits reads.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from .agreement import Agreement

LIMIT = 1 << 16  # bytes of a message; longer ones go through gloo, which moves them while a rank computes
POLLED = 1e-4  # seconds that a wait looks for a message before it sleeps
OPENING = 10.0  # seconds that a peer of the same host may take to connect
_CPU = torch.device("cpu")
_HEAD = struct.Struct("<II")  # tag, bytes
_NOW = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)
CALL = 41  # bytes: a secret, a space, a rank
_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@dataclass(eq=False, slots=True)
class _Message:
    """A message that is sent or received. It can be waited for, like torch's works."""

    lines: Lines
    line: _Line
    tensor: Tensor  # keeps its memory
    done: bool = False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until the message is sent or here; RuntimeError if it can't be, or not in time."""
        if not self.done:
            self.lines.finish(self, timeout)


class _Line:
    """One end of the connection to a peer. No method blocks."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.failure = end, ""
        self.leaving: deque[tuple[memoryview, _Message]] = deque()
        self.wanted: dict[int, deque[_Message]] = {}  # by tag
        self.early: dict[int, deque[bytes]] = {}  # messages that came before they were wanted
        self.came = memoryview(bytearray(2 * (_HEAD.size + LIMIT)))
        self.count = 0  # bytes of it

    def send(self, message: _Message, tag: int) -> None:
        """Send what the peer's buffer takes now."""
        x = message.tensor
        head, body = _HEAD.pack(tag, x.nbytes), (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
        sent = 0
        try:
            if not self.leaving:
                sent = self.end.sendmsg([head, body], [], _NOW)
        except BlockingIOError:
            pass
        except OSError as error:
            self.failure = str(error)
            return
        if sent == len(head) + len(body):
            message.done = True
        else:
            self.leaving.append((memoryview(head + bytes(body))[sent:], message))

    def receive(self, message: _Message, tag: int) -> None:
        """Take a message that came early, or the next one with this tag."""
        if early := self.early.get(tag):
            self._take(message, early.popleft(), tag)
        else:
            self.wanted.setdefault(tag, deque()).append(message)

    def move(self) -> bool:
        """Send what waits and read what has come; return whether anything moved."""
        try:
            return not self.failure and self._flush() | self._read()
        except OSError as error:
            self.failure = str(error)
            return False

    def _flush(self) -> bool:
        moved = False
        while self.leaving:
            view, message = self.leaving.popleft()
            try:
                sent = self.end.send(view, _NOW)
            except BlockingIOError:
                sent = 0
            if sent < len(view):
                self.leaving.appendleft((view[sent:], message))
                return moved or sent > 0
            message.done = moved = True
        return moved

    def _read(self) -> bool:
        try:
            count = self.end.recv_into(self.came[self.count :], 0, _NOW)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("the peer closed its connection")
        self.count, start = self.count + count, 0
        while self.count - start >= _HEAD.size:
            tag, size = _HEAD.unpack_from(self.came, start)
            body = self.came[start + _HEAD.size : start + _HEAD.size + size]
            if start + _HEAD.size + size > self.count:
                break
            if wanted := self.wanted.get(tag):
                self._take(wanted.popleft(), body, tag)
            else:
                self.early.setdefault(tag, deque()).append(bytes(body))
            start += _HEAD.size + size
        self.count -= start
        if self.count and start:
            self.came[: self.count] = bytes(self.came[start : start + self.count])
        return True

    def _take(self, message: _Message, body: bytes | memoryview, tag: int) -> None:
        x = message.tensor
        if len(body) != x.nbytes:
            self.failure = f"a message of {len(body)} bytes met a buffer of {x.nbytes} (tag {tag})"
            return
        memoryview((ctypes.c_char * x.nbytes).from_address(x.data_ptr())).cast("B")[:] = body
        message.done = True


class Lines:
    """The lines of one rank to others."""

    def __init__(self, ends: dict[int, socket.socket], patience: Callable[[], float]) -> None:
        self._patience = patience  # returns the seconds that a wait without a timeout may take
        self.lines = {peer: _Line(end) for peer, end in ends.items()}
        self._lock = threading.Lock()

    def carries(self, tensor: Tensor, peer: int) -> bool:
        """Return whether a message goes over a line; the peer's own answer is the same."""
        return peer in self.lines and tensor.is_cpu and tensor.nbytes <= LIMIT

    def post(self, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> _Message:
        """Start to send or to receive a contiguous tensor; messages with one tag match in their order."""
        line = self.lines[peer]
        message = _Message(self, line, tensor)
        with self._lock:
            (line.send if sends else line.receive)(message, tag)
        return message

    def finish(self, message: _Message, timeout: timedelta | None = None) -> None:
        """Move messages of all peers until this one is done: a peer may wait until its own are taken."""
        started, line = time.monotonic(), message.line
        while True:
            with self._lock:
                moved = line.move()
            if message.done:
                return
            if moved:
                continue
            if line.failure:
                raise RuntimeError(line.failure)
            waited = time.monotonic() - started
            if waited < POLLED:
                os.sched_yield()
                continue
            left = (self._patience() if timeout is None else timeout.total_seconds()) - waited
            if left <= 0:
                raise RuntimeError("timed out")
            self._sleep(left)

    def close(self) -> None:
        """Close all lines."""
        for line in self.lines.values():
            line.end.close()

    def _sleep(self, seconds: float) -> None:
        """Wait until a line can be read, or written to where something waits; move what can move."""
        found = select.poll()
        by_end = {line.end.fileno(): line for line in self.lines.values() if not line.failure}
        for end, line in by_end.items():
            found.register(end, select.POLLIN | (select.POLLOUT if line.leaving else 0))
        for end, _ in found.poll(max(1, int(1e3 * min(seconds, 1.0)))):
            with self._lock:
                by_end[end].move()


def open_lines(agreement: Agreement) -> Lines:
    """Connect the ranks inside of hosts, then those of other hosts. Every rank must call it.

    If one rank can't connect to one of a kind, no rank has lines of that kind.
    """
    rank, group = agreement.transport.rank, agreement.transport.group
    hosts = agreement.agree("the hosts of lines", {}, host())
    near = [n for n, other in enumerate(hosts) if n != rank and other == hosts[rank] != ""]
    ends = _ends(agreement, near, _listener, "lines inside of a host")
    if len({*hosts}) > 1 or "" in hosts:
        far = [n for n in range(len(hosts)) if n != rank and n not in near]
        ends |= _ends(agreement, far, _network_listener, "lines between hosts")
    return Lines(ends, lambda: float(group._get_backend(_CPU).options._timeout.total_seconds()))


def _ends(
    agreement: Agreement, peers: list[int], listening: Callable[[], socket.socket | None], label: str
) -> dict[int, socket.socket]:
    """Connect to peers; return the sockets by peer, none if any rank of the group misses one."""
    rank, secret, ends = agreement.transport.rank, secrets.token_hex(16), dict[int, socket.socket]()
    listener = listening() if peers and hasattr(socket, "MSG_DONTWAIT") else None
    name = None if listener is None else listener.getsockname()
    every = agreement.agree(label, {}, [name.decode() if isinstance(name, bytes) else name, secret])
    try:
        with suppress(OSError):
            for peer in (n for n in peers if n < rank and every[n][0]):
                ends[peer] = _called(every[peer][0], secret, rank)
            while listener is not None and len(ends) < len(peers):
                peer, end = _taken(listener, every)
                ends[peer] = end
    finally:
        if listener is not None:
            listener.close()
    done = agreement.agree(f"the end of {label}", {}, sorted(ends) == peers)
    if all(done):
        return ends
    for end in ends.values():
        end.close()
    return {}


def host() -> str:
    """Return what ranks of one host share: the kernel's start and the name space of its network; "" if unknown."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return ""


def _listener() -> socket.socket | None:
    """Return a socket under an abstract name, which leaves no file; None where there is no such thing."""
    with suppress(OSError, AttributeError):
        return _listens(socket.socket(socket.AF_UNIX), f"\0burst-attention-{secrets.token_hex(16)}")
    return None


def _network_listener() -> socket.socket | None:
    """Return a socket at the address that gloo uses: of GLOO_SOCKET_IFNAME, else of this host's name."""
    with suppress(OSError, ImportError):
        if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
            import fcntl  # which Windows has not

            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                named = struct.pack("256s", interface.encode()[:15])
                own = socket.inet_ntoa(fcntl.ioctl(any_socket, _ADDRESS_OF, named)[20:24])
        else:
            own = _address_of_name()
        return _listens(socket.socket(socket.AF_INET), (own, 0))
    return None


def _address_of_name() -> str:
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"  # as gloo takes then


def _listens(listener: socket.socket, address: Any) -> socket.socket:
    try:
        listener.settimeout(OPENING)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _called(theirs: Any, own: str, rank: int) -> socket.socket:
    """Connect to a rank, and say which one calls."""
    end = socket.socket(socket.AF_UNIX if isinstance(theirs, str) else socket.AF_INET)
    end.settimeout(OPENING)
    end.connect(theirs if isinstance(theirs, str) else tuple(theirs))
    _prepare(end)
    end.sendall(f"{own} {rank:8d}".encode())
    end.settimeout(None)
    return end


def _taken(listener: socket.socket, every: list[Any]) -> tuple[int, socket.socket]:
    """Take the next call of a rank of ``every``."""
    while True:
        end, _ = listener.accept()
        with suppress(OSError, ValueError, IndexError):
            end.settimeout(OPENING)
            _prepare(end)
            said = b""
            while len(said) < CALL and (more := end.recv(CALL - len(said))):
                said += more
            secret, number = said.decode().split()
            if secrets.compare_digest(every[int(number)][1], secret):
                end.settimeout(None)
                return int(number), end
        end.close()


def _prepare(end: socket.socket) -> None:
    """Let small messages leave at once; on one host, raise PermissionError where another user has the other end."""
    if end.family == socket.AF_UNIX:
        _check_user(end)
    else:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _check_user(end: socket.socket) -> None:
    """Raise PermissionError where another user holds the other end."""
    found = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if found[1] != os.geteuid():
        raise PermissionError("another user's process")
