"""A small world that represents a large one: the same tokens per rank, under a shorter mask of the same kind.

A rank's work and its traffic both grow with the number of sequence groups. So the fastest strategy hardly depends on
that number. ``tests/unit/test_planning_scale.py`` compares these choices with those of the whole world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt, lcm

from ..plan.groups import Groups
from ..plan.layout import Layout
from ..plan.mask import Mask
from .timing import Timed

MOST_ON_PAPER = 128  # up to this many ranks, all are simulated
MOST_BY_EDGES = 32  # the same for routes whose edges are made one by one
STANDING = 64  # ranks that represent more
MOST_STANDING = 96  # the same if the Ulysses degree does not divide them


def stand_in(given: Sequence[Groups], world: int) -> tuple[int, list[Groups]]:
    """Return how many ranks represent ``world``, and the head splits with at least two sequence groups there.

    The first split is always among them.
    """
    ranks, shown = 1, set[int]()
    for count in sorted({groups.query for groups in given}):
        more = lcm(ranks, count if count == world else 2 * count)
        if more <= MOST_STANDING or not shown:
            ranks, shown = more, shown | {count}
    return ranks * max(1, STANDING // ranks), [groups for groups in given if groups.query in shown]


def shortened(layout: Layout, mask: Mask, ranks: int) -> tuple[Layout, Mask]:
    """Return the layout over fewer ranks with as many tokens per rank, and a shorter mask of the same kind.

    The mask's documents are equally long, as in :func:`~burst_attention.planner.choice.representative`.
    """
    whole = layout.seqlen
    total = -(-whole * ranks // layout.world)
    if mask.cu_seqlens is not None:
        count = max(2, round((len(mask.cu_seqlens) - 1) * total / max(1, whole)))
        mask = replace(mask, cu_seqlens=tuple(n * total // count for n in range(count + 1)))
    if mask.window is not None and 2 * mask.window > total:  # keep the window shorter than the sequence
        mask = replace(mask, window=max(1, total // 2, mask.window * total // whole))
    if mask.prefix is not None:
        mask = replace(mask, prefix=mask.prefix * total // max(1, whole))
    mask = mask.resized(total)
    return replace(layout, world=ranks).cut_for(mask, total), mask


def few_nodes(nodes: tuple[int, ...] | None, ranks: int) -> tuple[int, ...] | None:
    """Return the nodes of the first ranks; if one large node holds them all, four nodes instead."""
    if nodes is None or len(set(nodes)) == 1 or len(set(nodes[:ranks])) > 1:
        return nodes and nodes[:ranks]
    return tuple(4 * rank // ranks for rank in range(ranks))


def two_worlds(groups: Groups, circulate: str, most: int) -> tuple[int, int]:
    """Return two worlds of about ``most`` ranks to extrapolate from; ``blocks`` needs square numbers of groups."""
    cut = groups.query
    if circulate == "blocks":
        side = max(4, isqrt(most // cut) // 2 * 2)
        return cut * (side // 2) ** 2, cut * side**2
    slices = max(2, most // cut // 2)
    return cut * slices, cut * 2 * slices


def extended(few: Timed, many: Timed, slices: tuple[int, int, int], circulate: str) -> Timed:
    """Extrapolate a pass to the last of three numbers of sequence groups, from the first two.

    Work and bytes grow with the number of groups; with ``blocks`` bytes grow with its square root. Exposed time never
    falls below the larger world's.
    """
    sides = [(isqrt(n) + n / isqrt(n)) / 2 for n in slices] if circulate == "blocks" else [float(n) for n in slices]

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
