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

    if not ours:
        return cli.main()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _repeat
    try:
        return cli.main()
    finally:
        signal.signal(signal.SIGINT, _leave)  # Python's own clean-up follows


def _repeat(dropped: sys.UnraisableHookArgs) -> None:
    """Interrupt again where Python dropped a KeyboardInterrupt: in a finalizer or a weak reference's callback."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        from threading import Timer, main_thread

        # After this hook, whose exceptions Python drops too. A real signal also ends a wait of the main thread.
        Timer(0.01, signal.pthread_kill, (main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)


def _leave(*_: object) -> None:
    sys.stderr.write("burst: interrupted\n")
    sys.stderr.flush()
    os._exit(STATUS)
