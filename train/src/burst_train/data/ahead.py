"""Sequences read by a thread of their own while the ranks train, a few ahead of what is trained on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .cursor import Cursor
from .sequences import TokenSequence


class Stream(Protocol):
    """What is read: :class:`burst_train.data.sequences.TrainingStream`."""

    def __next__(self) -> TokenSequence: ...

    def place(self) -> Callable[[], Cursor]: ...


class ReadAhead:
    """The same sequences, whose cursor is where the latest one that was taken left the stream, and not the reading.

    Args:
        stream: from here on it is the thread's.
        most: sequences that wait to be taken.
    """

    def __init__(self, stream: Stream, most: int) -> None:
        self._stream, self._most = stream, most
        self._place: Callable[[], Cursor] | None = None
        self._ready: deque[tuple[TokenSequence, Callable[[], Cursor]]] = deque()
        self._failure: BaseException | None = None
        self._closed, self._changed = False, threading.Condition()
        self._thread = threading.Thread(target=self._read, name="read ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> TokenSequence:
        """The next sequence; what kept the thread from reading it is raised here."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure or self._closed)
            if not self._ready:
                raise self._failure or ValueError("these sequences are read no further: they were closed")
            sequence, self._place = self._ready.popleft()
            self._changed.notify()
        return sequence

    def cursor(self) -> Cursor:
        """What comes next is what a stream that starts there gives first."""
        if self._place is None:
            raise ValueError("a stream has no place before its first sequence was taken")
        return self._place()

    def close(self) -> None:
        """Read no further; the cursor stays."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._most or self._closed)
                    if self._closed:
                        return
                read = next(self._stream), self._stream.place()
                with self._changed:
                    self._ready.append(read)
                    self._changed.notify()
        except BaseException as error:  # of any kind: it is raised in the thread that trains
            with self._changed:
                self._failure = error
                self._changed.notify()
