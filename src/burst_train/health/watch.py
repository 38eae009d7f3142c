"""A watch for slow steps: each rank reports its phase, and rank 0 the stragglers. It does not end the run."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.profiler import ProfilerActivity, profile

from ..run.metrics import TRACES

Phase = Literal["data", "forward", "backward", "optimizer", "evaluation", "saving"]
PATIENCE = 5.0  # seconds that rank 0 waits for reports of other ranks
POLL = 0.1


class Where(NamedTuple):
    """Position of a rank: the step, the number of phases entered, and the current phase."""

    step: int
    entered: int
    phase: str


class StepWatch:
    """Watches one rank's steps. A thread reports one that takes longer than ``timeout`` seconds (None: no watch).

    Ranks exchange reports through the job's store, because they may be stuck in a collective.
    """

    def __init__(
        self,
        timeout: float | None,
        *,
        rank: int,
        world: int,
        tell: Callable[[str], object] = lambda text: sys.stderr.write(f"burst train: {text}\n"),
        store: Any = None,
    ) -> None:
        self._timeout, self._rank, self._world, self._tell = timeout, rank, world, tell
        self._store = store
        self._where, self._since, self._began, self._due = Where(0, 0, "data"), 0.0, 0.0, math.inf
        self._changed, self._closed = threading.Condition(), False
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Start a step, in its data phase."""
        if self._timeout is None:
            return
        if self._thread is None:
            if self._world > 1 and self._store is None:
                # Clone the store, so that waiting on it does not block the training thread's connection.
                store: Any = _get_default_store()
                self._store = store.clone()
            self._thread = threading.Thread(target=self._watch, name="step watch", daemon=True)
            self._thread.start()
        with self._changed:
            self._where, self._began = Where(step, 1, "data"), time.monotonic()
            self._since, self._due = self._began, self._began + self._timeout
            self._changed.notify()

    def enter(self, phase: Phase) -> None:
        """Enter another phase of the step."""
        if self._thread is not None:
            with self._changed:
                self._where = Where(self._where.step, self._where.entered + 1, phase)
                self._since = time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._due - time.monotonic()) > 0:
                    self._changed.wait(None if left == math.inf else left)
                if self._closed:
                    return
                where, now, self._due = self._where, time.monotonic(), math.inf  # report each step only once
                text = (
                    f"rank {self._rank}: step {where.step} has taken {now - self._began:,.1f} s, more than "
                    f"--step-timeout {self._timeout:g}; "
                    f"it has been in its {where.phase} phase for {now - self._since:,.1f} s"
                )
            self._tell(text)
            if self._world > 1:
                self._exchange(where)

    def _exchange(self, where: Where) -> None:
        """Publish this rank's position; rank 0 also reports the stragglers."""
        try:
            self._store.set(_key(where.step, self._rank), json.dumps(where))
            if self._rank == 0:
                self._tell(who_is_behind(where.step, self._hear(where.step), self._world))
        except (dist.DistError, RuntimeError) as error:  # the process that holds the store has ended
            self._tell(f"rank {self._rank}: the straggler is unknown: {error}")

    def _hear(self, step: int) -> dict[int, Where]:
        """Return the ranks' positions that arrive in time, by rank."""
        heard: dict[int, Where] = {}
        until = time.monotonic() + PATIENCE
        while len(heard) < self._world and time.monotonic() < until:
            for rank in range(self._world):
                if rank not in heard and self._store.check([_key(step, rank)]):
                    heard[rank] = Where(*json.loads(self._store.get(_key(step, rank))))
            if len(heard) < self._world:
                time.sleep(POLL)
        return heard


def _key(step: int, rank: int) -> str:
    return f"burst train/step {step}/rank {rank}"


def who_is_behind(step: int, heard: Mapping[int, Where], world: int) -> str:
    """Describe the stragglers. A rank without a report is stuck, stopped or gone."""
    silent = [rank for rank in range(world) if rank not in heard]
    places = sorted(set(heard.values()))
    clauses = [f"no report from {_ranks(silent)}"] if silent else []
    if len(places) == 1:
        clauses.append(f"{'all reporting ranks' if silent else 'all ranks'} are in their {places[0].phase} phase")
    else:
        last = [rank for rank, where in sorted(heard.items()) if where == places[0]]
        clauses.append(
            f"behind: {_ranks(last)}, in the {places[0].phase} phase; others are in the {places[-1].phase} phase"
        )
    return f"step {step}: {'; '.join(clauses)}"


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


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
