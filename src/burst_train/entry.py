"""The entry point of ``burst``, which Ctrl-C ends in one line even while torch is imported.

``burst_attention`` imports torch, so this module is outside of it.
"""

from __future__ import annotations

import _signal as signal  # built in: on a busy machine a Ctrl-C finds time within the import of ``signal``
import os
import sys

STATUS = 128 + signal.SIGINT


def main() -> int:
    """Import the commands and run one."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:  # an exception inside of an import could become another error
        signal.signal(signal.SIGINT, _leave)
    from burst_attention import cli

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


def _leave(*_: object) -> None:
    sys.stderr.write("burst: interrupted\n")
    sys.stderr.flush()
    os._exit(STATUS)
