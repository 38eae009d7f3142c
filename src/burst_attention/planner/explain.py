"""Explain how a call will be computed, and list the alternatives."""

from __future__ import annotations

import numpy as np

from ..plan.cost import Shape
from ..plan.groups import Groups
from ..plan.rows import Direction, Side
from ..plan.schedule import Schedule
from .choice import Candidate, Prediction
from .planner import Planner
from .timing import Timed

SHOWN = 6  # alternatives
GUESSED = "; these links were not measured: the choice also minimises the loss if they are slower; run burst calibrate"


def explain(planner: Planner, schedule: Schedule, shape: Shape) -> str:
    """Explain how a call of this shape is computed, and why."""
    layout, world = schedule.layout, schedule.layout.world
    keys = f", {layout.seqlen} queries over {sum(schedule.keys.lengths)} keys" if schedule.keys else ""
    heading = [f"layout {layout.name}, route {schedule.route.name}, {world} ranks, {schedule.mask!r}{keys}"]
    if world == 1:
        return "\n".join([*heading, "one rank computes everything: nothing is exchanged"])
    chosen = planner.decide(schedule, shape)
    passes = planner.timed(schedule, shape, chosen.circulate, chosen.groups)
    rates, times = planner.rates, planner.times
    seconds, exposed = (np.dot(times, [getattr(one, name) for one in passes]) for name in ("seconds", "exposed"))
    often = ", with the forward twice" * (times[0] > 1) + ", without a backward" * (times[1] == 0)
    said = [
        f"chosen: {chosen.strategy(layout.name, schedule.route.name)!r}",
        f"predicted: {seconds:.3g} s, of which {exposed:.3g} s are exchange that no computation hides{often}",
        *(_line(name, p) for name, p in zip(("forward", "backward"), passes, strict=True)),
        *_others(planner, schedule, shape, chosen),
        f"rates: {rates.name} ({rates.source}){GUESSED if planner.guessed else ''}",
        _retained(planner, schedule, shape, chosen.groups),
    ]
    return "\n".join([*heading, *said])


def _line(name: str, run: Timed) -> str:
    return (
        f"{name}: {run.seconds:.3g} s, {run.exposed:.3g} s exposed; busiest rank: {run.inside / 1e6:,.4g} MB inside of "
        f"its node, {run.across / 1e6:,.4g} MB across, {run.visits:.0f} visits, about {run.launches:.0f} launches"
    )


def _retained(planner: Planner, schedule: Schedule, shape: Shape, groups: Groups) -> str:
    """Return a line about the memory that a rank holds between a call's forward and backward."""
    remat, own = planner.remat, schedule.layout.lengths[schedule.rank]
    of_keys = schedule.layouts[Side.KEY].lengths[schedule.rank]
    rows = (schedule.slice_length(groups),) * 2 if groups.keep else (own, of_keys)
    parts = (groups.query, groups.key) if groups.keep else (1, 1)
    elements = rows[0] * (shape.q_heads // parts[0]) * shape.head_dim
    elements += rows[1] * (shape.kv_heads // parts[1]) * (shape.head_dim + shape.v_head_dim)
    inputs = shape.batch * shape.io * elements
    row = shape.side_bytes(Side.QUERY, Direction.FORWARD, wide=shape.io)  # of out and lse
    results, cached = own * row, rows[0] * row // parts[0] if groups.results else 0
    held = {
        "none": inputs + (cached or results),
        "layer": 0,
        "keep-attention": results + groups.keep * inputs + cached,
    }[remat]
    return f"retained from forward to backward, with remat={remat}: {held / 1e6:,.4g} MB"


def _others(planner: Planner, schedule: Schedule, shape: Shape, chosen: Candidate) -> list[str]:
    """Return a line with the predicted seconds of other Ulysses degrees, for one row of a batch, fastest first."""
    if schedule.strategy.ulysses_degree == 1 or not schedule.route.direct:
        return []
    others = [each for each in planner.predict_for_links(schedule, shape)[0] if each.candidate != chosen]
    best: dict[int, Prediction] = {}  # of each Ulysses degree
    for prediction in sorted(others, key=lambda prediction: (prediction.forward is None, prediction.seconds)):
        best.setdefault(prediction.candidate.groups.query, prediction)
    ways = [
        f"{prediction.candidate}: {'' if prediction.forward else 'at least '}{prediction.seconds:.3g} s"
        for prediction in sorted(best.values(), key=lambda prediction: prediction.seconds)[:SHOWN]
    ]
    return [f"alternatives, for one row of a batch: {'; '.join(ways)}"] if ways else []
