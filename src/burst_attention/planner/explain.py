"""How a call will be computed, and what else could have been chosen, in a few lines of text."""

from __future__ import annotations

from ..plan.cost import Shape
from ..plan.groups import Groups
from .choice import Candidate, Prediction
from .schedule import Schedule
from .timing import Timed

SHOWN = 6  # of what else could have been chosen
GUESSED = "; nobody measured these links: chosen is what loses least if they are slower, too; see burst calibrate"


def explain(schedule: Schedule, shape: Shape, travels: str) -> str:
    """Of a call of this shape; ``travels`` as in the call."""
    layout, world = schedule.layout, schedule.layout.world
    asked = [f"layout {layout.name}, route {schedule.route.name}, {world} ranks, {schedule.mask!r}"]
    if world == 1:
        return "\n".join([*asked, "one rank computes everything: nothing is exchanged"])
    groups, travels = schedule.decide(shape, travels)
    passes = schedule.timed(shape, travels, groups)
    rates, times = schedule.planner.rates, (schedule.planner.forwards, 1)
    seconds, exposed = (
        sum(n * getattr(one, name) for n, one in zip(times, passes, strict=True)) for name in ("seconds", "exposed")
    )
    return "\n".join(
        [
            *asked,
            f"chosen: {Candidate(groups, travels)}: {seconds:.3g} s predicted, of which {exposed:.3g} s are exchange "
            "that nothing hides" + ", with the forward twice" * (times[0] > 1),
            *(_line(name, p) for name, p in zip(("forward", "backward"), passes, strict=True)),
            *_others(schedule, shape, Candidate(groups, travels)),
            f"rates: {rates.name} ({rates.source}){GUESSED if schedule.planner.guessed else ''}",
            _retained(schedule, shape, groups),
        ]
    )


def _line(name: str, one: Timed) -> str:
    return (
        f"{name}: {one.seconds:.3g} s, {one.exposed:.3g} s exposed; busiest rank: {one.inside / 1e6:,.4g} MB inside of "
        f"its node, {one.across / 1e6:,.4g} MB across, {one.visits:.0f} visits, about {one.launches:.0f} launches"
    )


def _retained(schedule: Schedule, shape: Shape, groups: Groups) -> str:
    """What a rank's call holds from its forward to its backward: q, k and v, or its slice's; out and lse."""
    remat, own = schedule.planner.remat, schedule.layout.lengths[schedule.rank]
    rows = schedule.slice_length(groups) if groups.keep else own
    parts = (groups.query, groups.key) if groups.keep else (1, 1)
    of_queries = shape.q_heads // parts[0] * shape.head_dim
    of_keys = shape.kv_heads // parts[1] * (shape.head_dim + shape.v_head_dim)
    inputs = shape.batch * rows * shape.io * (of_queries + of_keys)
    results = shape.batch * own * shape.q_heads * (shape.v_head_dim * shape.io + shape.accumulate)
    held = {"none": inputs + results, "layer": 0, "keep-attention": results + groups.keep * inputs}[remat]
    return f"retained from a forward to its backward, with remat={remat}: {held / 1e6:,.4g} MB"


def _others(schedule: Schedule, shape: Shape, chosen: Candidate) -> list[str]:
    """What one row of a batch would take by other ways, the fastest first."""
    if schedule.heads == 1 or not schedule.route.direct:
        return []
    found = [each for each in schedule.predictions(shape, "auto") if each.candidate != chosen]
    best: dict[int, Prediction] = {}  # of each number of head groups
    for each in sorted(found, key=lambda each: (each.forward is None, each.seconds)):
        best.setdefault(each.candidate.groups.query, each)
    ways = sorted(best.values(), key=lambda each: each.seconds)[:SHOWN]
    return [f"or, of one row of a batch: {'; '.join(map(_told, ways))}"] if ways else []


def _told(each: Prediction) -> str:
    if each.forward is None:
        return f"{each.candidate}: at least {each.seconds:.3g} s"
    return f"{each.candidate}: {each.seconds:.3g} s"
