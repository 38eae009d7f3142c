"""Which global positions each rank holds.

A shard is a list of arithmetic segments. A Python ``range`` is one segment, and an integer table holds many. To add a
layout, write one function here; masks, routes and kernels follow from its segments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np

from .balance import Segments, joined, place
from .mask import Mask

Whole = Any  # an int, or an int64 array for several documents or ranks
Pieces = tuple[tuple[Whole, Whole, int], ...]  # start, stop and stride of each piece; a piece may be empty


def _contiguous(seqlen: Whole, world: int, rank: Whole) -> Pieces:
    return ((rank * seqlen // world, (rank + 1) * seqlen // world, 1),)


def _zigzag(seqlen: Whole, world: int, rank: Whole) -> Pieces:
    """Give each rank chunks ``rank`` and ``2 * world - 1 - rank`` of 2 * world chunks.

    Every rank then has the same share of a causal triangle. The remainder of the division goes to the first chunk of
    ranks 0, 1, ... and then to their last chunk, so shards differ by at most one token.
    """
    size, extra = seqlen // (2 * world), seqlen % (2 * world)

    def start(chunk: Whole) -> Whole:
        late = np.maximum(0, extra - world)  # ranks with a longer second chunk; they are the last chunks
        first = np.minimum(np.minimum(chunk, extra), world)
        return chunk * size + first + np.maximum(0, chunk - (2 * world - late))

    mirror = 2 * world - 1 - rank
    return (start(rank), start(rank + 1), 1), (start(mirror), start(mirror + 1), 1)


def _zigzag_by_halves(seqlen: Whole, world: int, rank: Whole) -> Pieces:
    """Zigzag over the first half of the sequence, and in reverse over the second. Each quarter is on all ranks."""
    half = seqlen // 2
    late = _zigzag(seqlen - half, world, world - 1 - rank)
    return *_zigzag(half, world, rank), *((half + start, half + stop, stride) for start, stop, stride in late)


def _striped(seqlen: Whole, world: int, rank: Whole) -> Pieces:
    return ((np.minimum(rank, seqlen), seqlen, world),)


# Suffix of a layout's name: each document is cut over the ranks separately. Commands don't offer it, because they plan
# once for all batches, and here each batch's documents decide which rank holds which tokens.
PER_DOCUMENT = "-per-document"

BALANCED = "balanced"
GIVEN = "given"  # each rank's stretches of positions are listed
MOST_SEGMENTS = 1 << 16  # cache the table of all ranks up to this many segments

LAYOUTS: dict[str, Callable[[Whole, int, Whole], Pieces]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "zigzag-by-halves": _zigzag_by_halves,
    "striped": _striped,
    BALANCED: _zigzag,  # for one causal document; plan/balance.py places several
}

STRETCHES = {"zigzag": 2, "zigzag-by-halves": 4}


def _stretch(value: Any) -> range:
    """Return a (start, stop) pair as a range."""
    try:
        ends = (value.start, value.stop, value.step) if isinstance(value, range) else (*value, 1)
        start, stop, step = map(index, ends)
    except (TypeError, ValueError):
        raise TypeError(f"stretch {value!r} must be a range or a pair of integers (start, stop)") from None
    if step != 1 or not 0 <= start <= stop:
        raise ValueError(f"stretch {value!r} must have 0 <= start <= stop, and step 1")
    return range(start, stop)


def digest(part: Any) -> str:
    """Return a digest of a dataclass's fields; equal on two ranks only if the fields are."""
    return hashlib.blake2b(repr(astuple(part)).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Layout:
    """``seqlen`` positions over ``world`` ranks, by one of :data:`LAYOUTS`.

    With ``-per-document`` after its name a layout cuts each document (borders: ``documents``) over all ranks. A rank
    holds its parts one after another. Under a causal mask ``zigzag-per-document`` gives every rank the same work for
    any document lengths. Shards differ by at most one token per document.

    ``balanced`` follows ``mask``. Each document is on the fewest ranks that have room for it. No rank has over 1 / 16
    more tokens than the mean. Without a window, all ranks have the same work within a few percent.
    """

    name: str
    seqlen: int
    world: int
    documents: tuple[int, ...] | None = field(default=None, repr=False)
    mask: Mask | None = field(default=None, repr=False)  # for a balanced layout; None: causal
    start: int = 0  # the position of the first token
    listing: tuple[Segments, ...] | None = field(default=None, repr=False)  # of :meth:`of_stretches`

    def __post_init__(self) -> None:
        if self.listing is None and self._plain not in LAYOUTS:
            raise ValueError(
                f"layout={self.name!r} is unknown; choose one of {', '.join(LAYOUTS)}, with {PER_DOCUMENT} after it to "
                "cut each document separately"
            )
        if self._plain == BALANCED and self.per_document:
            raise ValueError(
                f"layout={self.name!r} is not allowed: {BALANCED} always follows the documents; use layout={BALANCED!r}"
            )
        if self.seqlen < 0 or self.world < 1:
            raise ValueError(f"seqlen={self.seqlen} must be at least 0 and world={self.world} at least 1")

    @classmethod
    def of_stretches(cls, stretches: Sequence[Sequence[Any]]) -> Layout:
        """Return a layout in which each rank holds the listed stretches, such as ``[[(0, 4), (8, 9)], [(4, 8)]]``.

        ``stretches``: by rank, ascending (start, stop) pairs or ranges; none is allowed, and so are positions that no
        rank holds. Raise TypeError or ValueError if one is no such pair, two overlap, or a rank's do not ascend.
        """
        parts = tuple(joined(map(_stretch, each)) for each in stretches)
        for before, after in (pair for each in parts for pair in pairwise(each)):
            if after.start < before.stop:
                raise ValueError(
                    f"stretch ({after.start}, {after.stop}) follows ({before.start}, {before.stop}) on a rank; list "
                    "each rank's stretches in ascending order, without overlap"
                )
        for before, after in pairwise(sorted((s for each in parts for s in each), key=lambda s: s.start)):
            if after.start < before.stop:
                raise ValueError(
                    f"stretches ({before.start}, {before.stop}) and ({after.start}, {after.stop}) overlap; put each "
                    "position on one rank"
                )
        return cls(GIVEN, max((s.stop for each in parts for s in each), default=0), len(parts), listing=parts)

    def segments(self, rank: int) -> Segments:
        """Return the positions of ``rank`` in local order, without empty segments."""
        return tuple(
            range(start, start + n * stride, stride) for start, n, stride in self.table([rank])[:, 2:].tolist()
        )

    def table(self, ranks: Sequence[int]) -> np.ndarray:
        """Return the segments of these ranks, int64 [N, 5]: owner, local offset, first position, length, stride."""
        if not self._listed and self.world * len(self._parts) > MOST_SEGMENTS:
            return self._segments_of(ranks)
        table, begins = self._of_all
        if len(ranks) == self.world:
            return table
        return np.concatenate([table[:0], *(table[begins[rank] : begins[rank + 1]] for rank in ranks)])

    def _segments_of(self, ranks: Sequence[int]) -> np.ndarray:
        """Return the segment table of these ranks, as :data:`LAYOUTS` defines each part."""
        owners, borders = np.asarray(ranks, np.int64)[:, None], np.asarray(self._parts, np.int64)
        lengths, columns = np.diff(borders), []
        for start, stop, stride in LAYOUTS[self._plain](lengths, self.world, owners):
            count = np.maximum(0, -((start - stop) // stride)) + 0 * (owners + lengths)
            first = start + borders[:-1] + self.start + 0 * count
            columns.append((0 * count + owners, count, first, 0 * count + stride))
        owner, counts, first, strides = (
            np.stack(parts, 2).reshape(len(owners), -1) for parts in zip(*columns, strict=True)
        )
        return np.stack([owner, np.cumsum(counts, 1) - counts, first, counts, strides], 2)[counts > 0]

    @cached_property
    def _of_all(self) -> tuple[np.ndarray, np.ndarray]:
        """The table of all ranks, and each rank's first row in it."""
        if not self._listed:
            table = self._segments_of(range(self.world))
        else:
            placed = self.listing or place(self.mask or Mask(), self.seqlen, self.world)
            rows = [(rank, 0, s.start + self.start, len(s), 1) for rank, each in enumerate(placed) for s in each]
            table = np.array(rows, np.int64).reshape(-1, 5)
            offsets = np.cumsum(table[:, 3]) - table[:, 3]
            table[:, 1] = offsets - offsets[np.searchsorted(table[:, 0], table[:, 0])]  # from the rank's first row
        return table, np.searchsorted(table[:, 0], np.arange(self.world + 1))

    @property
    def description(self) -> str:
        """The name, with a digest if documents or the mask matter; equal on two ranks iff their layouts are."""
        return self.name + (f" (digest {digest(self)})" if self.documents or self.mask or self.listing else "")

    def cut_for(self, mask: Mask, seqlen: int) -> Layout:
        """Return the layout of this name for ``seqlen`` tokens under ``mask``."""
        documents = tuple(mask.cu_seqlens) if self.per_document and mask.cu_seqlens is not None else None
        by = replace(mask, blocks=None, block=None, together=None) if self.name == BALANCED else None
        return replace(self, seqlen=seqlen, documents=documents, mask=by)

    @property
    def by_mask(self) -> bool:
        """Whether the placement of tokens depends on the mask."""
        return self.per_document or self.name == BALANCED

    @property
    def stretches(self) -> int:
        """Number of equal parts of the sequence of which each is spread evenly over all ranks."""
        return STRETCHES.get(self.name, 1)

    @property
    def spreads_documents(self) -> bool:
        """Whether each document is spread over all ranks."""
        return self.per_document or self.name == "striped"

    @property
    def per_document(self) -> bool:
        """Whether each document is cut separately."""
        return self._plain != self.name

    @property
    def _plain(self) -> str:
        return self.name.removesuffix(PER_DOCUMENT) if isinstance(self.name, str) else self.name

    @property
    def _parts(self) -> tuple[int, ...]:
        """Borders of the parts that are cut separately; a single rank holds everything in order."""
        apart = self.per_document and self.documents and self.world > 1
        return self.documents if apart else (0, self.seqlen)  # type: ignore[return-value]

    @property
    def _listed(self) -> bool:
        """Whether the segments are a list, not a formula."""
        return self.listing is not None or self.name == BALANCED

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        table, lengths = self.table(range(self.world)), np.zeros(self.world, np.int64)
        np.add.at(lengths, table[:, 0], table[:, 3])
        return tuple(lengths.tolist())

    def positions(self, rank: int) -> np.ndarray:
        """Return the global position of each local token of ``rank``, int64 [S_local]."""
        _, offsets, firsts, counts, strides = self.table([rank]).T
        strides = np.repeat(strides, counts)
        return np.repeat(firsts, counts) + strides * (np.arange(len(strides)) - np.repeat(offsets, counts))

    @cached_property
    def gather_order(self) -> np.ndarray:
        """Place of each global position in the shards concatenated by rank, int64 [S]."""
        order = np.empty(self.seqlen, np.int64)
        order[np.concatenate([self.places(rank) for rank in range(self.world)])] = np.arange(self.seqlen)
        return order

    def places(self, rank: int) -> np.ndarray:
        """Return the place in the whole tensor of each local token of ``rank``, int64 [S_local]."""
        return self.positions(rank) - self.start

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + self.seqlen

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of all segments, ascending."""
        return tuple(np.unique(self.table(range(self.world))[:, 4]).tolist())
