"""Conversion of arguments to Python numbers."""

from __future__ import annotations

from numbers import Real
from typing import Any


def real(value: Any) -> int | float | None:
    """Return a real number (also numpy's, or a 0-d tensor without gradient) as Python's; None for others and bools."""
    if isinstance(value, float):  # first, because a compiler can't ask a variable number for other attributes
        return float(value)
    if getattr(value, "ndim", None) == 0 and not getattr(value, "requires_grad", False):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, int):
        return value
    return float(value)
