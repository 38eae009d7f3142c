"""Attention masks: the (query, key) pairs that are seen, as disjoint bands over global positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np


def _integer(name: str, value: Any) -> int:
    try:
        exact = int(value)
        if isinstance(value, bool) or exact != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}={value!r} must be an integer") from None
    return exact


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


@dataclass(frozen=True)
class BlockPattern:
    """A square bool array in few bytes: row i says which columns of blocks the queries of block i see."""

    count: int
    bits: bytes

    @classmethod
    def of(cls, pattern: Any) -> BlockPattern:
        """Pack an array or tensor of booleans. Raise TypeError or ValueError if it is not a square of booleans."""
        if isinstance(pattern, BlockPattern):
            return pattern
        array = _array(pattern)
        if array.dtype != bool:
            raise TypeError(f"blocks has dtype {array.dtype}; pass booleans, True where queries see keys")
        if array.ndim != 2 or array.shape[0] != array.shape[1]:
            raise ValueError(f"blocks has shape {list(array.shape)}; it must be square: [S / block, S / block]")
        return cls(len(array), np.packbits(array).tobytes())

    def array(self) -> np.ndarray:
        """Return the blocks as bool [count, count]."""
        packed = np.frombuffer(self.bits, np.uint8)
        return np.unpackbits(packed, count=self.count**2).astype(bool).reshape(self.count, self.count)

    def resized(self, count: int) -> BlockPattern:
        """Return a similar pattern of ``count`` blocks a side."""
        at = np.arange(count) * self.count // max(1, count)
        return BlockPattern.of(self.array()[np.ix_(at, at)])

    def rectangles(self, causal: bool) -> np.ndarray:
        """Return disjoint rectangles of the seen blocks, int64 [N, 4]: rows and columns, each start and stop.

        Equal runs of neighbouring rows form one rectangle. With ``causal``, blocks above the diagonal are those of the
        diagonal: the band hides them, and long runs need fewer rectangles.
        """
        seen = self.array()
        if causal:
            seen = np.where(np.triu(np.ones_like(seen), 1), seen.diagonal()[:, None], seen)
        edges = np.diff(np.pad(seen, ((0, 0), (1, 1))).astype(np.int8), axis=1)
        (row, start), (_, stop) = np.nonzero(edges == 1), np.nonzero(edges == -1)
        order = np.lexsort([row, stop, start])
        row, start, stop = row[order], start[order], stop[order]
        follows = (row[1:] == row[:-1] + 1) & (start[1:] == start[:-1]) & (stop[1:] == stop[:-1])
        first = np.flatnonzero(np.r_[True, ~follows][: len(row)])
        last = np.r_[first[1:], len(row)][: len(first)] - 1
        rectangles = np.stack([row[first], row[last] + 1, start[first], stop[first]], axis=1)
        return rectangles[np.lexsort([rectangles[:, 2], rectangles[:, 0]])]

    def __repr__(self) -> str:
        seen, number = self.array().sum(), hashlib.blake2b(self.bits, digest_size=8).hexdigest()
        return f"<{seen} of {self.count} x {self.count}, digest {number}>"


@dataclass(frozen=True)
class TokenGroups:
    """Groups of tokens that see each other both ways, as runs of neighbours: (start, stop, group)."""

    length: int
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, groups: Any) -> TokenGroups:
        """Convert a row of group numbers, one for each token. Raise TypeError or ValueError for anything else."""
        if isinstance(groups, TokenGroups):
            return groups
        numbers = _array(groups)
        if numbers.dtype.kind not in "iu" and numbers.size:
            raise TypeError(f"together has dtype {numbers.dtype}; pass integers, the group of each token or -1")
        if numbers.ndim != 1:
            raise ValueError(f"together has shape {list(numbers.shape)}; pass one group number per token, or -1")
        edges = np.flatnonzero(np.diff(numbers)) + 1
        starts, stops = np.r_[0, edges][: len(numbers)], np.r_[edges, len(numbers)][: len(numbers)]
        runs = zip(starts.tolist(), stops.tolist(), numbers[starts].tolist(), strict=True)
        return cls(len(numbers), tuple(run for run in runs if run[2] >= 0))

    def array(self) -> np.ndarray:
        """Return each token's group, int64 [length]; -1 for none."""
        numbers = np.full(self.length, -1, np.int64)
        for start, stop, group in self.runs:
            numbers[start:stop] = group
        return numbers

    @property
    def reach(self) -> int:
        """The largest distance between two tokens of a group, plus one."""
        ends: dict[int, tuple[int, int]] = {}
        for start, stop, group in self.runs:
            ends[group] = ends.get(group, (start, stop))[0], stop
        return max((stop - start for start, stop in ends.values()), default=0)

    def later_keys(self, borders: np.ndarray) -> np.ndarray:
        """Return the pairs of a document and a group whose key is later than its query, as regions [R, 6]."""
        rows, open_runs = [], dict[tuple[int, int], list[tuple[int, int]]]()
        for start, stop, group in self.runs:
            inner = np.unique(borders[(borders > start) & (borders < stop)])
            for first, last in pairwise([start, *inner.tolist(), stop]):
                earlier = open_runs.setdefault((int(np.searchsorted(borders, first, "right")), group), [])
                rows += [(*run, first, last, run[0] - last + 1, run[1] - 1 - first) for run in earlier]
                rows.append((first, last, first, last, first - last + 1, -1))
                earlier.append((first, last))
        regions = np.array(rows, np.int64).reshape(-1, 6)
        return regions[regions[:, 4] <= regions[:, 5]]

    def __repr__(self) -> str:
        number = hashlib.blake2b(repr(self.runs).encode(), digest_size=8).hexdigest()
        return f"<{len(self.runs)} runs in {self.length} tokens, digest {number}>"


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees. All rows of a batch share one mask.

    Args:
        causal: a query at position p sees keys at positions <= p.
        window: a query sees only keys at a distance below ``window``: itself and ``window`` - 1 earlier keys, and
            without ``causal`` as many later ones.
        cu_seqlens: global document borders ``[0, ..., S]``. A query sees only keys of its document. Pass any sequence
            of integers or a 1-D tensor. Repeated borders are empty documents.
        prefix: every query sees positions < ``prefix``. It can't be combined with ``cu_seqlens`` or ``window``.
        blocks: bool [N, N], N = S / ``block`` rounded up. Of what the other fields let them see, queries of block i see
            only keys of those blocks j for which ``blocks[i, j]`` is True. Other blocks cost neither time nor bytes.
            Pass an array or a tensor. A query may see nothing: its output is 0 and its lse -inf.
        block: the number of tokens in a block; the last one may be shorter.
        together: int [S], a group number for each token, -1 for none. In a causal mask a query also sees the later keys
            of the same group, as the tokens of an image do in some vision-language models. The tokens of a group need
            not be neighbours. Needs ``causal``; it can't be combined with ``prefix`` or ``blocks``.
    """

    causal: bool = True
    window: int | None = None
    cu_seqlens: Sequence[int] | None = None
    prefix: int | None = None
    blocks: Any = None
    block: int | None = None
    together: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal={self.causal!r} must be True or False")
        if self.window is not None:
            object.__setattr__(self, "window", _integer("window", self.window))
            if self.window < 1:
                raise ValueError(f"window={self.window} must be at least 1; a query always sees its own position")
        if self.prefix is not None:
            object.__setattr__(self, "prefix", _integer("prefix", self.prefix))
            if self.prefix < 0:
                raise ValueError(f"prefix={self.prefix} must be at least 0")
            other = "window" if self.window is not None else "cu_seqlens" if self.cu_seqlens is not None else None
            if other:
                raise ValueError(f"prefix={self.prefix} can't be combined with {other}; leave one of them out")
        if self.cu_seqlens is not None:
            object.__setattr__(self, "cu_seqlens", self._borders(self.cu_seqlens))
        if (self.blocks is None) != (self.block is None):
            name, other = ("block", "blocks") if self.blocks is None else ("blocks", "block")
            raise ValueError(f"{name} needs {other}; pass Mask(blocks=..., block=128), or neither")
        if self.block is not None:
            object.__setattr__(self, "block", _integer("block", self.block))
            if self.block < 1:
                raise ValueError(f"block={self.block} must be at least 1 token")
            object.__setattr__(self, "blocks", BlockPattern.of(self.blocks))
        if self.together is not None:
            object.__setattr__(self, "together", TokenGroups.of(self.together))
            if not self.causal or self.prefix is not None or self.blocks is not None:
                other = "causal=False" if not self.causal else "prefix" if self.prefix is not None else "blocks"
                raise ValueError(f"together can't be combined with {other}; leave one of them out")

    @staticmethod
    def _borders(array: Any) -> tuple[int, ...]:
        try:
            values = list(array.tolist() if hasattr(array, "tolist") else array)
        except TypeError:
            raise TypeError(f"cu_seqlens={array!r} must be a sequence of integers, the borders [0, ..., S]") from None
        borders = tuple(_integer("cu_seqlens entry", value) for value in values)
        if not borders or borders[0] != 0:
            raise ValueError(f"cu_seqlens={_short(borders)} must start with 0, the first document's border")
        for before, after in pairwise(borders):
            if after < before:
                raise ValueError(f"cu_seqlens falls from {before} to {after}; borders must not decrease")
        return borders

    def check(self, seqlen: int) -> None:
        """Raise ValueError if this mask doesn't fit ``seqlen`` positions."""
        if self.cu_seqlens is not None and self.cu_seqlens[-1] != seqlen:
            raise ValueError(
                f"cu_seqlens ends at {self.cu_seqlens[-1]}, the sequence at {seqlen}; the last border must equal seqlen"
            )
        if self.prefix is not None and self.prefix > seqlen:
            raise ValueError(f"prefix={self.prefix} is longer than the sequence; it must be at most seqlen={seqlen}")

        if self.block is not None and self.blocks.count != -(-seqlen // self.block):
            raise ValueError(
                f"blocks has {self.blocks.count} rows of block={self.block} tokens, but seqlen={seqlen} needs "
                f"{-(-seqlen // self.block)}; pass one row and one column for each block"
            )
        if self.together is not None and self.together.length != seqlen:
            raise ValueError(
                f"together has {self.together.length} entries, the sequence {seqlen} tokens; pass one for each token"
            )

    @cached_property
    def parts(self) -> int:
        """Number of documents, or of rectangles of blocks or runs of groups if there are more."""
        rectangles = 0 if self.block is None else len(self.blocks.rectangles(self.causal))
        runs = 0 if self.together is None else len(self.together.runs)
        return max(1, len(self.cu_seqlens or ()) - 1, rectangles, runs)

    @property
    def banded(self) -> bool:
        """Whether some band is neither full nor causal, as those of windows, of later keys and of cut diagonals."""
        return self.window is not None or self.block is not None or self.together is not None

    def resized(self, seqlen: int) -> Mask:
        """Return a similar mask for ``seqlen`` positions, for predictions only; groups are few pairs, and left out."""
        blocks = None if self.block is None else self.blocks.resized(-(-seqlen // self.block))
        return self if blocks is None and self.together is None else replace(self, blocks=blocks, together=None)

    def regions(self, seqlen: int) -> np.ndarray:
        """Return disjoint (q_start, q_stop, k_start, k_stop, lo, hi), int64 [R, 6]; lo <= q - k <= hi is seen."""
        self.check(seqlen)
        regions = self._bands(seqlen)
        if self.together is not None:
            borders = np.asarray([0, seqlen] if self.cu_seqlens is None else self.cu_seqlens, np.int64)
            return np.concatenate([regions, self.together.later_keys(borders)])
        if self.block is None:
            return regions
        rectangles = np.minimum(self.block * self.blocks.rectangles(self.causal and not self.prefix), seqlen)
        return _intersection(regions, rectangles)

    def _bands(self, seqlen: int) -> np.ndarray:
        """Return the regions without blocks."""
        far = max(seqlen - 1, 0)
        hi = far if self.window is None else min(far, self.window - 1)
        lo = 0 if self.causal else -hi
        if self.prefix is not None and self.causal:
            return np.array(
                [(0, seqlen, 0, self.prefix, -far, far), (self.prefix, seqlen, self.prefix, seqlen, 0, far)]
            )
        borders = np.array([0, seqlen] if self.cu_seqlens is None else self.cu_seqlens, dtype=np.int64)
        start, stop = borders[:-1], borders[1:]
        start, stop = start[stop > start], stop[stop > start]
        band = np.full_like(start, lo), np.full_like(start, hi)
        return np.stack([start, stop, start, stop, *band], axis=1)

    def dense(self, seqlen: int) -> np.ndarray:
        """Return the mask as bool [S, S], True where seen: the reference, which does not use :meth:`regions`."""
        self.check(seqlen)
        q, k = np.arange(seqlen)[:, None], np.arange(seqlen)[None, :]
        seen = (k <= q) if self.causal else np.ones((seqlen, seqlen), bool)
        if self.together is not None:
            groups = self.together.array()
            seen = seen | ((groups[:, None] == groups) & (groups >= 0))
        if self.window is not None:
            seen = seen & (q - k < self.window) & (self.causal | (k - q < self.window))
        if self.prefix is not None:
            seen = seen | (k < self.prefix)
        if self.cu_seqlens is not None:
            document = np.searchsorted(np.asarray(self.cu_seqlens[1:]), np.arange(seqlen), side="right")
            seen = seen & (document[:, None] == document[None, :])
        if self.block is not None:
            seen = seen & self.blocks.array()[np.ix_(q[:, 0] // self.block, k[0] // self.block)]
        return seen

    def document_positions(self, positions: np.ndarray) -> np.ndarray:
        """Return each position's offset from the start of its document."""
        if self.cu_seqlens is None:
            return positions
        borders = np.asarray(self.cu_seqlens, np.int64)
        return positions - borders[np.searchsorted(borders, positions, side="right") - 1]

    def __repr__(self) -> str:
        """Show all fields that are set. Ranks also compare this text to check that their masks are equal."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.cu_seqlens is not None:
            said["cu_seqlens"] = _short(tuple(self.cu_seqlens))
        return f"Mask({', '.join(f'{name}={value}' for name, value in said.items() if value is not None)})"


def _intersection(regions: np.ndarray, rectangles: np.ndarray) -> np.ndarray:
    """Return what regions [R, 6] share with rectangles [N, 4], both disjoint, as regions."""
    pieces, furthest = [np.empty((0, 6), np.int64)], np.maximum.accumulate(rectangles[:, 1])
    for q_start, q_stop, k_start, k_stop, lo, hi in regions.tolist():
        near = slice(np.searchsorted(furthest, q_start, "right"), np.searchsorted(rectangles[:, 0], q_stop))
        starts = np.maximum(rectangles[near, ::2], (q_start, k_start))
        stops = np.minimum(rectangles[near, 1::2], (q_stop, k_stop))
        band = np.broadcast_to((lo, hi), starts.shape)
        some = np.stack([starts[:, 0], stops[:, 0], starts[:, 1], stops[:, 1], *band.T], axis=1)
        shared = (starts < stops).all(1)
        shared &= (some[:, 1] - 1 - some[:, 2] >= lo) & (some[:, 0] - some[:, 3] + 1 <= hi)  # the band meets it
        pieces.append(some[shared])
    return np.concatenate(pieces)


def _short(borders: tuple[int, ...]) -> str:
    if len(borders) <= 8:
        return str(list(borders))
    return f"[{', '.join(map(str, borders[:3]))}, ... {len(borders)} borders ..., {borders[-1]}]"
