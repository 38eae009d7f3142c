"""Processes of a command: which it started, and whether they still run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def workers_of(pid):
    """The ranks of a launcher, in their order: its fork server's children."""
    servers = [child for child in _children(pid) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [int(child) for server in servers for child in _children(server)]


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def files_in_use(folder):
    """How many files of the folder a process has open, deleted ones included."""
    found = 0
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found += os.readlink(link).startswith(f"{folder}/")
    return found
