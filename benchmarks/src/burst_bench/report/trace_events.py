"""Write timelines as trace events, the JSON format of Chrome's tracing and https://ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..harness.results import Row

COMPUTING, EXCHANGING = 0, 1  # thread ids of a rank in the viewer


def trace_events(row: Row) -> Iterator[dict[str, Any]]:
    """Yield trace events, with a process for each rank.

    One thread shows compute and waits; the other shows exchanges, which may overlap.
    """
    for rank, spans in enumerate(row.timeline):
        yield _name("process_name", f"rank {rank}", rank, COMPUTING)
        yield _name("thread_name", "compute and wait", rank, COMPUTING)
        yield _name("thread_name", "exchange", rank, EXCHANGING)
        for number, span in enumerate(spans):
            event = {"name": span.label or span.kind, "cat": span.kind, "pid": rank}
            start, end = 1e6 * span.start, 1e6 * span.end  # microseconds
            if span.kind == "exchange":
                event |= {"tid": EXCHANGING, "id": f"{rank}.{number}"}
                yield event | {"ph": "b", "ts": start}
                yield event | {"ph": "e", "ts": end}
            else:
                yield event | {"ph": "X", "ts": start, "dur": end - start, "tid": COMPUTING}


def _name(what: str, name: str, rank: int, thread: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
