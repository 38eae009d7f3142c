"""Read training sequences ahead in a background thread."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from .sequences import Cursor, TokenSequence, TrainingStream


class ReadAhead:
    """A stream's sequences, at most ``most`` read ahead. The cursor is that of the last sequence taken, not read."""

    def __init__(self, stream: TrainingStream, most: int) -> None:
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
        """Return the next sequence; raise the thread's error here if reading failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure or self._closed)
            if not self._ready:
                raise self._failure or ValueError("the sequences can't be read: ReadAhead was closed")
            sequence, self._place = self._ready.popleft()
            self._changed.notify()
        return sequence

    def coming(self, count: int) -> list[TokenSequence]:
        """Return up to ``count`` sequences that are read and not taken yet."""
        with self._changed:
            return [sequence for sequence, _ in itertools.islice(self._ready, count)]

    @property
    def epoch_tokens(self) -> int | None:
        """Tokens of an epoch; None until a whole one was read."""
        return self._stream.epoch_tokens

    def cursor(self) -> Cursor:
        """Return the cursor after the last sequence taken: a stream started there continues with the next one."""
        if self._place is None:
            raise ValueError("the stream has no cursor yet; take a sequence first")
        return self._place()

    def close(self) -> None:
        """Stop reading; the cursor stays valid."""
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
        except BaseException as error:  # any error: it is raised again in the training thread
            with self._changed:
                self._failure = error
                self._changed.notify()
