"""Masks that represent similar ones, and small worlds that represent large ones.

Packed documents become at most three kinds of equal documents, so that steps with similar documents share a choice.

A small world has the same tokens per rank, under a shorter mask of the same kind. A rank's work and its traffic both
grow with the number of sequence groups. So the fastest strategy hardly depends on that number.
``tests/unit/test_planning_scale.py`` compares these choices with those of the whole world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt, lcm, log2

import numpy as np

from ..plan.groups import Groups
from ..plan.layout import Layout
from ..plan.mask import Mask
from .timing import Timed

MOST_ON_PAPER = 128  # up to this many ranks, all are simulated
MOST_BY_EDGES = 32  # the same for routes whose edges are made one by one
STANDING = 64  # ranks that represent more
MOST_STANDING = 96  # the same if the Ulysses degree does not divide them
KINDS = ((1 / 4, 1), (3 / 4, 1), (1, 2))  # up to which share of the tokens, longest documents first; octaves per step
PARTS = 4  # kinds of documents have multiples of a quarter of the tokens


def representative(layout: Layout, mask: Mask) -> tuple[Layout, Mask]:
    """Return a similar mask and its layout: packed documents become at most three kinds of equal documents.

    Few masks differ then, and similar ones are equal. Documents of each kind are spread over the whole sequence.
    """
    if mask.cu_seqlens is None:
        return layout, mask
    total, edge = layout.seqlen, 0
    lengths, places = [np.zeros(0, np.int64)], [np.zeros(0)]
    whole = np.diff(np.asarray(mask.cu_seqlens, np.float64))
    for part, octave in _kinds(whole[whole > 0]):
        tokens = total * (edge + part) // PARTS - total * edge // PARTS
        count = max(1, min(tokens, ((part << octave) + PARTS // 2) // PARTS))
        lengths.append(np.diff(tokens * np.arange(count + 1) // count))
        places.append((np.arange(count) + 0.5) / count)
        edge += part
    order = np.argsort(np.concatenate(places), kind="stable")
    borders = tuple(np.cumsum(np.r_[0, np.concatenate(lengths)[order]]).tolist())
    alike = replace(mask, cu_seqlens=borders if len(order) > 1 else None)
    return layout.cut_for(alike, total) if layout.by_mask else layout, alike


def _kinds(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return the kinds of documents, the longest first: (quarters of the tokens, log2 of how many fill all tokens).

    A kind's documents are as long as those that it represents, weighted by work and rounded to a power of two.
    """
    longest = np.sort(lengths)[::-1]
    until, total = np.cumsum(longest), float(longest.sum())
    kinds, start, quarter = list[tuple[int, int]](), 0, 0
    for share, step in KINDS:
        stop = min(len(longest), int(np.searchsorted(until, share * total * (1 - 1e-9))) + 1)
        part = round(PARTS * until[stop - 1] / total) - quarter if stop > start else 0
        if part <= 0:
            continue
        those = longest[start:stop]
        octave = round(log2(total * float(those.sum()) / float((those**2).sum())))
        before = kinds[-1][1] if kinds else 0
        octave = before + step * round(max(0, octave - before) / step)
        if kinds and octave == before:
            kinds[-1] = kinds[-1][0] + part, octave
        else:
            kinds.append((part, octave))
        start, quarter = stop, quarter + part
    return kinds


def stand_in(splits: Sequence[Groups], world: int) -> tuple[int, list[Groups]]:
    """Return how many ranks represent ``world``, and the splits with two sequence groups there, or the first."""
    ranks, shown = 1, set[int]()
    for count in sorted({groups.query for groups in splits}):
        more = lcm(ranks, count if count == world else 2 * count)
        if more <= MOST_STANDING or not shown:
            ranks, shown = more, shown | {count}
    return ranks * max(1, STANDING // ranks), [groups for groups in splits if groups.query in shown]


def shortened(layout: Layout, mask: Mask, ranks: int) -> tuple[Layout, Mask]:
    """Return the layout over fewer ranks with as many tokens each, and a shorter mask of the same kind."""
    whole = layout.seqlen
    total = -(-whole * ranks // layout.world)
    if mask.cu_seqlens is not None:
        mask = replace(mask, cu_seqlens=_fewer(np.diff(np.asarray(mask.cu_seqlens)), total))
    if mask.window is not None and 2 * mask.window > total:  # keep the window shorter than the sequence
        mask = replace(mask, window=max(1, total // 2, mask.window * total // max(1, whole)))
    if mask.prefix is not None:
        mask = replace(mask, prefix=mask.prefix * total // max(1, whole))
    mask = mask.resized(total)
    return replace(layout, world=ranks).cut_for(mask, total), mask


def _fewer(lengths: np.ndarray, total: int) -> tuple[int, ...]:
    """Return the borders of at least two documents with ``total`` tokens, as long as these or the mean of some."""
    count = min(len(lengths), max(2, round(len(lengths) * total / max(1, int(lengths.sum())))))
    groups = np.array_split(np.argsort(-lengths, kind="stable"), count)
    groups.sort(key=lambda group: float(group.mean()))
    until = np.cumsum([0, *(int(lengths[group].sum()) for group in groups)])
    return tuple((until * total // max(1, int(until[-1]))).tolist())


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


def extrapolated(
    simulate: Callable[[int], Sequence[Timed]], worlds: Sequence[int], groups: Groups, circulate: str
) -> list[Timed]:
    """Simulate a forward and a backward on the first two of three numbers of ranks; extrapolate them to the last."""
    slices, pairs = [ranks // groups.query for ranks in worlds], map(simulate, worlds[:2])
    return [extended(few, many, slices, circulate) for few, many in zip(*pairs, strict=True)]


def extended(few: Timed, many: Timed, slices: Sequence[int], circulate: str) -> Timed:
    """Extrapolate a pass to the last of three numbers of sequence groups, from the first two.

    Work and bytes grow with the number of groups; with ``blocks`` bytes grow with its square root. Exposed time never
    falls below the larger world's.
    """
    whole = [float(n) for n in slices]
    sides = [(isqrt(n) + n / isqrt(n)) / 2 for n in slices] if circulate == "blocks" else whole

    def at(name: str, axis: Sequence[float] = sides) -> float:
        a, b = getattr(few, name), getattr(many, name)
        return float(b + (axis[2] - axis[1]) * (b - a) / (axis[1] - axis[0]))

    computing, launches = at("computing", whole), at("launches", whole)
    sent = {name: round(max(0.0, at(name))) for name in ("inside", "across", "mean_inside", "mean_across")}
    seconds = computing + max(many.exposed, at("exposed"))
    return Timed(seconds=seconds, computing=computing, visits=at("visits"), launches=launches, **sent)
