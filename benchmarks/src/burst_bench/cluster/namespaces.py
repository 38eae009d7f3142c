"""Network namespaces of this machine: the tools that make them, how a thread enters one, how they are removed."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")


class ClusterError(RuntimeError):
    """The cluster can't be made or changed on this machine; the text says why and what to do."""


def remove_leftovers() -> list[str]:
    """Remove the namespaces of clusters whose process is dead (SIGKILL can't be caught); return their names."""
    ip, removed = tools()["ip"], []
    for path in NAMESPACES.glob("burst-*-*-*"):
        match = re.match(r"burst-(\d+)-", path.name)
        if match and not _alive(int(match[1])):
            removed += remove(path.name, ip)
    return removed


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def remove(prefix: str, ip: str) -> list[str]:
    """Remove the namespaces whose names start so; the links go with the switch's. Return the names."""
    names = sorted(path.name for path in NAMESPACES.glob(f"{prefix}*"))
    for name in names:
        try:
            call([ip, "netns", "delete", name])
        except ClusterError:
            if (NAMESPACES / name).exists():  # else another process was quicker
                raise
    return names


def tools() -> dict[str, str]:
    """Where ``ip`` and ``tc`` are."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    places = {name: shutil.which(name, path=path) for name in ("ip", "tc")}
    missing = " and ".join(name for name, where in places.items() if where is None)
    if missing:
        raise ClusterError(f"an emulated cluster needs {missing} of iproute2: install it (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise ClusterError(
            "an emulated cluster needs root, to make network namespaces: run as root, or without a cluster"
        )
    return {name: where for name, where in places.items() if where is not None}


def call(command: list[str], text: str | None = None) -> None:
    # In a session of its own: Ctrl-C is for us, who then remove what was made, not for a half-done ip.
    done = subprocess.run(command, input=text, capture_output=True, text=True, start_new_session=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip()
        raise ClusterError(
            f"{' '.join(command)}: {reason}. The kernel must allow network namespaces, veth, bridge and tbf, and the "
            "process must have CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged)"
        )


def enter(namespace: str) -> None:
    """The calling thread, and the threads that it starts from now on, are in this namespace.

    Raises:
        OSError: there is none of that name, or the process isn't root.
    """
    with (NAMESPACES / namespace).open("rb") as file:
        _set_namespace(file.fileno())


def name_host(name: str) -> None:
    """This process has a host name of its own from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    socket.sethostname(name)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """The calling thread is in the namespace for a moment; other threads aren't."""
    with open("/proc/thread-self/ns/net", "rb") as home:
        try:
            enter(namespace)
            yield
        finally:
            _set_namespace(home.fileno())


def interface_bytes(table: str) -> dict[str, tuple[int, int]]:
    """(received, sent) so far by each interface, of the text of a ``/proc/.../net/dev``."""
    lines = (line.partition(":") for line in table.splitlines()[2:])
    return {name.strip(): (int(counts.split()[0]), int(counts.split()[8])) for name, _, counts in lines}


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is Python 3.12's
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """While inside, SIGTERM ends the program as sys.exit does, by way of what is to be cleaned up.

    A handler that the program has set itself is left alone, and only the main thread can set one.
    """

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
