"""What processes that start others have in common."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Exit statuses of a rank and of its launcher, as sysexits.h has EX_IOERR and EX_TEMPFAIL.
UNSAVED = 74  # a run came to its end, and checkpoints that it should hold could not be written
INTERRUPTED = 75  # it was asked to stop, and saved what it had
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have Linux kill this process when its parent is gone: a rank in the middle of a call would not notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
