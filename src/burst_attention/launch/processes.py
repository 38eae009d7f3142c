"""Exit statuses and parent tracking, shared by all code that starts processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Exit statuses of a rank and of its launcher: EX_IOERR and EX_TEMPFAIL of sysexits.h.
UNSAVED = 74  # the run ended, but some of its checkpoints could not be written
INTERRUPTED = 75  # the run was asked to stop and saved a checkpoint
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have Linux kill this process when its parent ends. A rank blocked in a call would not notice otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
