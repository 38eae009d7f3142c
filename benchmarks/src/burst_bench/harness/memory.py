"""The resident memory of this process and its peak, and that of its tensors alone."""

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
    """Bytes resident now; ``VmHWM``: at the peak."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def give_back() -> None:
    """Collect what is in cycles and let glibc return what is free to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def peak_during(call: Callable[[], T]) -> tuple[T, int]:
    """(what ``call`` gave, the most bytes that were resident while it ran).

    glibc is told to give freed tensors back at once meanwhile, so that the peak is of live ones; it makes the call
    slower, so take no times from it. Before the first of these it keeps what is free, and gives pieces of that to the
    call's tensors: let what comes before, such as a first step, run within one, too.
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
    """(what ``call`` gave, the most bytes of tensors that it made which were there at once).

    Counted by torch's own allocator for the CPU, so tensors within its operators are in it, and neither rounding to
    pages, nor what is free, nor anything that is no tensor. What another thread sets free, as gloo's do, is noticed
    when its place is taken again: of several ranks it may be too much, by messages.
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
