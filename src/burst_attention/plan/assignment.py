"""Which rank computes which cell (query owner, key owner, head group). It decides what circulates and what returns.

An assignment is a function of two broadcastable integer arrays, query owners i and key owners j, that returns the rank.
A cube is a function of three; the third is the head group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .groups import Groups
from .rows import Direction

Assignment = Callable[[np.ndarray, np.ndarray], np.ndarray]
Cube = Callable[[np.ndarray, np.ndarray, np.ndarray | int], np.ndarray]


def rows(i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Rank i computes (i, .): keys and values circulate. GAO's forward and RingAttention's backward."""
    return i + 0 * j


def columns(i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Rank j computes (., j): the query side circulates. GAO's backward (arXiv 2403.09347, section 3.1)."""
    return 0 * i + j


def nearest(world: int) -> Assignment:
    """Send K, V to i if that is less than half a ring forward, else Q to j. It balances contiguous shards."""

    def assign(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return np.where(2 * ((i - j) % world) < world, i, j)

    return assign


def blocks(world: int, keys: int) -> Assignment:
    """Give each rank pairs of about sqrt(W) query and ``keys`` key shards. Mesh-Attention (arXiv 2512.20968)."""

    def assign(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        first = j // keys * keys
        return first + i % np.minimum(keys, world - first)  # the last group may be smaller, with more queries each

    return assign


@dataclass(frozen=True, eq=False)
class HeadsFirst:
    """Split heads first, which sends the fewest bytes; then ``inner`` picks the sequence group of a cell (i, j, h)."""

    groups: Groups
    inner: Assignment

    def __call__(self, i: np.ndarray, j: np.ndarray, group: np.ndarray | int) -> np.ndarray:
        context = self.inner(self.groups.context(i), self.groups.context(j))
        return self.groups.cache_owner(np.asarray(group), context)


KEYS_CIRCULATE = "key-value"
PASS_QUERY = "pass-query"  # the planner considers it only if keys have another layout than queries

# What circulates in the backward, and the assignment of each pass: the paper's, RingAttention's, the nearer side of
# each pair, both sides of square blocks, and the query side in both passes.
CIRCULATIONS: dict[str, Callable[[int], Mapping[Direction, Assignment]]] = {
    "query": lambda world: {Direction.FORWARD: rows, Direction.BACKWARD: columns},
    KEYS_CIRCULATE: lambda world: dict.fromkeys(Direction, rows),
    "nearest": lambda world: dict.fromkeys(Direction, nearest(world)),
    "blocks": lambda world: dict.fromkeys(Direction, blocks(world, math.isqrt(world))),
    PASS_QUERY: lambda world: dict.fromkeys(Direction, columns),
}


def circulating(circulate: str, direction: Direction, groups: Groups, world: int) -> HeadsFirst:
    """Return the assignment of one pass over ``world`` ranks; ``circulate`` is a name of :data:`CIRCULATIONS`."""
    return HeadsFirst(groups, CIRCULATIONS[circulate](world // groups.query)[direction])
