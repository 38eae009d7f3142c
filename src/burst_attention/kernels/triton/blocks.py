"""Device tables of the tiles that intersect each block of rows, so that one launch handles any number of tiles."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...plan.tile import Tiles
from ..contract import capturing


@dataclass(frozen=True, eq=False)
class Blocks:
    """int32 tables on one device. Block b intersects the tiles ids[offsets[b] : offsets[b + 1]] of ``tiles`` [T, 6]."""

    tiles: Tensor
    offsets: Tensor
    ids: Tensor


def meetings(starts: np.ndarray, stops: np.ndarray, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (offsets, ids) of the intervals [starts, stops) in each block of ``size`` of ``length`` rows."""
    blocks = -(-length // size)
    first, last = starts // size, (stops - 1) // size
    counts = last - first + 1
    ids = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    block = np.repeat(first, counts) + within
    order = np.argsort(block, kind="stable")
    return np.r_[0, np.cumsum(np.bincount(block, minlength=blocks))], ids[order]


@dataclass(eq=False)
class BlockTables:
    """A cache of tables that live as long as their tiles. A plan has the same tiles in every call."""

    known: weakref.WeakKeyDictionary[Tiles, dict] = field(default_factory=weakref.WeakKeyDictionary)

    def get(self, tiles: Tiles, *, keys: bool, size: int, length: int, device: torch.device) -> Blocks:
        """Return the tables for blocks of ``size`` query rows, or with ``keys`` key columns, out of ``length``."""
        tables = self.known.setdefault(tiles, {})
        key = (keys, size, length, device)
        if key not in tables:
            if capturing():
                raise RuntimeError(
                    "kernel='triton' makes tables on a plan's first call; make one call before capturing a CUDA graph"
                )
            starts, stops = tiles.table[:, 2 * keys], tiles.table[:, 2 * keys + 1]
            arrays = (tiles.table, *meetings(starts, stops, size, length))
            # The programs read rows, so the arrays must be C-contiguous.
            rows = (np.ascontiguousarray(x, np.int32) for x in arrays)
            tables[key] = Blocks(*(torch.from_numpy(x).to(device, non_blocking=True) for x in rows))
        return tables[key]
