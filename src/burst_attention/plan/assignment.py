"""Which rank computes which cell (query owner, key owner, head group). All that travels and returns follows from it.

An assignment is a function of two broadcastable integer arrays, query owners i and key owners j, that gives the rank;
a cube is one of three, of which the last is the head group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from .groups import Groups
from .rows import Direction

Assignment = Callable[[np.ndarray, np.ndarray], np.ndarray]
Cube = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def rows(i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Rank i computes (i, .): keys and values travel. GAO's forward and RingAttention's backward."""
    return i + 0 * j


def columns(i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Rank j computes (., j): the query side travels. GAO's backward (arXiv 2403.09347, section 3.1)."""
    return 0 * i + j


def nearest(world: int) -> Assignment:
    """The end of a pair that the other reaches by less than half of the ring, forward: K, V or queries travel.

    Of what a causal mask leaves of a contiguous layout every rank gets half a ring of whole blocks, where rows and
    columns give the last and the first rank nearly all of theirs.
    """

    def assign(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return np.where(2 * ((i - j) % world) < world, i, j)

    return assign


def blocks(world: int, keys: int) -> Assignment:
    """Blocks of many queries' shards with ``keys`` neighbours' keys: both sides travel a little, O(1 / sqrt(world)) of
    them (Mesh-Attention, arXiv 2512.20968). Any ``keys``; where it divides ``world`` blocks are of one size, and each
    rank owns a row and a column of its own."""

    def assign(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        first = j // keys * keys
        return first + i % np.minimum(keys, world - first)  # the last neighbours may be fewer, with more queries each

    return assign


def heads(groups: Groups, inner: Assignment) -> Cube:
    """Heads are cut first, then context slices: cell (i, j, h) at the rank of group h where ``inner`` has their slices.

    Every tensor is cut by heads, and no result is a sum over groups: the fewest bytes, as far as there are heads.
    Ulysses is one slice, and no inner assignment; USP and LoongTrain have rows inside.
    """

    def assign(i: np.ndarray, j: np.ndarray, group: int) -> np.ndarray:
        return groups.keeper(np.asarray(group), inner(groups.context(i), groups.context(j)))

    return assign


# What travels in the backward, and the assignment of each pass that it stands for: the paper's, RingAttention's,
# whichever side of a pair is on its way anyway, and both in square blocks.
TRAVELS: dict[str, Callable[[int], Mapping[Direction, Assignment]]] = {
    "query": lambda world: {Direction.FORWARD: rows, Direction.BACKWARD: columns},
    "key-value": lambda world: dict.fromkeys(Direction, rows),
    "either": lambda world: dict.fromkeys(Direction, nearest(world)),
    "blocks": lambda world: dict.fromkeys(Direction, blocks(world, math.isqrt(world))),
}

if TYPE_CHECKING:
    TravelsOrAuto: TypeAlias = str
else:  # what command lines take
    TravelsOrAuto = Literal["auto", *TRAVELS]


def table(ranks: np.ndarray) -> Assignment:
    """Any assignment: ``ranks[i, j]`` computes (i, j)."""
    return lambda i, j: ranks[i, j]
