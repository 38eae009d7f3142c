"""What one step does, operation by operation, as a trace that Chrome and Perfetto show."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ..run.metrics import TRACES


def trace_name(step: int, rank: int) -> str:
    """The trace of one rank's step, in the run's folder."""
    return f"{TRACES}/step-{step:08d}-rank-{rank:05d}.json"


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Record what this process does within it, on its GPU too, and write it down; that this fails is only told."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        yield
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w"):  # the profiler itself only logs what keeps it from writing
            pass
        profiler.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"burst train: the trace {path} could not be written: {error}\n")
