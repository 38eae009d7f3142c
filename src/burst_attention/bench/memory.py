"""The resident memory of this process, and its peak."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_M_MMAP_THRESHOLD = -3
_MMAP_ALWAYS, _MMAP_SELDOM = 64 * 1024, 32 * 1024 * 1024


def resident(field: str = "VmRSS") -> int:
    """Bytes resident now; ``VmHWM``: at the peak."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def peak_during(call: Callable[[], object]) -> int:
    """Most bytes that were resident while ``call`` ran.

    glibc is told to give freed tensors back at once meanwhile, so that the peak is of live ones; it makes the call
    slower, so take no times from it.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_ALWAYS)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    try:
        call()
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_SELDOM)
    return resident("VmHWM")
