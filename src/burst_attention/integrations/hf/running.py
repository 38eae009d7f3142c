"""The plans of the call that runs on this thread, which its layers and the modules inside them read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from burst_attention.attention.batch import Plans, Reach
from burst_attention.attention.plan import Plan

ALONE: Any = object()  # in place of plans: run the stock forward on this rank alone


class RunningPlans(Plans):
    """The plans of one call of a parallelized model.

    ``positions``: the position ids [B, S_local] that the body got. None: the model computes its own, as
    vision-language models do, and its attention gets those or none.
    ``masked``: the plans' masks are the model's own, so whether a layer calls itself causal has no effect.
    """

    def __init__(
        self, by_window: Mapping[Reach, Plan], *, positions: torch.Tensor | None, masked: bool = False
    ) -> None:
        super().__init__(by_window)
        self.positions, self.masked = positions, masked

    def check_body(self, body: torch.nn.Module, position_ids: Any) -> None:
        """Refuse a body that got other positions than its shard has, or none: it would count them by itself."""
        if position_ids is not self.positions and not _is_view(position_ids, self.positions):
            what = "missing" if position_ids is None else "not those of its shard"
            raise ValueError(
                f"position_ids of {type(body).__name__} are {what} on rank {self.one.rank}; call it with all arguments "
                "of a shard, such as model.model(**shard), inside of the shard's own `with hf.shards(...)`"
            )

    def check_positions(self, position_ids: Any) -> None:
        """Refuse a layer that got other positions than the body. A layer that gets none has turned q and k already."""
        if position_ids is None or self.positions is None or position_ids is self.positions:
            return
        if not _is_view(position_ids, self.positions):
            raise ValueError(
                f"position_ids of the layer are not those of the call on rank {self.one.rank}; a model that changes "
                "them on the way to its attention can't run on shards"
            )


@torch.compiler.disable
def _is_view(x: Any, y: torch.Tensor) -> bool:
    """Return whether x is y, taken out of a stack again, as in Qwen 3.5, or equal axes of y, as in GLM-4.5V."""
    if not isinstance(x, torch.Tensor):
        return False
    return (x[0] if x.dim() == 3 and x.stride(0) == 0 else x).is_set_to(y)


class _Running(threading.local):
    plans: Any = None  # RunningPlans, a ``Step`` of a cache, or ``ALONE``; None outside of a parallelized model


RUNNING = _Running()  # for modules that get no keywords from the modules around them


@contextmanager
def running(plans: Any = ALONE) -> Iterator[None]:
    """Give the plans of a call to all modules that run inside this context. Default: they run alone."""
    before, RUNNING.plans = RUNNING.plans, plans
    try:
        yield
    finally:
        RUNNING.plans = before


def running_plans(module: torch.nn.Module) -> Any:
    """Return the plans of the running call, or ``ALONE``."""
    plans = RUNNING.plans
    if plans is None:
        raise ValueError(
            f"plan did not reach {type(module).__name__}, so it would see only this rank's shard; call the "
            "parallelized model itself, or its body inside of hf.shards"
        )
    return plans
