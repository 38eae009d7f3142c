"""Tables for the terminal, and the text of their cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from burst_train import figures


def ranks_text(world: int) -> str:
    """Return a text such as ``8 ranks``."""
    return f"{world} rank" + "s" * (world != 1)


def link_text(link: float | None) -> str:
    """Return a rate (bits per second) as text such as ``200 Mbit/s``; ``no limit`` for None."""
    return "no limit" if link is None else figures.scaled(link, "bit/s")


def bytes_text(count: float | None) -> str:
    """Return bytes in decimal units, such as ``12.3 MB``; a dash for None."""
    return "-" if count is None else figures.bytes_text(count)


def number_text(value: float | None) -> str:
    """Return three significant digits, with thousands separators; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def mebibytes(size: float | None, digits: int = 0) -> str:
    """Return a text such as ``1,234 MiB``; a dash for None."""
    return "-" if size is None else f"{size / 2**20:,.{digits}f} MiB"


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return ``median (minimum to maximum)``; a dash without values."""
    if not values:
        return "-"
    low, middle, high = (format(x, form) for x in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
