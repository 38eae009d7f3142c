"""Arithmetic of bands in rectangles, for one band or arrays of them."""

from __future__ import annotations

import numpy as np


def tighten(rows, columns, lo, hi):  # type: ignore[no-untyped-def]  # ints or int arrays
    """Shrink a rows x columns rectangle to the part that a band uses.

    Row i sees something iff lo <= i <= columns - 1 + hi, and columns likewise. Nothing is seen if the part is empty or
    hi < lo. Return (top, bottom, left, right, lo, hi): the part's borders, and the band counted from its corner.
    """
    top, bottom = np.maximum(0, lo), np.minimum(rows, columns + hi)
    left, right = np.maximum(0, -hi), np.minimum(columns, rows - lo)
    lo, hi = lo - top + left, hi - top + left
    return top, bottom, left, right, np.maximum(lo, left + 1 - right), np.minimum(hi, bottom - top - 1)


def band_area(rows, columns, lo, hi):  # type: ignore[no-untyped-def]  # ints or int arrays
    """Count the (i, j) of a rows x columns rectangle with lo <= i - j <= hi."""

    def at_most(d):  # type: ignore[no-untyped-def]
        whole = np.clip(d + 1, 0, rows)  # rows that see every column
        partly = np.clip(columns + d, whole, rows) - whole  # rows i = whole, ... that see columns + d - i of them
        return whole * columns + partly * (columns + d) - partly * (2 * whole + partly - 1) // 2

    return at_most(hi) - at_most(lo - 1)
