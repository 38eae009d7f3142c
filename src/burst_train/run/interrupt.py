"""Requests to stop a run early: a signal, or an approaching deadline."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from burst_attention.launch.processes import INTERRUPTED, KEYBOARD

DEADLINE = 255  # code for the deadline; signal numbers are smaller


class InterruptedRunError(Exception):
    """A run ended at ``reason``'s request after ``step``; ``saved``: its checkpoint, None if that failed."""

    def __init__(self, reason: str, step: int, saved: Path | None) -> None:
        super().__init__(reason, step, saved)
        self.reason, self.step, self.saved = reason, step, saved

    def __str__(self) -> str:
        kept = f"saved to {self.saved}" if self.saved else "progress after the last checkpoint is lost"
        return f"{self.reason} after step {self.step}: {kept}"

    @property
    def status(self) -> int:
        """The exit status: 75 if the run can resume from this step, else 1."""
        return INTERRUPTED if self.saved else 1


class StopRequests:
    """Requests to stop this process, by signals or once ``deadline`` seconds from now are nearly over."""

    def __init__(self, deadline: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._signal = clock, 0
        self.until = None if deadline is None else clock() + deadline

    @contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Note SIGTERM, SIGINT and a launcher's Ctrl-C instead of ending; others' handlers stay. Main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        plain = (signal.SIG_DFL, signal.default_int_handler)
        signals = (signal.SIGTERM, signal.SIGINT, KEYBOARD)
        before = {number: handler for number in signals if (handler := signal.getsignal(number)) in plain}
        for number in before:
            signal.signal(number, self._note)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self._signal = number

    def pending(self, reserve: float) -> int:
        """Return the received signal, :data:`DEADLINE` if fewer than ``reserve`` seconds are left, or 0."""
        if self._signal:
            return self._signal
        return DEADLINE if self.until is not None and self._clock() + reserve >= self.until else 0

    def end_at_once(self) -> None:
        """Let the next Ctrl-C end the process immediately."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def reason_of(number: int) -> str:
    """Return the name of a result of :meth:`StopRequests.pending`."""
    if number in (signal.SIGINT, KEYBOARD):
        return "Ctrl-C"
    return "--deadline" if number == DEADLINE else signal.Signals(number).name
