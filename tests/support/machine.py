"""The speed of this machine, so that a limit on seconds means the same on a slower one."""

from __future__ import annotations

import time

import numpy as np

ROUNDS = 9


def unit_seconds() -> float:
    """Return the seconds of a fixed mixture of Python and small numpy calls, the fastest of several."""
    return min(_once() for _ in range(ROUNDS))


def _once() -> float:
    started, found = time.process_time(), {}
    for n in range(10_000):
        found[n % 97] = (n, n + 1)
    for n in range(500):
        array = np.arange(n % 61, 200)
        np.maximum(array[::2], 3).cumsum()
    return time.process_time() - started
