"""Measure this process's resident memory, its peak, and the memory of tensors alone."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

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


def allocated_during(call: Callable[[], T]) -> tuple[T, int]:
    """Return (result of ``call``, the most bytes of tensors made by it that existed at the same time).

    torch's CPU allocator counts them. So tensors within operators are included; rounding to pages, free memory and
    everything except tensors is not. Memory that another thread frees, as gloo's threads do, counts until its address
    is allocated again. With several ranks the result may therefore be too high, by the size of messages.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    found, events = [*recorded.profiler.kineto_results.experimental_event_tree()], []
    while found:
        event = found.pop()
        found += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            events.append(event)
    live: dict[int, int] = {}
    now = most = 0
    for event in sorted(events, key=lambda each: each.start_time_ns):
        place, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        now += max(size, 0) - live.pop(place, 0)
        if size > 0:
            live[place] = size
        most = max(most, now)
    return result, most
