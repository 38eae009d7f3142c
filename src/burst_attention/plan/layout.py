"""Which global positions each rank holds.

A shard is a list of arithmetic segments, and Python's ``range`` already is one: start, stop, stride, a length,
equality and a hash. A new layout is one function here; masks, routes and kernels follow from its segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

Segments = tuple[range, ...]


def _contiguous(seqlen: int, world: int, rank: int) -> Segments:
    return (range(rank * seqlen // world, (rank + 1) * seqlen // world),)


def _zigzag(seqlen: int, world: int, rank: int) -> Segments:
    """Chunks ``rank`` and ``2 * world - 1 - rank`` of 2 * world: every rank sees the same share of a causal triangle.

    The remainder of the division goes to the first chunk of ranks 0, 1, ... and then to their last chunk, so that
    shards differ by at most one token.
    """
    size, extra = divmod(seqlen, 2 * world)

    def start(chunk: int) -> int:
        late = max(0, extra - world)  # ranks whose second chunk is one longer; those chunks are the last ones
        return chunk * size + min(chunk, extra, world) + max(0, chunk - (2 * world - late))

    mirror = 2 * world - 1 - rank
    return range(start(rank), start(rank + 1)), range(start(mirror), start(mirror + 1))


def _striped(seqlen: int, world: int, rank: int) -> Segments:
    return (range(min(rank, seqlen), seqlen, world),)


LAYOUTS: dict[str, Callable[[int, int, int], Segments]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
}

if TYPE_CHECKING:
    LayoutName: TypeAlias = str
    LayoutOrAuto: TypeAlias = str
else:  # what command lines and configurations take
    LayoutName = Literal[*LAYOUTS]
    LayoutOrAuto = Literal["auto", *LAYOUTS]


@dataclass(frozen=True)
class Layout:
    """``seqlen`` positions over ``world`` ranks, by one of :data:`LAYOUTS`."""

    name: str
    seqlen: int
    world: int

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise ValueError(f"layout={self.name!r} is unknown; choose one of {', '.join(LAYOUTS)}")
        if self.seqlen < 0 or self.world < 1:
            raise ValueError(f"seqlen={self.seqlen} must be at least 0 and world={self.world} at least 1")

    def segments(self, rank: int) -> Segments:
        """The positions of ``rank`` in local order; empty segments are kept out."""
        return tuple(s for s in LAYOUTS[self.name](self.seqlen, self.world, rank) if len(s))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return tuple(sum(map(len, self.segments(rank))) for rank in range(self.world))

    def positions(self, rank: int) -> np.ndarray:
        """int64 [S_local]: the global position of each local token of ``rank``."""
        parts = [np.arange(s.start, s.stop, s.step, dtype=np.int64) for s in self.segments(rank)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @cached_property
    def gather_order(self) -> np.ndarray:
        """int64 [S]: where each global position stands in the shards laid end to end by rank."""
        order = np.empty(self.seqlen, np.int64)
        order[np.concatenate([self.positions(rank) for rank in range(self.world)])] = np.arange(self.seqlen)
        return order
