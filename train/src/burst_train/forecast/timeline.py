"""Who computes which cells when, and what travels, of a few ranks that stand for all: for pictures.

Times are the planner's own (:mod:`~burst_attention.planner.timing`): a pass is run up to each of its steps, and when a
rank is done by then is where its bar ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from burst_attention.plan.assignment import TRAVELS
from burst_attention.plan.rows import Direction
from burst_attention.planner.timing import Computing, Wire, computing, timed
from burst_attention.planner.traffic import Messages

from .calls import Setting, Way, messages_of, sheet

MOST_DRAWN = 16  # ranks, or two context slices if these are more


@dataclass(frozen=True)
class Bar:
    """What a rank does from ``begin`` to ``end``, in seconds: a step's visits, or it waits for what they need."""

    step: int
    begin: float
    end: float
    waits: bool


@dataclass(frozen=True, eq=False)
class Picture:
    """One pass over few ranks.

    Attributes:
        ranks: int64 [W, W]: of each (query owner, key owner) the rank that computes head group 0 of it; -1: nothing
            is seen.
        steps: at which step.
        bytes: [W, W]: from each rank to each other.
        bars: of the ranks ``shown``.
    """

    world: int
    ranks: np.ndarray
    steps: np.ndarray
    bytes: np.ndarray
    shown: Sequence[int]
    bars: Sequence[Sequence[Bar]]


def drawn(way: Way, setting: Setting) -> Setting:
    """The same over as few ranks as a picture has room for."""
    cut = way.groups.query
    slices = min(setting.world // cut, max(2, MOST_DRAWN // cut))
    return setting if setting.world <= slices * cut else setting.over(slices * cut)


def picture(way: Way, setting: Setting, direction: Direction, *, shown: int = 4) -> Picture:
    """Of a pass over the ranks of ``setting``."""
    world, schedule = setting.world, setting.schedule(way)
    one = sheet(way, setting, schedule, direction)
    tally, groups, pairs = one.tally, one.groups, one.tally.pairs
    cells = tally.cells(direction, groups, TRAVELS[way.travels](world // groups.query)[direction])
    ranks, steps = (np.full((world, world), -1, np.int64) for _ in range(2))
    of_shards = tuple(tally.owner(chunk) for chunk in (pairs.i, pairs.j))
    ranks[of_shards] = groups.keeper(0, cells.user)
    np.maximum.at(steps, of_shards, cells.step[0])  # of a pair's chunks the last
    sent = messages_of(way, one, schedule)
    moved = np.zeros((world, world))
    np.add.at(moved, (sent.source, sent.target), sent.size)
    work = computing(tally, setting.shape, direction, cells, groups, setting.rates)
    some = sorted({n * (world - 1) // max(1, shown - 1) for n in range(shown)})
    last = max(work.seconds.shape[1], int(sent.step.max(initial=0)) + 1)
    seconds = np.pad(work.seconds, ((0, 0), (0, last - work.seconds.shape[1])))  # of the last steps results come home
    ends = [_ends(sent, seconds, one.wire, rank) for rank in some]
    bars = [_bars(end, seconds[rank]) for end, rank in zip(ends, some, strict=True)]
    return Picture(world, ranks, steps, moved, some, bars)


def _ends(sent: Messages, seconds: np.ndarray, wire: Wire, rank: int) -> list[float]:
    """When ``rank`` is done with each step: the pass is run up to there, with so much more to do for this rank that it
    is the last."""
    much, ends = 1e6, []
    for step in range(seconds.shape[1]):
        early = sent.step <= step
        before = Messages(*(getattr(sent, name)[early] for name in ("step", "source", "target", "size", "kind")))
        longer = seconds[:, : step + 1].copy()
        longer[rank, step] += much
        nothing = np.zeros_like(longer)
        whole = timed(before, Computing(longer, nothing, nothing), wire).seconds
        ends.append(max(0.0, whole - much - wire.rates.overhead.call))
    return ends


def _bars(ends: Sequence[float], seconds: np.ndarray) -> list[Bar]:
    found, now = list[Bar](), 0.0
    for step, (end, took) in enumerate(zip(ends, seconds.tolist(), strict=True)):
        begin = max(now, end - took)
        if begin > now:
            found.append(Bar(step, now, begin, waits=True))
        if end > begin:
            found.append(Bar(step, begin, end, waits=False))
        now = max(now, end)
    return found
