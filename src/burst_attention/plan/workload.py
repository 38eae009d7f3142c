"""How much each rank has to do by a layout and a mask, without tiles: from segments and regions, whatever the pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .layout import Layout
from .mask import Mask
from .rows import Side
from .tile import clip_segments, meeting


@dataclass(frozen=True)
class Imbalance:
    """The busiest rank's share in means of all ranks; 1 is even.

    Attributes:
        queries: (query, key) pairs that its queries see: its work where keys and values travel.
        keys: pairs in which its keys are seen: its work where the query side travels.
        tokens: that it holds.
    """

    queries: float
    keys: float
    tokens: float


def imbalance(layout: Layout, mask: Mask) -> Imbalance:
    """How evenly a layout spreads the work of a mask: in milliseconds, for choosing between layouts."""
    regions = mask.regions(layout.seqlen)
    each = [work_by_rank(layout, regions, side) for side in (Side.QUERY, Side.KEY)]
    return Imbalance(*(_most_in_means(x) for x in (*each, np.array(layout.lengths))))


def _most_in_means(x: np.ndarray) -> float:
    total = int(x.sum())
    return int(x.max()) * len(x) / total if total else 1.0


def work_by_rank(layout: Layout, regions: np.ndarray, side: Side) -> np.ndarray:
    """int64 [W]: how many (query, key) pairs each rank's queries see, or its keys are seen in."""
    own, other = (slice(0, 2), slice(2, 4)) if side is Side.QUERY else (slice(2, 4), slice(0, 2))
    segments = layout.table(range(layout.world))
    region, at = meeting(segments, *regions[:, own].T)
    segments, regions = segments[at], regions[region]
    stride = segments[:, 4]
    q_or_k, past = regions[:, own].T
    begin, end = clip_segments(segments, q_or_k, past, stride)
    first, count = segments[:, 2] + begin * stride, np.maximum(0, end - begin)
    (start, stop), (lo, hi) = regions[:, other].T, regions[:, 4:].T
    if side is Side.QUERY:  # keys k of start <= k < stop with q - hi <= k <= q - lo
        below, above = first - hi - start, first - lo + 1 - start
    else:  # queries q with k + lo <= q <= k + hi
        below, above = first + lo - start, first + hi + 1 - start
    work = np.zeros(layout.world, np.int64)
    total = _clipped_sum(above, stride, count, stop - start) - _clipped_sum(below, stride, count, stop - start)
    np.add.at(work, segments[:, 0], total)
    return work


def _clipped_sum(first: np.ndarray, stride: np.ndarray, count: np.ndarray, most: np.ndarray) -> np.ndarray:
    """The sum of min(max(first + n * stride, 0), most) over n < count."""
    rises = np.clip(-(first // stride), 0, count)  # the first n of which it is not below 0
    tops = np.clip(-((first - most) // stride), rises, count)  # the first n of which it is ``most``
    between = tops - rises
    return between * (first + rises * stride) + stride * (between * (between - 1) // 2) + (count - tops) * most
