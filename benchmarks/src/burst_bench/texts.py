"""Figures as text: the report, the pages and the terminal write them alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def ranks_text(world: int) -> str:
    """Such as ``8 ranks``."""
    return f"{world} rank" + "s" * (world != 1)


def link_text(link: float | None) -> str:
    """A rate in bits per second, such as ``200 Mbit/s``; or ``no limit``."""
    if link is None:
        return "no limit"
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if link >= size:
            return f"{link / size:.6g} {unit}"
    return f"{link:.6g} bit/s"


def bytes_text(count: float | None) -> str:
    """Bytes in decimal units, such as ``12.3 MB``; a dash for None."""
    if count is None:
        return "-"
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= size:
            return f"{number_text(count / size)} {unit}"
    return f"{count:.0f} B"


def number_text(value: float | None) -> str:
    """Three significant digits, thousands apart; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def mebibytes(size: float | None, digits: int = 0) -> str:
    """Such as ``1,234 MiB``; a dash for None."""
    return "-" if size is None else f"{size / 2**20:,.{digits}f} MiB"


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median (least to greatest); a dash for none."""
    if not values:
        return "-"
    low, middle, high = (format(x, form) for x in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
