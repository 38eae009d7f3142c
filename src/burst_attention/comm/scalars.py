"""What counts as a number among arguments."""

from __future__ import annotations

from numbers import Real
from typing import Any


def real(value: Any) -> int | float | None:
    """A real number as Python's own, be it numpy's or a 0-d tensor; None for anything else, bools among it.

    A tensor that wants a gradient is none: the number would have forgotten it.
    """
    if getattr(value, "ndim", None) == 0 and not getattr(value, "requires_grad", False):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, int):
        return value
    return float(value)
