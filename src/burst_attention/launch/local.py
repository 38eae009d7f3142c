"""Local workers through torch's elastic launcher, or the ranks that torchrun started."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape


def started_by_torchrun() -> bool:
    """Whether this process is itself a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def spelled_out(arguments: list[str]) -> list[str]:
    """``--engine`` for ``--engines``: where several can be given, one can."""
    return [
        x.replace("--engine", "--engines", 1) if x == "--engine" or x.startswith("--engine=") else x for x in arguments
    ]


def is_first() -> bool:
    """Whether this process is the one that speaks."""
    return int(os.environ.get("RANK", "0")) == 0


def found_ranks(asked: int | None) -> tuple[int, int]:
    """(all ranks, those on this machine) that torchrun started; ValueError if ``--ranks`` asked for another number."""
    world = int(os.environ["WORLD_SIZE"])
    if asked is not None and asked != world:
        raise ValueError(f"--ranks {asked}, but torchrun started {world} (WORLD_SIZE); leave --ranks out")
    return world, int(os.environ.get("LOCAL_WORLD_SIZE", world))


def refuse(command: str, error: Exception) -> int:
    """Say in one line what can't be; the exit status."""
    if is_first():
        Console(stderr=True, soft_wrap=True).print(f"[bold red]{command}:[/] {escape(str(error))}", highlight=False)
    return 2


def recorded(worker: Callable[..., Any], *arguments: Any) -> None:
    """Run ``worker`` as the rank that this process is, and tell torchrun of what it raises."""
    from torch.distributed.elastic.multiprocessing.errors import record

    record(worker)(*arguments)


def launch(command: str, worker: Callable[..., Any], *arguments: Any, ranks: int) -> int:
    """Run ``worker(*arguments)`` in ``ranks`` processes of this machine and wait for them.

    Args:
        worker: a function of a module; it finds its rank in torchrun's environment variables.

    Returns:
        The exit status: 0; 1 if a worker failed, whose error is shown; 130 after Ctrl-C, 143 after SIGTERM.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Workers that were told to stop and did not are ended after this many seconds.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"burst-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    # What the launcher would log of a failure, _show says better.
    logging.disable(logging.CRITICAL)
    try:
        elastic_launch(config, _worker)(worker, arguments)
    except ChildFailedError as error:
        _show(command, error)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        logging.disable(logging.NOTSET)
        # A worker that was ended in the middle of a progress bar left the cursor hidden.
        Console().show_cursor(True)
    return 0


def _worker(worker: Callable[..., Any], arguments: tuple) -> None:
    # Python's own handler waits for the call at hand, which may be an exchange with a rank that is gone.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    worker(*arguments)


def _show(command: str, failed: Any) -> None:
    """The first failure's traceback and, as the last line, which rank failed of what."""
    rank, failure = failed.get_first_failure()
    told = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    message, trace = f"exit code {failure.exitcode}", ""
    if isinstance(told, dict):
        message, trace = told.get("message", message), told.get("extraInfo", {}).get("py_callstack", "")
    elif failure.exitcode < 0:
        message = f"killed by {signal.Signals(-failure.exitcode).name}"
    sys.stderr.write(trace if trace.endswith("\n") or not trace else trace + "\n")
    Console(stderr=True, soft_wrap=True).print(
        f"[bold red]{command}:[/] rank {rank} failed: {escape(message)}", highlight=False
    )
