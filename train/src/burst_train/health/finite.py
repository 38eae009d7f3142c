"""Numbers that are none, and losses that stand out: which layer was first, looked for only after it happened."""

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

MOST_LEFT_OUT = 10  # steps in a row: then it is no accident
SPIKE, REMEMBERED, LEAST_REMEMBERED = 2.0, 50, 10


class Place(NamedTuple):
    """The first of one rank's numbers that is none.

    Attributes:
        order: of places of all ranks, the least came first.
        name: of it, in words.
        bad, size: how many of the numbers there are none, of how many that this rank holds.
    """

    order: tuple[int, int]
    name: str
    bad: int
    size: int


class OutputWatch(ExitStack):
    """Within it the outputs of a model's parts are looked at, as they come.

    Args:
        model: whose submodules, at any depth, are watched.

    Attributes:
        first: where this rank's first number that is none came, if one did.
        order: of the parts, as they ended first in the latest batch: the same on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.first: Place | None = None
        self._batch, self.order = -1, dict[str, int]()
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(self._hook(name))
                self.callback(handle.remove)

    def next_batch(self) -> None:
        """Say that another batch comes."""
        self._batch += 1
        self.order.clear()

    def _hook(self, name: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            number = self.order.setdefault(name, len(self.order))
            if self.first is None and (found := _count(_tensors(output)))[0]:
                self.first = Place((self._batch, number), f"the output of {name}", *found)

        return token_wise(look)


def first_gradient(model: nn.Module, order: Sequence[str]) -> Place | None:
    """The parameter whose gradient, of those that are no number, the backward came to first, of this rank's shards.

    Gradients are summed over the ranks: the rank is the one that holds the number, not the one that it came from.

    Args:
        order: names of the model's parts, as the forward goes through them.
    """
    numbers = {name: number for number, name in enumerate(order)}

    def used(name: str) -> int:
        """When the forward used a parameter; what no part that was seen holds is the head's, at the end."""
        while name and name not in numbers:
            name = name.rpartition(".")[0]
        return numbers.get(name, len(numbers))

    parameters = sorted(model.named_parameters(), key=lambda each: used(each[0]), reverse=True)
    for number, (name, parameter) in enumerate(parameters):
        if parameter.grad is not None and (found := _count([parameter.grad]))[0]:
            return Place((0, number), f"the gradient of {name}", *found)
    return None


def name_first(places: Sequence[Place | None]) -> str:
    """In words, the first place of all ranks', which are given by rank; empty if there is none."""
    found = [(place.order, rank, place) for rank, place in enumerate(places) if place is not None]
    if not found:
        return ""
    _, rank, place = min(found)
    return f"{place.name} is the first that is not finite, on rank {rank} ({place.bad:,} of {place.size:,} numbers)"


def _tensors(output: Any) -> Iterator[Tensor]:
    """Tensors in what a module returns."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list, Mapping)):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(each)


def _count(tensors: Any) -> tuple[int, int]:
    """(how many numbers are not finite, of how many on this rank)."""
    count = size = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            count += int(local.numel() - torch.isfinite(local).sum())
            size += local.numel()
    return count, size


class Spikes:
    """Tells a loss that stands out: at least :data:`SPIKE` times the median of the :data:`REMEMBERED` before it.

    The first :data:`LEAST_REMEMBERED` losses are not judged; those that are no number are not remembered.
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=REMEMBERED)

    def multiple(self, loss: float) -> float | None:
        """How many times the running median a loss is, if it stands out; it is remembered."""
        if not math.isfinite(loss):
            return None
        judged = len(self._before) >= LEAST_REMEMBERED
        median = statistics.median(self._before) if judged else math.inf
        self._before.append(loss)
        return loss / median if 0 < SPIKE * median <= loss else None
