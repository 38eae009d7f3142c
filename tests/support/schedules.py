"""A schedule together with the planner that chose it."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from burst_attention import CallShape, Hardware
from burst_attention.plan.mask import Mask
from burst_attention.plan.schedule import Schedule
from burst_attention.plan.strategy import Strategy
from burst_attention.planner.planner import Planner, traffic_model_of


class Planned:
    """A schedule's own attributes, and the planner's methods for it."""

    def __init__(self, planner: Planner, schedule: Schedule) -> None:
        self.planner, self.schedule = planner, schedule

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.schedule, name):
            return getattr(self.schedule, name)
        return partial(getattr(self.planner, name), self.schedule)

    @property
    def tally(self) -> Any:
        return traffic_model_of(self.schedule)

    def with_mask(self, mask: Mask, **more: Any) -> Planned:
        return Planned(self.planner, self.planner.with_mask(self.schedule, mask, **more))

    def under(self, **changes: Any) -> Planned:
        """With another rank, route, or the like."""
        return Planned(self.planner, replace(self.schedule, **changes))


def make_schedule(
    seqlen: int,
    *,
    mask: Mask,
    rank: int = 0,
    world: int,
    planner: Planner | None = None,
    ulysses_degree: Any = 1,
    **strategy: Any,
) -> Planned:
    """Plan as ``make_plan`` does, without a group; heads stay whole unless asked."""
    planner = planner or Planner()
    asked = Strategy(ulysses_degree=ulysses_degree, **strategy)
    return Planned(planner, planner.choose(seqlen, mask=mask, strategy=asked, rank=rank, world=world))


def plan_options(**flat: Any) -> dict[str, Any]:
    """Arguments of ``make_plan`` from the fields of a strategy, a call's shape and hardware, side by side."""
    found = dict(flat)
    for name, kind in (("strategy", Strategy), ("call", CallShape), ("hardware", Hardware)):
        own = {each.name: found.pop(each.name) for each in fields(kind) if each.name in found}
        if own:
            found[name] = kind(**own)
    return found
