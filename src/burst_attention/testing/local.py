"""Ranks as threads of one process: the real distributed algorithm, at any world size, on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..comm.local import Exchange, LocalGroup


class WorkerError(RuntimeError):
    """A rank's function raised an exception, or a rank was lost.

    The text contains the tracebacks. ``errors`` maps ranks to their exceptions, where known.
    """

    def __init__(self, text: str, errors: dict[int, BaseException] | None = None) -> None:
        super().__init__(text)
        self.errors = errors or {}


class LocalWorld:
    """Ranks as threads of one process. Use :func:`local_world` to make one."""

    def __init__(self, world: int, timeout: float) -> None:
        self.world, self.timeout = world, timeout

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(group, *arguments)`` on every rank, each in a thread; return the results by rank.

        Pass ``group`` to ``make_plan(..., group=group)``. ``function`` may be any callable, such as a closure. Each
        rank's thread computes its own gradients: torch's backward thread, one per device, could serve one rank only.

        Raises:
            WorkerError: a rank raised an exception. The other ranks then stop waiting for it.
        """
        exchange = Exchange(self.world)
        # A new thread does not inherit the current stream and device of the thread that starts it.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def rank(number: int) -> None:
            on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
            try:
                with torch.autograd.set_multithreading_enabled(False), on_stream:
                    results[number] = function(LocalGroup(exchange, number, self.timeout), *arguments)
            except BaseException as error:
                errors[number] = error
                exchange.fail(number, f"rank {number} raised {type(error).__name__}: {error}")

        threads = [threading.Thread(target=rank, args=(n,), name=f"rank {n}", daemon=True) for n in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            first = next(iter(errors))  # `errors` is in the order in which the ranks raised
            text = "; ".join(f"rank {n}: {type(error).__name__}: {error}" for n, error in sorted(errors.items()))
            raise WorkerError(text, errors) from errors[first]
        return [results[number] for number in range(self.world)]


@contextmanager
def local_world(world: int, *, timeout: float = 60.0) -> Iterator[LocalWorld]:
    """Provide ``world`` ranks as threads of this process.

        with local_world(8) as ranks:
            outs = ranks.run(lambda group: attend(make_plan(seqlen, group=group)))

    Plans, programs, sweep and agreements are the same as between processes. Messages are copies on the device; on CUDA
    they run on a separate stream. The threads share Python's interpreter lock, so CPU timings are not representative.

    Args:
        world: number of ranks.
        timeout: timeout of an exchange in seconds, unless its plan sets one.
    """
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ValueError(f"world={world!r} must be an integer of at least 1")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout} must be a positive number of seconds")
    yield LocalWorld(world, timeout)
