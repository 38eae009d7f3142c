"""A small world that stands for a large one: as many tokens for each rank, under a mask that is shortened with them.

A rank's work and what it receives both grow with the context slices, so which way is faster hardly depends on how many
there are. ``tests/unit/test_planning_scale.py`` holds choices so made against those of the whole world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt, lcm

from ..plan.groups import Groups
from ..plan.layout import Layout
from ..plan.mask import Mask
from .timing import Timed

MOST_ON_PAPER = 128  # ranks up to which all of them are run on paper
MOST_BY_EDGES = 32  # the same on routes whose edges are made one by one
STANDING = 64  # ranks that stand for more
MOST_STANDING = 96  # where heads are cut into numbers that don't divide those


def stand_in(given: Sequence[Groups], world: int) -> tuple[int, list[Groups]]:
    """How many ranks stand for ``world``, and which ways to cut heads they can show: two context slices each, at least.

    The first way is always one of them.
    """
    ranks, shown = 1, set[int]()
    for count in sorted({groups.query for groups in given}):
        more = lcm(ranks, count if count == world else 2 * count)
        if more <= MOST_STANDING or not shown:
            ranks, shown = more, shown | {count}
    return ranks * max(1, STANDING // ranks), [groups for groups in given if groups.query in shown]


def shortened(layout: Layout, mask: Mask, ranks: int) -> tuple[Layout, Mask]:
    """The layout over ``ranks`` ranks with as many tokens each, and a mask of the same kind.

    Args:
        mask: its documents are equally long, as a :func:`~burst_attention.plan.choose.representative` has them.
    """
    whole = layout.seqlen
    total = -(-whole * ranks // layout.world)
    if mask.cu_seqlens is not None:
        count = max(2, round((len(mask.cu_seqlens) - 1) * total / max(1, whole)))
        mask = replace(mask, cu_seqlens=tuple(n * total // count for n in range(count + 1)))
    if mask.window is not None and 2 * mask.window > total:  # a window stays one, as far as it is one of the whole
        mask = replace(mask, window=max(1, total // 2, mask.window * total // whole))
    if mask.prefix is not None:
        mask = replace(mask, prefix=mask.prefix * total // max(1, whole))
    return replace(layout, world=ranks).cut_for(mask, total), mask


def few_nodes(nodes: tuple[int, ...] | None, ranks: int) -> tuple[int, ...] | None:
    """The nodes of the first ranks; where one node holds all those and others follow, four in its place."""
    if nodes is None or len(set(nodes)) == 1 or len(set(nodes[:ranks])) > 1:
        return nodes and nodes[:ranks]
    return tuple(4 * rank // ranks for rank in range(ranks))


def two_worlds(groups: Groups, travels: str, most: int) -> tuple[int, int]:
    """Two worlds of about ``most`` ranks, through whose figures a line is laid: blocks' context slices are squares."""
    cut = groups.query
    if travels == "blocks":
        side = max(4, isqrt(most // cut) // 2 * 2)
        return cut * (side // 2) ** 2, cut * side**2
    slices = max(2, most // cut // 2)
    return cut * slices, cut * 2 * slices


def extended(few: Timed, many: Timed, slices: tuple[int, int, int], travels: str) -> Timed:
    """A pass over the last of three numbers of context slices, from those over the first two.

    What a rank computes grows with the slices, and what it sends too, but by blocks with their sides. Where less and
    less is exposed, it is no less than what was seen.
    """
    sides = [(isqrt(n) + n / isqrt(n)) / 2 for n in slices] if travels == "blocks" else [float(n) for n in slices]

    def at(axis: Sequence[float], name: str) -> float:
        a, b = getattr(few, name), getattr(many, name)
        return float(b + (axis[2] - axis[1]) * (b - a) / (axis[1] - axis[0]))

    computing = at([float(n) for n in slices], "computing")
    exposed = max(many.exposed, at(sides, "exposed"))
    return Timed(
        seconds=computing + exposed,
        computing=computing,
        visits=at(sides, "visits"),
        launches=at([float(n) for n in slices], "launches"),
        inside=round(max(0.0, at(sides, "inside"))),
        across=round(max(0.0, at(sides, "across"))),
    )
