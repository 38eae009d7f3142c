"""Run a command on local workers that we start, or on the ranks that torchrun started."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from .processes import ENDING, INTERRUPTED, KEYBOARD, UNSAVED, end_with, watch

GRACE = 1.5  # seconds that ranks have to exit after a failure, and again after SIGTERM


def started_by_torchrun() -> bool:
    """Return whether this process is a rank that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class RefusedError(ValueError):
    """An expected failure. Its message says what is wrong and what to do, so no traceback is shown."""


def is_expected(error: BaseException) -> bool:
    """Return whether an error needs no traceback: refusals, non-finite losses, classes with ``expected = True``."""
    return isinstance(error, (RefusedError, FloatingPointError)) or getattr(error, "expected", False)


def is_rank_0() -> bool:
    """Return whether this process prints messages: rank 0, or a process without a rank."""
    return int(os.environ.get("RANK", "0")) == 0


def torchrun_ranks(ranks: int | None) -> tuple[int, int] | None:
    """Return (all ranks, ranks here) of torchrun's job, None without; ValueError for another ``--ranks``."""
    if not started_by_torchrun():
        return None
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise ValueError(
            f"RANK and WORLD_SIZE are set, but {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not; start "
            "the command with torchrun, or unset RANK and WORLD_SIZE to have it start its own workers"
        )
    world = int(os.environ["WORLD_SIZE"])
    if ranks is not None and ranks != world:
        raise ValueError(f"--ranks {ranks}, but torchrun started {world} (WORLD_SIZE); leave --ranks out")
    return world, int(os.environ.get("LOCAL_WORLD_SIZE", world))


def print_error(command: str, error: Exception) -> int:
    """Print the error in one line and return the exit status, 2."""
    if is_rank_0():
        Console(stderr=True, soft_wrap=True).print(f"[bold red]{command}:[/] {escape(str(error))}", highlight=False)
    return 2


def prepare(*modules: str) -> None:
    """Begin to import ``modules`` and a model of transformers in a process that ranks are forked from.

    A rank then starts in 0.2 s where its imports take 5 s. GPUs' ranks are spawned: CUDA doesn't survive a fork.
    """
    if started_by_torchrun() or not _forks():
        return
    if modules:
        multiprocessing.set_forkserver_preload([*modules, "transformers.models.llama.modeling_llama"])
    # A signal to the whole group must not end the server before its ranks have saved. They inherit the blocked signals,
    # and get them once they can handle them.
    with _blocked():
        multiprocessing.forkserver.ensure_running()


@contextmanager
def _blocked() -> Iterator[None]:
    """Block signals that end processes, for processes that start within this context. They come when it ends."""
    resource_tracker.ensure_running()  # processes need it, and starting it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forks() -> bool:
    import torch

    return not torch.cuda.is_available()


def start(command: str, worker: Callable[[Any], Any], argument: Any, *, ranks: int, patient: bool = False) -> int:
    """Run ``worker`` in this process and report errors to torchrun; without torchrun, call :func:`launch`."""
    if not started_by_torchrun():
        return launch(command, worker, argument, ranks=ranks, patient=patient)
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(worker)(argument)
    except Exception as error:
        if not is_expected(error):
            raise
        print_error(command, error)
        return 1
    return 0


def start_checked(command: str, worker: Callable[[Any], Any], settings: Any) -> int:
    """Run ``settings.check()``, then ``worker(settings)`` on torchrun's ranks or ours; status 2 if it raises."""
    from .join import default_ranks

    prepare(getattr(worker, "__module__", __name__))
    try:
        settings.check()
        running = torchrun_ranks(settings.ranks)
    except ValueError as error:
        return print_error(command, error)
    ranks = running[0] if running else settings.ranks or default_ranks(settings.device)
    return start(command, worker, settings, ranks=ranks)


def launch(command: str, worker: Callable[..., Any], *arguments: Any, ranks: int, patient: bool = False) -> int:
    """Run ``worker(*arguments)`` in ``ranks`` processes of this machine and wait for them; return the exit status.

    After the first failure, the others have :data:`GRACE` seconds to exit, then the same again after SIGTERM, then
    SIGKILL. ``patient``: the first Ctrl-C or SIGTERM is forwarded to the ranks, which may finish. The status is 0; 1 if
    a worker failed; 130 after Ctrl-C; 143 after SIGTERM; 74 or 75 if ranks exited with it.
    """
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    prepare()
    forked, spawned = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
    make: Callable[..., BaseProcess] = forked.Process if _forks() else spawned.Process
    processes: list[BaseProcess] = []
    forwarded: list[int] = []

    def pass_on(number: int) -> None:
        """Tell the ranks that still run: by SIGTERM, or by :data:`KEYBOARD` for Ctrl-C."""
        forwarded.append(number)
        for process in processes:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, KEYBOARD if number == signal.SIGINT else signal.SIGTERM)

    with (
        tempfile.TemporaryDirectory(prefix="burst-ranks-") as folder,
        _signals_raised(first=pass_on if patient else None),
    ):
        try:
            for rank in range(ranks):
                environment = dict(os.environ) | _torchrun_variables(rank, ranks, store.port)
                setup = environment, Path(folder), os.getpid(), worker, arguments, patient
                with _blocked():
                    processes.append(make(target=_worker, args=setup, name=f"rank {rank}"))
                    processes[-1].start()
            failures = _wait_for_all(processes, Path(folder))
            if not failures:
                return max(process.exitcode or 0 for process in processes)
            if forwarded and all(failure.exitcode in (-signal.SIGTERM, -KEYBOARD) for failure in failures.values()):
                return 128 + forwarded[0]  # the signal came before the ranks had anything to save
            killed = _end(processes, failures, Path(folder))
            _show(command, min(failures.values(), key=Failure.order), killed)
            return 1
        except _Signalled as signalled:
            return 128 + signalled.number
        finally:
            _end(processes, {}, Path(folder), patience=0.0)
            # A worker that ended during a progress bar leaves the cursor hidden.
            Console().show_cursor(True)


class _Signalled(BaseException):
    """This process received a signal to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _signals_raised(*, first: Callable[[int], None] | None) -> Iterator[None]:
    """Raise fatal signals as :class:`_Signalled`, so that ranks end first. ``first`` gets the first one instead."""
    asked_to_stop = False

    def raise_signal(number: int, _: object) -> None:
        """Pass the first signal to ``first``; without ``first``, raise it."""
        nonlocal asked_to_stop
        if first and number in (signal.SIGINT, signal.SIGTERM):
            if not asked_to_stop:
                asked_to_stop = True
                first(number)
                return
            if number == signal.SIGTERM:
                return
        for other in before:  # a repeated signal must not interrupt ending the ranks
            signal.signal(other, signal.SIG_IGN)
        raise _Signalled(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    plain = (signal.SIG_DFL, signal.default_int_handler)  # keep signals that nohup set to be ignored
    before = {number: handler for number in signals if (handler := signal.getsignal(number)) in plain}
    for number in before:
        signal.signal(number, raise_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Failure:
    """How and when a rank failed; ``seconds`` is wall-clock time."""

    rank: int
    exitcode: int
    seconds: float
    message: str = ""
    trace: str = ""

    @classmethod
    def of(cls, rank: int, exitcode: int, folder: Path) -> Failure:
        """Read the rank's report, or describe its exit code."""
        report = folder / str(rank)
        if exitcode > 0 and report.exists():
            return cls(rank, exitcode, **json.loads(report.read_text("utf-8")))
        message = f"exit code {exitcode}" if exitcode > 0 else f"killed by {signal.Signals(-exitcode).name}"
        message += ", which the system sends when memory runs out" if exitcode == -signal.SIGKILL else ""
        return cls(rank, exitcode, time.time(), message)

    def order(self) -> tuple[bool, float]:
        """Sort key that puts the likely root cause first: killed ranks, then the earliest exception."""
        return self.exitcode > 0, self.seconds


def _wait_for_all(processes: Sequence[BaseProcess], folder: Path) -> dict[int, Failure]:
    """Wait until all ranks succeeded or some failed; return the failures by rank."""
    waiting = {process.sentinel: rank for rank, process in enumerate(processes)}
    failures: dict[int, Failure] = {}
    while waiting and not failures:
        for sentinel in wait(list(waiting)):
            rank = waiting.pop(sentinel)  # type: ignore[arg-type]  # a number here, as in `waiting`
            processes[rank].join()
            if (code := processes[rank].exitcode) and code not in (INTERRUPTED, UNSAVED):
                failures[rank] = Failure.of(rank, code, folder)
    return failures


def _end(
    processes: Sequence[BaseProcess], failures: dict[int, Failure], folder: Path, *, patience: float = GRACE
) -> list[int]:
    """End the running ranks; return those that had to be killed. Add ranks that fail meanwhile to ``failures``."""
    _join(processes, patience)
    for rank, process in enumerate(processes):
        if process.exitcode and rank not in failures:
            failures[rank] = Failure.of(rank, process.exitcode, folder)
        elif process.is_alive():
            process.terminate()
    _join(processes, GRACE)
    killed = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in killed:
        processes[rank].kill()
    _join(processes, GRACE)  # a process in an uninterruptible system call may survive SIGKILL: leave it
    return killed


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        if process.is_alive():
            process.join(max(0.0, deadline - time.monotonic()))


def _torchrun_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return a rank's environment. The launcher hosts the rendezvous store, as torchrun's agent does."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    texts = {name: str(number) for name, number in numbers.items()}
    return {**texts, "MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _worker(
    environment: dict[str, str],
    folder: Path,
    parent: int,
    worker: Callable[..., Any],
    arguments: tuple,
    patient: bool,
) -> None:
    """Run one rank in its environment; write its error to a file in ``folder``."""
    # Python's own handler waits for the running call, which may be an exchange with a dead rank. A terminal sends
    # Ctrl-C to all processes; a patient launcher forwards it, so its ranks ignore SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_IGN if patient else signal.SIG_DFL)
    if os.getppid() == parent:
        end_with(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    else:
        watch(parent)
    os.environ.clear()
    os.environ |= environment
    try:
        worker(*arguments)
    except Exception as error:
        report = {
            "message": f"{error}" if is_expected(error) else f"{type(error).__name__}: {error}",
            "trace": "" if is_expected(error) else traceback.format_exc(),
            "seconds": time.time(),
        }
        (folder / environment["RANK"]).write_text(json.dumps(report), "utf-8")
        _leave(1)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
        _leave(ended.code if isinstance(ended.code, int) else int(ended.code is not None))


def _leave(status: int) -> NoReturn:
    """Exit without cleanup: a process group that waits for a peer would block or abort a normal exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _show(command: str, failure: Failure, killed: Sequence[int]) -> None:
    """Print the first failure's traceback and, as the last line, the rank and its error."""
    sys.stderr.write(failure.trace)
    names = f"rank{'s' * (len(killed) > 1)} {', '.join(map(str, killed))}"
    stuck = f"; {names} did not end after SIGTERM (stopped or hung)" if killed else ""
    Console(stderr=True, soft_wrap=True).print(
        f"[bold red]{command}:[/] rank {failure.rank} failed: {escape(failure.message)}{stuck}", highlight=False
    )
