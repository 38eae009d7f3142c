"""Create, enter and remove network namespaces of this machine."""

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
    """The cluster can't be created or changed; the message says why and what to do."""


def remove_leftovers() -> list[str]:
    """Remove namespaces left by dead processes and return their names.

    A process that ends by SIGKILL can't remove its namespaces itself.
    """
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
    """Remove the namespaces whose names start with ``prefix`` and return their names.

    The links disappear with the namespace of the switch.
    """
    names = sorted(path.name for path in NAMESPACES.glob(f"{prefix}*"))
    for name in names:
        try:
            call([ip, "netns", "delete", name])
        except ClusterError:
            if (NAMESPACES / name).exists():  # otherwise another process removed it first
                raise
    return names


def tools() -> dict[str, str]:
    """Return the paths of ``ip`` and ``tc``.

    ClusterError: A tool is missing, or the process isn't root.
    """
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    places = {name: shutil.which(name, path=path) for name in ("ip", "tc")}
    missing = " and ".join(name for name, where in places.items() if where is None)
    if missing:
        raise ClusterError(f"an emulated cluster needs {missing} of iproute2; install it (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise ClusterError(
            "an emulated cluster needs root to create network namespaces; run as root, or without a cluster"
        )
    return {name: where for name, where in places.items() if where is not None}


def call(command: list[str], text: str | None = None) -> None:
    # A new session: Ctrl-C must reach this process, which cleans up, and not interrupt a running ip.
    done = subprocess.run(command, input=text, capture_output=True, text=True, start_new_session=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip()
        raise ClusterError(
            f"{' '.join(command)}: {reason}. The kernel must support network namespaces, veth, bridge and tbf. The "
            "process needs CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged)"
        )


def enter(namespace: str) -> None:
    """Move the calling thread, and threads that it starts later, into a namespace.

    OSError: No namespace has this name, or the process isn't root.
    """
    with (NAMESPACES / namespace).open("rb") as file:
        _set_namespace(file.fileno())


def name_host(name: str) -> None:
    """Set a host name that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    socket.sethostname(name)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Run the block with the calling thread in the namespace; other threads stay outside."""
    with open("/proc/thread-self/ns/net", "rb") as home:
        try:
            enter(namespace)
            yield
        finally:
            _set_namespace(home.fileno())


def interface_bytes(table: str) -> dict[str, tuple[int, int]]:
    """Return the bytes (received, sent) of each interface, from the text of ``/proc/.../net/dev``."""
    lines = (line.partition(":") for line in table.splitlines()[2:])
    return {name.strip(): (int(counts.split()[0]), int(counts.split()[8])) for name, _, counts in lines}


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into ``sys.exit`` within the block, so that cleanup code runs.

    A handler set by the program stays. Only the main thread can set a handler; in other threads this does nothing.
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
