"""Which tiles meet each block of rows, as device tables: any number of tiles in one launch."""

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
    """int32 tables on one device: ``tiles`` [T, 6]; block b meets the tiles ids[offsets[b] : offsets[b + 1]]."""

    tiles: Tensor
    offsets: Tensor
    ids: Tensor


def meetings(starts: np.ndarray, stops: np.ndarray, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, ids) for intervals [starts, stops) and blocks of ``size`` of ``length`` rows, in the tiles' order."""
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
    """Tables that were made before, kept for as long as their tiles: a plan's are the same in every call."""

    known: weakref.WeakKeyDictionary[Tiles, dict] = field(default_factory=weakref.WeakKeyDictionary)

    def get(self, tiles: Tiles, *, keys: bool, size: int, length: int, device: torch.device) -> Blocks:
        """For blocks of ``size`` query rows, or with ``keys`` of columns, of ``length``."""
        tables = self.known.setdefault(tiles, {})
        key = (keys, size, length, device)
        if key not in tables:
            if capturing():
                raise RuntimeError("kernel='triton' must be called with this plan once before a CUDA graph's capture")
            starts, stops = tiles.table[:, 2 * keys], tiles.table[:, 2 * keys + 1]
            arrays = (tiles.table, *meetings(starts, stops, size, length))
            # Programs read them row by row, however numpy has laid them out.
            rows = (np.ascontiguousarray(x, np.int32) for x in arrays)
            tables[key] = Blocks(*(torch.from_numpy(x).to(device) for x in rows))
        return tables[key]
