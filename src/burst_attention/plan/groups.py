"""Head groups: how heads are cut, which ranks compute which of them, and how far apart ranks are then.

Of U R ranks, u + U c computes head group u for *context slice* c, the shards of ranks U c to U c + U - 1. One group,
U = 1, is an attention whose heads nobody cuts: a slice is a shard then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .rows import Side

Ranks = TypeVar("Ranks", int, np.ndarray)


@dataclass(frozen=True)
class Groups:
    """Heads in ``query`` groups, each a contiguous part of the query heads with the key-value heads that it needs.

    Args:
        query: U.
        key: into how many parts keys and values are cut: ``query``, or all key-value heads where there are fewer.
        keep: what a forward fetched of its rank's own context slice is saved for the backward, in place of local
            q, k and v.
        waves: shards of a context slice come together, a stretch of the sequence at a time, in so many waves; 0: one
            owner's at a time.
    """

    query: int = 1
    key: int = 1
    keep: bool = False
    waves: int = 0

    @classmethod
    def of(cls, count: int, *, q_heads: int, kv_heads: int, keep: bool = False, waves: int = 0) -> Groups:
        """``count`` groups of so many heads.

        Raises:
            ValueError: they don't divide.
        """
        if not cls.divide(count, q_heads=q_heads, kv_heads=kv_heads):
            raise ValueError(
                f"heads={count} can't cut {q_heads} query heads and {kv_heads} key-value heads into groups; it must "
                "divide the key-value heads, or be a multiple of them that divides the query heads: choose another, or "
                "'auto'"
            )
        return cls(count, min(count, kv_heads), keep, waves)

    @staticmethod
    def divide(count: int, *, q_heads: int, kv_heads: int) -> bool:
        """Can so many heads be cut into ``count`` groups?"""
        return kv_heads % count == 0 or (count % kv_heads == 0 and q_heads % count == 0)

    def count(self, side: Side) -> int:
        """Into how many parts the heads of a side are cut."""
        return self.query if side is Side.QUERY else self.key

    def part(self, side: Side, group: Ranks) -> Ranks:
        """Which part of a side's heads a group needs."""
        return group * self.count(side) // self.query

    def context(self, rank: Ranks) -> Ranks:
        """The context slice that a rank is of."""
        return rank // self.query

    def members(self, context: int) -> range:
        """The ranks whose shards are a context slice."""
        return range(context * self.query, (context + 1) * self.query)

    def keeper(self, group: Ranks | int, context: Ranks) -> Ranks:
        """The rank that computes ``group`` for its own ``context``, and keeps what it fetched of that."""
        return group + self.query * context

    @property
    def chunks(self) -> int:
        """How many parts of a shard travel by themselves."""
        return max(1, self.waves)

    def distance(self, source: Ranks, rank: Ranks, world: int, *, contexts: int = 1, wave: Ranks | int = 0) -> Ranks:
        """The step at which what starts at ``source`` reaches ``rank``: own context first, at each step a permutation
        of the ranks, or in waves of contexts.

        Args:
            contexts: so many neighbouring contexts are on one node; own node first, and to each other node the rank of
                the same place there. Not of what goes in waves.
            wave: by which it comes, from 0; also of what is at hand, for all of a wave is computed together.
        """
        here, there = self.context(source), self.context(rank)
        if self.waves:
            return (there - here) % (world // self.query) * self.waves + wave + 1
        nodes = (there // contexts - here // contexts) % (world // self.query // contexts)
        return (nodes * contexts + (there - here) % contexts) * self.query + (rank - source) % self.query


WHOLE = Groups()  # heads that nobody cuts


def divisors(world: int) -> Iterator[int]:
    """Those of ``world``, ascending."""
    return (n for n in range(1, world + 1) if world % n == 0)
