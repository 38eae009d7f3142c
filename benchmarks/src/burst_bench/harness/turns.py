"""The one loop of every comparison: calls take turns, round by round, and are compared within a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def take_turns(calls: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """What each of ``calls`` gave in each round.

    A round begins with another than the last, so none is always the one that runs after a pause.
    """
    given: list[list[T]] = [[] for _ in calls]
    for n in range(rounds):
        for turn in range(len(calls)):
            at = (n + turn) % len(calls)
            given[at].append(calls[at]())
    return given


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call, on this rank; where there are several ranks all must call it, and begin together."""
    if dist.is_initialized():
        dist.barrier()
    _synchronize()
    started = time.perf_counter()
    call()
    _synchronize()
    return time.perf_counter() - started


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """By round: how many times as long theirs took. Rounds are paired, for the machine's speed drifts."""
    return [b / a for a, b in zip(mine, theirs, strict=True)]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
