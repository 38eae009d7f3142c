"""Trace of one step's operations, for Chrome and Perfetto."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ..run.metrics import TRACES


@contextmanager
def traced(out: str, step: int, rank: int) -> Iterator[None]:
    """Record a trace of this process, including its GPU, and write it. A failure is only reported."""
    path = Path(out) / TRACES / f"step-{step:08d}-rank-{rank:05d}.json"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        yield
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w"):  # raises if it can't be written, which the profiler would only log
            pass
        profiler.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"burst train: the trace {path} could not be written: {error}\n")
