"""Which global positions each rank holds.

A shard is a list of arithmetic segments, and Python's ``range`` already is one: start, stop, stride, a length,
equality and a hash. A new layout is one function here; masks, routes and kernels follow from its segments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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


# What a name of LAYOUTS may end with: each document is cut over the ranks by itself. Commands don't offer it, for they
# plan once for all batches, and here the documents decide who holds which tokens.
PER_DOCUMENT = "-per-document"

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


def digest(part: Any) -> str:
    """Of a dataclass's fields: equal on two ranks iff they are."""
    return hashlib.blake2b(repr(astuple(part)).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Layout:
    """``seqlen`` positions over ``world`` ranks, by one of :data:`LAYOUTS`.

    With ``-per-document`` after its name a layout cuts each of the documents with the borders ``documents`` over all
    ranks, and a rank holds its parts of them one after another. Under a causal mask ``zigzag-per-document`` gives every
    rank the same work whatever the documents' lengths; shards differ by at most one token for each document.
    """

    name: str
    seqlen: int
    world: int
    documents: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self._plain not in LAYOUTS:
            raise ValueError(
                f"layout={self.name!r} is unknown; choose one of {', '.join(LAYOUTS)}, with {PER_DOCUMENT} after it to "
                "cut each document by itself"
            )
        if self.seqlen < 0 or self.world < 1:
            raise ValueError(f"seqlen={self.seqlen} must be at least 0 and world={self.world} at least 1")

    def segments(self, rank: int) -> Segments:
        """The positions of ``rank`` in local order; empty segments are kept out."""
        cut = LAYOUTS[self._plain]
        return tuple(
            range(start + s.start, start + s.stop, s.step)
            for start, stop in pairwise(self._parts)
            for s in cut(stop - start, self.world, rank)
            if len(s)
        )

    @property
    def description(self) -> str:
        """In words: equal on two ranks iff each holds the same tokens by both."""
        return self.name + (f" (digest {digest(self)})" if self.documents else "")

    @property
    def per_document(self) -> bool:
        """Is each document cut by itself?"""
        return self._plain != self.name

    @property
    def _plain(self) -> str:
        return self.name.removesuffix(PER_DOCUMENT) if isinstance(self.name, str) else self.name

    @property
    def _parts(self) -> tuple[int, ...]:
        """Borders of what is cut by itself; a rank alone holds everything in order, whatever is cut."""
        apart = self.per_document and self.documents and self.world > 1
        return self.documents if apart else (0, self.seqlen)  # type: ignore[return-value]

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
