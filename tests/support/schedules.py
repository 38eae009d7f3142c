"""A schedule together with the planner that chose it, and what tests derive from schedules."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from burst_attention import CallShape, Hardware
from burst_attention.plan.assignment import Cube
from burst_attention.plan.build import Builder
from burst_attention.plan.cost import Shape
from burst_attention.plan.demand import PassSpec
from burst_attention.plan.groups import WHOLE, Groups
from burst_attention.plan.mask import Mask
from burst_attention.plan.program import Program
from burst_attention.plan.rows import Direction
from burst_attention.plan.schedule import Schedule
from burst_attention.plan.strategy import Strategy
from burst_attention.plan.tile import segment_tiles
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


def make_schedule(seqlen, *, mask, rank=0, world, planner=None, ulysses_degree=1, **strategy):
    """Plan as ``make_plan`` does, without a group; heads stay whole unless asked."""
    planner = planner or Planner()
    asked = Strategy(ulysses_degree=ulysses_degree, **strategy)
    return Planned(planner, planner.choose(seqlen, mask=mask, strategy=asked, rank=rank, world=world))


def pair_tiles(queries, keys, regions, q_owners, k_owners):
    """Return the tiles of all pairs of these owners that have any."""
    return segment_tiles(queries.table(q_owners), keys.table(k_owners), regions)


def assigned(schedule: Schedule, cube: Cube, direction: Direction, groups: Groups = WHOLE) -> Program:
    """Return a rank's program for any assignment of cells to ranks."""
    work = PassSpec(schedule.layout, schedule.regions, cube, groups, schedule.route, direction, keys=schedule.keys)
    return Builder(work, schedule.rank).program()


def bytes_moved(schedule: Schedule, shape: Shape, circulate: str, groups: Groups) -> np.ndarray:
    """Return the bytes that each rank sends, and receives, by the planner's messages: int64 [2, W]."""
    world = schedule.layout.world
    total = np.zeros((2, world), np.int64)
    for one in Planner().passes(schedule, shape, circulate, groups):
        sent = one.messages(bytes_only=True)
        for n, end in enumerate((sent.source, sent.target)):
            np.add.at(total[n], end, sent.size)
    return total


def plan_options(**flat: Any) -> dict[str, Any]:
    """Arguments of ``make_plan`` from the fields of a strategy, a call's shape and hardware, side by side."""
    found = dict(flat)
    for name, kind in (("strategy", Strategy), ("call", CallShape), ("hardware", Hardware)):
        own = {each.name: found.pop(each.name) for each in fields(kind) if each.name in found}
        if own:
            found[name] = kind(**own)
    return found
