"""A persistent pool of local ranks: processes in one gloo group."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burst_attention.launch.processes import watch
from burst_attention.testing import WorkerError


class WorkerPool:
    """``world`` processes, each a rank of one gloo group. Use as a context manager, or close it.

    A fork server starts them, so modules named in ``multiprocessing.set_forkserver_preload`` are imported only once.

    Args:
        world: number of ranks.
        threads: torch threads per rank.
        timeout: timeout of the group's operations, in seconds.
        entries: one picklable function per rank. The rank's process calls it first, for example to enter another
            network namespace. It returns the ``init_method`` of the process group. None: use a shared file.

    ValueError: the number of entries is not ``world``.
    """

    def __init__(
        self,
        world: int,
        *,
        threads: int = 1,
        timeout: float = 60.0,
        entries: Sequence[Callable[[], str]] | None = None,
    ) -> None:
        if entries is not None and len(entries) != world:
            raise ValueError(f"{len(entries)} entries for world={world}: give one for each rank, or None")
        self.world = world
        self.broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="burst-pool-")
        context = multiprocessing.get_context("forkserver")
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            entry = entries[rank] if entries is not None else f"file://{Path(self._folder.name) / 'rendezvous'}"
            arguments = (theirs, entry, rank, world, threads, timeout, os.getpid())
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0, patience: float | None = None
    ) -> list[Any]:
        """Call ``function(*arguments)`` on every rank; return the results by rank.

        ``function`` must be importable by name in a new process. After an error the ranks may be out of step. The pool
        can then only be used again if every rank raised.

        WorkerError: a rank raised, died, or did not answer in time. The limit is ``timeout`` seconds, or
            ``patience`` seconds after the first answer.
        """
        if self.broken:
            raise WorkerError("an earlier run of this pool failed or was interrupted; make a new pool")
        pickle.dumps((function, arguments))  # an error here leaves the ranks as they are
        try:
            results, errors, lost = self.gather(function, *arguments, timeout=timeout, patience=patience)
        except BaseException:  # ranks may still run the function, or have sent answers
            self.broken = True
            raise
        if lost or (errors and len(errors) < self.world):
            self.broken = True
        if lost or errors:
            texts = [f"rank {rank}:\n{''.join(traceback.format_exception(e))}" for rank, e in sorted(errors.items())]
            texts += [f"rank {rank}: {what}" for rank, what in sorted(lost.items())]
            raise WorkerError("\n".join(texts), errors)
        return [results[rank] for rank in range(self.world)]

    def gather(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0, patience: float | None = None
    ) -> tuple[dict[int, Any], dict[int, BaseException], dict[int, str]]:
        """Like :meth:`run`, but return (results, exceptions, reasons of lost ranks), each by rank.

        ``patience``: seconds that the other ranks have after the first answer.
        """
        message = pickle.dumps((function, arguments))
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        lost: dict[int, str] = {}
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError as error:
                lost[rank] = f"gone ({error})"
        deadline = time.monotonic() + timeout
        open_pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in lost}
        while open_pipes:
            ready: Any = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for answered in ready:
                rank = open_pipes.pop(answered)
                try:
                    kind, value = answered.recv()
                    (results if kind == "result" else errors)[rank] = value
                    if patience is not None and len(results) + len(errors) == 1:
                        deadline = min(deadline, time.monotonic() + patience)
                except (EOFError, OSError):  # OSError: it died before it had read its message
                    self.processes[rank].join(1.0)
                    lost[rank] = f"died, exit code {self.processes[rank].exitcode}"
        lost.update(dict.fromkeys(open_pipes.values(), "no answer in time"))
        return results, errors, lost

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.2 if self.broken else 5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(
    pipe: Connection,
    entry: str | Callable[[], str],
    rank: int,
    world: int,
    threads: int,
    timeout: float,
    parent: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank immediately and without a traceback
    watch(parent)
    init_method = entry if isinstance(entry, str) else entry()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        except Exception as error:
            pipe.send(("error", _portable(error)))
            continue
        try:
            answer = ("result", function(*arguments))
        except Exception as error:
            answer = ("error", _portable(error))
        try:
            pipe.send(answer)
        except OSError:  # the parent closed the pipe
            break
        except Exception as error:  # a result that can't be pickled
            pipe.send(("error", _portable(error)))
    dist.destroy_process_group()


def _portable(error: BaseException) -> BaseException:
    """Return the exception with its traceback as a note, or a RuntimeError with the text if it can't be pickled."""
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    error.add_note(text)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    return error
