"""Head groups: how heads are split, which ranks compute which groups, and the distance between ranks.

Of U R ranks, rank u + U c computes head group u for *sequence group* c: the shards of ranks U c to U c + U - 1. With
U = 1 heads stay whole, and a sequence group is one shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .rows import Payload, Side

Ranks = TypeVar("Ranks", int, np.ndarray)

# Double buffering: at most this many exchanges are posted and not yet waited for; fewer if one forwards a shard of the
# exchange before.
IN_FLIGHT = 2


@dataclass(frozen=True)
class Groups:
    """How a call splits its heads: ``query`` groups of contiguous query heads, with the key-value heads they need."""

    query: int = 1  # U, the Ulysses degree
    key: int = 1  # parts of keys and values: ``query``, or the number of key-value heads if smaller
    keep: bool = False  # the forward caches q, k and v of its sequence group for the backward, not the rank's own
    chunks: int = 0  # by position, in which a sequence group's shards arrive; 0: one owner at a time
    gather: bool = False  # with whole heads: all foreign shards arrive in one exchange, and share a buffer
    results: bool = False  # ``keep`` includes out and lse: U is W, and a backward is sent neither lse nor D

    @classmethod
    def of(
        cls, count: int, *, q_heads: int, kv_heads: int, keep: bool = False, results: bool = False, chunks: int = 0
    ) -> Groups:
        """Split heads into ``count`` groups. Raise ValueError if that can't be done."""
        if not cls.divide(count, q_heads=q_heads, kv_heads=kv_heads):
            raise ValueError(
                f"ulysses_degree={count} can't split {q_heads} query heads and {kv_heads} key-value heads; it must "
                "divide the key-value heads, or be a multiple of them that divides the query heads. Choose another "
                "degree, or 'auto'"
            )
        return cls(count, min(count, kv_heads), keep, chunks, results=results)

    @staticmethod
    def divide(count: int, *, q_heads: int, kv_heads: int) -> bool:
        """Return whether these heads can be split into ``count`` groups."""
        return kv_heads % count == 0 or (count % kv_heads == 0 and q_heads % count == 0)

    def count(self, side: Side) -> int:
        """Return the number of parts of a side's heads."""
        return self.query if side is Side.QUERY else self.key

    def part(self, side: Side, group: Ranks) -> Ranks:
        """Return the part of a side's heads that a group needs."""
        return group * self.count(side) // self.query

    def context(self, rank: Ranks) -> Ranks:
        """Return the number of a rank's sequence group, which names in ``plan`` and ``planner`` call its context."""
        return rank // self.query

    def beside(self, owner: Ranks) -> Ranks:
        """Return the number of the buffer that an owner's shard shares with others."""
        return 0 * owner if self.gather else self.context(owner)

    @property
    def joins(self) -> bool:
        """Whether shards of several owners may share a buffer. Local data is then copied into it."""
        return self.query > 1 or self.gather

    @property
    def of_backward(self) -> Payload:
        """What the owner of queries sends in a backward whose inputs the forward cached."""
        return Payload.OUTPUT_GRADIENT if self.results else Payload.GRADIENTS

    def members(self, context: int) -> range:
        """Return the ranks of a sequence group."""
        return range(context * self.query, (context + 1) * self.query)

    def cache_owner(self, group: Ranks | int, context: Ranks) -> Ranks:
        """Return the rank of ``group`` in sequence group ``context``, which caches its tensors."""
        return group + self.query * context

    @property
    def chunk_count(self) -> int:
        """Number of parts of a shard that are sent separately."""
        return max(1, self.chunks)

    @property
    def in_flight(self) -> int:
        """How many exchanges may be posted and not yet waited for: one more of several chunks, or links would idle."""
        return IN_FLIGHT + (self.chunks > IN_FLIGHT)

    def distance(self, source: Ranks, rank: Ranks, world: int, *, contexts: int = 1, turn: Ranks | int = 0) -> Ranks:
        """Return the step at which data from ``source`` reaches ``rank``.

        The own sequence group comes first. Each step is a permutation of the ranks, or a chunk of a sequence group.

        ``contexts`` neighbouring sequence groups share a node; unused with chunks. The own node comes first; each other
        node is entered at the rank of the same place. ``turn``: the chunk, from 0. Local data has one too, because a
        chunk is computed together.
        """
        here, there = self.context(source), self.context(rank)
        if self.gather:
            return 1 * (source != rank)
        if self.chunks:
            return (there - here) % (world // self.query) * self.chunks + turn + 1
        nodes = (there // contexts - here // contexts) % (world // self.query // contexts)
        return (nodes * contexts + (there - here) % contexts) * self.query + (rank - source) % self.query


WHOLE = Groups()  # whole heads


def divisors(world: int) -> Iterator[int]:
    """Yield the divisors of ``world``, ascending."""
    return (n for n in range(1, world + 1) if world % n == 0)
