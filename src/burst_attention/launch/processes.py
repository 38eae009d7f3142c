"""Exit statuses and parent tracking, shared by all code that starts processes."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

# Exit statuses of a rank and of its launcher: EX_IOERR and EX_TEMPFAIL of sysexits.h.
UNSAVED = 74  # the run ended, but some of its checkpoints could not be written
INTERRUPTED = 75  # the run was asked to stop and saved a checkpoint
KEYBOARD = signal.SIGUSR2  # what a patient launcher sends to its ranks for Ctrl-C
# Blocked while ranks and their fork server start, until they can handle them.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have Linux kill this process when its parent ends. A rank blocked in a call would not notice otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def watch(process: int) -> None:
    """Kill this process when ``process`` ends, by a thread; unblock the signals that a fork server blocks."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    if sys.platform != "linux":
        return
    descriptor = os.pidfd_open(process)

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
