"""Measure this process's resident memory and its peak."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_M_MMAP_THRESHOLD = -3
_MMAP_ALWAYS, _MMAP_SELDOM = 64 * 1024, 32 * 1024 * 1024


def resident(field: str = "VmRSS") -> int:
    """Return the resident bytes; with ``VmHWM``, those at the peak."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def give_back() -> None:
    """Collect reference cycles, and let glibc return free memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def peak_during(call: Callable[[], T]) -> tuple[T, int]:
    """Return (result of ``call``, the most bytes that were resident while it ran).

    During the call, glibc returns freed tensors to the system immediately, so that the peak counts live tensors. That
    makes the call slower: don't time it. Before the first such call glibc keeps freed memory and reuses it for the
    call's tensors. So run earlier work, such as a first step, within this function, too.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_ALWAYS)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    try:
        result = call()
        return result, resident("VmHWM")
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_SELDOM)
