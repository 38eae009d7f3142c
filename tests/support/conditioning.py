"""Tolerances from a case's own conditioning: how far its results move when its weights move by half an ulp.

Two orders of the same sums differ by rounding, and how much of it reaches a result depends on the case. A bound in
digits that fits one processor fails on another, whose matrix products add up in another order.

No bound fits a case in which a choice of experts, keys or tokens is nearly a tie: rounding then changes what is
computed. Such a draw of weights or tokens is left out before anything is compared (``certain``).
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Model = TypeVar("Model", bound=nn.Module)
Draw = TypeVar("Draw")

# Each operation of two computations rounds differently, where a moved copy rounds its weights differently once.
FACTOR = 8.0


def moved_copy(model: Model, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Model:
    """Return a copy whose weights are moved by half an ulp, up or down at random.

    ``dtype``: the lowest precision in which the case computes. Models in fp64 compute norms and rotary angles in fp32.
    """
    moved = copy.deepcopy(model)
    with torch.no_grad():
        weights = [*moved.parameters()]
        for x, away in zip(weights, half_an_ulp_away(weights, dtype, seed=seed), strict=True):
            x.copy_(away)
    return moved


def half_an_ulp_away(tensors: Sequence[Tensor], dtype: torch.dtype, *, seed: int = 0) -> list[Tensor]:
    """Return tensors in fp64 whose values are moved by half an ulp of ``dtype``, up or down at random.

    In fp64 itself they move to a neighbour, which is at most a whole ulp away.
    """
    generator, moved = torch.Generator().manual_seed(seed), []
    for x in tensors:
        up = torch.randint(0, 2, x.shape, generator=generator) == 1
        if dtype == torch.float64:
            moved.append(x.double().nextafter(torch.where(up, torch.inf, -torch.inf).double()))
        else:
            moved.append(x.double() * (1 + torch.where(up, 0.5, -0.5).double() * torch.finfo(dtype).eps))
    return moved


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Return the relative L2 error."""
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-12)).item()


def bounds_of(wanted: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the bound of each result's relative L2 error; ``moved``: the results of a moved copy.

    A result of few values may move little by chance, so no bound is below that of the median result.
    """
    changes = {name: error_of(moved[name], x) for name, x in wanted.items()}
    middle = statistics.median(changes.values())
    return {name: FACTOR * max(change, middle) for name, change in changes.items()}


def worst_share(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> float:
    """Return the greatest error, as a share of its bound: at most 1 if all results are right."""
    assert found.keys() == wanted.keys()
    bounds = bounds_of(wanted, moved)
    shares = [error_of(found[name], x) / max(bounds[name], 1e-300) for name, x in wanted.items()]
    return greatest(shares)


def share_of_loss(found: float, wanted: float, moved: float, dtype: torch.dtype = torch.float32) -> float:
    """Return a loss's relative error, as a share of its bound. transformers rounds most losses to fp32."""
    bound = FACTOR * max(abs(moved / wanted - 1), torch.finfo(dtype).eps / 2)
    return abs(found / wanted - 1) / bound


def greatest(errors: Iterable[float]) -> float:
    """Return the greatest error; NaN if one is, unlike Python's maximum."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def name_of_worst(errors: Mapping[str, float]) -> str:
    """Return the name of the greatest error; a NaN is greater than any."""
    return max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))


def certain(draws: Iterable[Draw], margin: Callable[[Draw], float]) -> Draw:
    """Return the first draw of a case whose choices rounding can't change; ``margin``: of :func:`margin_of_choices`."""
    margins = []
    for draw in draws:
        margins.append(margin(draw))
        if margins[-1] >= 1:
            return draw
    raise ValueError(f"each draw has a choice that is nearly a tie; the margins are {margins}")


def margin_of_choices(model: Model, run: Callable[[Model], Any], dtype: torch.dtype = torch.float32) -> float:
    """Return how clear all choices of a model are: at least 1 if rounding can't change any.

    It is the gap between the last score that is chosen and the next one, as a share of how far rounding may move
    scores. The choices are those by ``topk`` and ``argmax``; infinity if there are none.

    Args:
        model: in one process; it is copied, and the copies run.
        run: runs what is compared.
        dtype: the lowest precision in which the case computes.
    """
    noted = []
    for each in (copy.deepcopy(model), moved_copy(model, dtype)):
        with torch.no_grad(), _Choices() as choices:
            run(each)
        noted.append(choices.found)
    own, moved = noted
    if [x.shape for x, _ in own] != [x.shape for x, _ in moved]:
        return 0.0
    return min((_margin(x, count, y) for (x, count), (y, _) in zip(own, moved, strict=True)), default=math.inf)


class _Choices(TorchFunctionMode):
    """Notes the scores [..., n] of each choice, and how many are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {"topk": _of_topk, "argmax": _of_argmax}.get(getattr(func, "__name__", ""))
        if read is not None and args[0].is_floating_point():
            scores, count = read(*args, **(kwargs or {}))
            self.found.append((scores.double(), count))
        return result


def _of_topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, **_: Any) -> tuple[Tensor, int]:
    return (x if largest else -x).movedim(dim, -1), k


def _of_argmax(x: Tensor, dim: int | None = None, **_: Any) -> tuple[Tensor, int]:
    return (x.flatten() if dim is None else x.movedim(dim, -1)), 1


def _margin(scores: Tensor, count: int, moved: Tensor) -> float:
    """Return the margin of one choice, fp64 [..., n]; between hidden scores nothing is chosen."""
    if not 0 < count < scores.shape[-1]:
        return math.inf
    hidden = torch.finfo(torch.float32).min / 2
    last, following = scores.topk(count + 1).values[..., -2:].unbind(-1)
    gaps = (last - following)[last > hidden].nan_to_num(nan=0.0, posinf=math.inf)
    changes = (moved - scores).abs()[scores.isfinite() & (scores > hidden)].tolist()
    return gaps.min().item() / max(FACTOR * greatest([0.0, *changes]), 1e-300) if gaps.numel() else math.inf
