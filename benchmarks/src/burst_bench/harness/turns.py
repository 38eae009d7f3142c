"""The loop of every comparison: calls take turns, and ratios compare calls of the same round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def take_turns(calls: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """Run the calls in turns; return each call's results, one per round.

    Each round starts with a different call, so that the pause between rounds affects all calls equally.
    """
    given: list[list[T]] = [[] for _ in calls]
    for n in range(rounds):
        for turn in range(len(calls)):
            at = (n + turn) % len(calls)
            given[at].append(calls[at]())
    return given


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds of one call on this rank. All ranks must call it; they start together."""
    if dist.is_initialized():
        dist.barrier()
    _synchronize()
    started = time.perf_counter()
    call()
    _synchronize()
    return time.perf_counter() - started


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return theirs / mine for each round. Rounds are paired because the machine's speed drifts."""
    return [b / a for a, b in zip(mine, theirs, strict=True)]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
