"""Find the layer with the first non-finite value, and detect loss spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from burst_attention.integrations.hf import token_wise

MOST_LEFT_OUT = 10  # consecutive steps; more are not an accident
SPIKE, REMEMBERED, LEAST_REMEMBERED = 2.0, 50, 10


class NonFiniteLocation(NamedTuple):
    """One rank's first place with non-finite values."""

    order: tuple[int, int]  # over all ranks; the smallest came first
    name: str
    bad: int  # non-finite values there on this rank
    size: int  # values there on this rank


class OutputWatch(ExitStack):
    """A context that checks the outputs of all submodules of ``model`` for non-finite values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.first: NonFiniteLocation | None = None
        self._batch, self.order = -1, dict[str, int]()
        head = getattr(model, "get_output_embeddings", lambda: None)()  # the loss computes it, in chunks
        for name, module in model.named_modules():
            if name and module is not head:
                handle = module.register_forward_hook(self._hook(name))
                self.callback(handle.remove)

    def next_batch(self) -> None:
        """Start the next batch."""
        self._batch += 1
        self.order.clear()

    def _hook(self, name: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            number = self.order.setdefault(name, len(self.order))
            if self.first is None and (counts := _count(_tensors(output)))[0]:
                self.first = NonFiniteLocation((self._batch, number), f"the output of {name}", *counts)

        return token_wise(look)


def first_gradient(model: nn.Module, order: Sequence[str]) -> NonFiniteLocation | None:
    """Find the first non-finite gradient in this rank's shards, in the reverse of the modules' ``order``."""
    numbers = {name: number for number, name in enumerate(order)}

    def used(name: str) -> int:
        """Return when the forward used a parameter; parameters of unwatched modules are the head's, at the end."""
        while name and name not in numbers:
            name = name.rpartition(".")[0]
        return numbers.get(name, len(numbers))

    parameters = sorted(model.named_parameters(), key=lambda each: used(each[0]), reverse=True)
    for number, (name, parameter) in enumerate(parameters):
        if parameter.grad is not None and (counts := _count([parameter.grad]))[0]:
            return NonFiniteLocation((0, number), f"the gradient of {name}", *counts)
    return None


def name_first(places: Sequence[NonFiniteLocation | None]) -> str:
    """Describe the first of all ranks' places, listed by rank; empty if there was no such place."""
    candidates = [(place.order, rank, place) for rank, place in enumerate(places) if place is not None]
    if not candidates:
        return ""
    _, rank, place = min(candidates)
    return f"{place.name} is the first non-finite one, on rank {rank} ({place.bad:,} of {place.size:,} values)"


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list, Mapping)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _count(tensors: Any) -> tuple[int, int]:
    """Return (number of non-finite values, number of values) on this rank."""
    count = size = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            count += int(local.numel() - torch.isfinite(local).sum())
            size += local.numel()
    return count, size


class Spikes:
    """Detects losses of at least SPIKE times the median of the REMEMBERED before, once there are LEAST_REMEMBERED."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=REMEMBERED)

    def multiple(self, loss: float) -> float | None:
        """Record a loss; return its multiple of the running median if it is a spike."""
        if not math.isfinite(loss):
            return None
        judged = len(self._before) >= LEAST_REMEMBERED
        median = statistics.median(self._before) if judged else math.inf
        self._before.append(loss)
        return loss / median if 0 < SPIKE * median <= loss else None
