"""Sort tiles by pair, and join tiles that one band covers.

A zigzag diagonal, for example, becomes one causal tile instead of three. A table's columns are query owner, key owner,
region, then a tile. Everything works on arrays, because thousands of documents have hundreds of thousands of tiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np

from .band import band_area

MOST_AT_ONCE = 1 << 20  # pairs of tiles compared at a time
MANY = 64  # tiles of a pair and region, such as a cache's pages, above which neighbours in a row are joined first


def joined(table: np.ndarray) -> np.ndarray:
    """Return fewer tiles that cover the same pairs, sorted by query owner, key owner, query and key."""
    table = _rows_joined(_in_order(table, (2, 3, 5)))
    same = np.all(table[1:, :3] == table[:-1, :3], axis=1)
    if not same.any():
        return _in_order(table, (3, 5))
    first = np.flatnonzero(np.r_[True, ~same])  # first tile of each pair and region
    counts = np.diff(np.r_[first, len(table)])
    merged, at = [table[first[counts == 1]]], [first[counts == 1]]
    for count in np.unique(counts[counts > 1]).tolist():
        begins = first[counts == count]
        some = _joinable(table, begins, count)
        alone = (begins[~some][:, None] + np.arange(count)).ravel()
        merged, at, begins = [*merged, table[alone]], [*at, alone], begins[some]
        for tiles, group in _join(table[begins[:, None] + np.arange(count), 3:]) if len(begins) else ():
            merged.append(np.concatenate([table[begins[group], :3], tiles], 1))
            at.append(begins[group])
    return _in_order(np.concatenate(merged)[np.argsort(np.concatenate(at), kind="stable")], (3, 5))


def _rows_joined(table: np.ndarray) -> np.ndarray:
    """Join full tiles that are neighbours in a row, where a pair has many tiles: comparing all pairs would be slow."""
    another = np.r_[True, np.any(table[1:, :3] != table[:-1, :3], axis=1)][: len(table)]
    many = np.diff(np.r_[np.flatnonzero(another), len(table)]) > MANY
    if not many.any():
        return table
    _, _, _, q0, q1, k0, k1, lo, hi = table.T
    full = (lo == 1 + k0 - k1) & (hi == q1 - q0 - 1) & many[np.cumsum(another) - 1]
    goes_on = full[1:] & full[:-1] & ~another[1:] & (k0[1:] == k1[:-1])
    goes_on &= (q0[1:] == q0[:-1]) & (q1[1:] == q1[:-1])
    first = np.flatnonzero(np.r_[True, ~goes_on])
    rows = table[first].copy()
    rows[:, 6] = k1[np.r_[first[1:], len(table)] - 1]
    rows[:, 7] = np.where(full[first], 1 + rows[:, 5] - rows[:, 6], rows[:, 7])
    return rows


def _in_order(table: np.ndarray, columns: tuple[int, ...]) -> np.ndarray:
    """Sort by owners, then by ``columns``. Most tables are nearly sorted, so sort only where needed."""
    order = None
    for column in (1, 0):
        owner = table[:, column] if order is None else table[order, column]
        if (owner[1:] < owner[:-1]).any():
            narrow = np.int16 if int(owner.max()) < 1 << 15 else np.int64  # numpy has a radix sort for int16
            turn = np.argsort(owner.astype(narrow), kind="stable")
            order = turn if order is None else order[turn]
    if order is not None:
        table = table.T.take(order, 1).T
    before, after = table[:-1], table[1:]
    alike, late = np.ones(len(before), bool), np.zeros(len(before), bool)
    for column in (0, 1, *columns):
        if column > 1:
            late |= alike & (after[:, column] < before[:, column])
        alike &= after[:, column] == before[:, column]
    if late.any():
        table = table[np.lexsort([table[:, column] for column in (*columns[::-1], 1, 0)])]
    return table


def _joinable(table: np.ndarray, begins: np.ndarray, count: int) -> np.ndarray:
    """Return which groups of ``count`` tiles have two that touch, bool [groups]."""
    few = max(1, MOST_AT_ONCE // count**2)
    flags = [np.zeros(0, bool)]
    for n in range(0, len(begins), few):
        touch = _touching(table[begins[n : n + few, None] + np.arange(count), 3:])
        flags.append(np.any(touch.reshape(len(touch), -1), 1))
    return np.concatenate(flags)


def _join(tiles: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Join pairs of tiles in each group [G, n, 6] until none can be; return tiles [N, 6] and their groups."""
    done: list[tuple[np.ndarray, np.ndarray]] = []
    group, count = np.arange(len(tiles)), tiles.shape[1]
    pairs: Iterable[tuple[int, int]] = combinations(range(count), 2)
    if count > 3:  # few of many tiles touch
        few = max(1, MOST_AT_ONCE // count**2)
        touch = np.any([_touching(tiles[n : n + few]).any(0) for n in range(0, len(tiles), few)], 0)
        pairs = ((a, b) for a, b in np.argwhere(np.triu(touch)).tolist())
    for a, b in pairs:
        both, fits = _around(tiles[:, a], tiles[:, b])
        rest = [n for n in range(count) if n not in (a, b)]
        fewer = np.concatenate([both[fits, None], tiles[fits][:, rest]], 1)
        done += [(each, group[fits][at]) for each, at in _join(fewer)] if len(fewer) else []
        tiles, group = tiles[~fits], group[~fits]
    return [*done, *((tiles[:, n], group) for n in range(count) if len(group))]


def _touching(tiles: np.ndarray) -> np.ndarray:
    """Return which tiles of groups [G, n, 6] touch in both queries and keys, bool [G, n, n]; others can't be joined."""
    touch: np.ndarray = ~np.eye(tiles.shape[1], dtype=bool)[None]
    for column in (0, 2):
        start, stop = tiles[:, :, column], tiles[:, :, column + 1]
        touch = touch & (start[:, :, None] <= stop[:, None]) & (start[:, None] <= stop[:, :, None])
    return touch


def _around(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest tiles around a and b (disjoint), and which cover no other pair: areas suffice to tell."""
    a, b = a.T, b.T
    q0, q1, k0, k1 = (f(a[n], b[n]) for n, f in enumerate((np.minimum, np.maximum, np.minimum, np.maximum)))
    shifts = [t[0] - q0 - (t[2] - k0) for t in (a, b)]
    lo = np.minimum(a[4] + shifts[0], b[4] + shifts[1])
    hi = np.maximum(a[5] + shifts[0], b[5] + shifts[1])
    area = sum(band_area(t[1] - t[0], t[3] - t[2], t[4], t[5]) for t in (a, b))
    return np.stack([q0, q1, k0, k1, lo, hi], 1), band_area(q1 - q0, k1 - k0, lo, hi) == area
