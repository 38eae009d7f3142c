"""What asks a run to stop before its last step: a signal, or a deadline that comes near."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from burst_attention.launch.processes import INTERRUPTED

DEADLINE = 255  # stands for it where the numbers of signals, all smaller, are told


class InterruptedRunError(Exception):
    """A run ended before its last step because it was asked to.

    Attributes:
        reason: what asked: ``SIGTERM``, ``SIGINT`` or ``--deadline``.
        step: the last one that was finished.
        saved: the checkpoint after it; None if it could not be written.
    """

    def __init__(self, reason: str, step: int, saved: Path | None) -> None:
        super().__init__(reason, step, saved)
        self.reason, self.step, self.saved = reason, step, saved

    def __str__(self) -> str:
        kept = f"saved to {self.saved}" if self.saved else "what came after the last checkpoint is lost"
        return f"{self.reason} after step {self.step}: {kept}"

    @property
    def status(self) -> int:
        """The exit status: 75 if the run can go on from where it was, else 1."""
        return INTERRUPTED if self.saved else 1


class StopRequests:
    """Whether this process was asked to stop, by its own clock and the signals that it got.

    Args:
        deadline: seconds from now after which all must be over; None: never.
        clock: gives seconds, and never goes back.
    """

    def __init__(self, deadline: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._signal = clock, 0
        self._until = None if deadline is None else clock() + deadline

    @property
    def has_deadline(self) -> bool:
        return self._until is not None

    @contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Within it SIGTERM and SIGINT are noted, where they would end the process; SIGINT's ignorer stays.

        Python takes handlers in a process's first thread alone: in another one it listens to nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        plain = (signal.SIG_DFL, signal.default_int_handler)
        asked = (signal.SIGTERM, signal.SIGINT)
        before = {number: handler for number in asked if (handler := signal.getsignal(number)) in plain}
        for number in before:
            signal.signal(number, self._note)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self._signal = number

    def asked(self, reserve: float) -> int:
        """The signal that came, :data:`DEADLINE` if fewer than ``reserve`` seconds are left, or 0."""
        if self._signal:
            return self._signal
        return DEADLINE if self._until is not None and self._clock() + reserve >= self._until else 0

    def end_at_once(self) -> None:
        """From here on another Ctrl-C ends the process, whatever it is at."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def reason_of(number: int) -> str:
    """In words what :meth:`StopRequests.asked` gave."""
    return "--deadline" if number == DEADLINE else signal.Signals(number).name
