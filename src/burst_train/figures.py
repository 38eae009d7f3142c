"""Numbers formatted for people: three digits and a unit, as in 1.4 GB, 23 ms."""

from __future__ import annotations

_LARGE = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def scaled(value: float, unit: str) -> str:
    """Format ``value`` with a unit prefix that leaves a number from 1 to 1000; thousands are ``k``."""
    power = 0
    while abs(value) >= 999.5 and power < len(_LARGE) - 1:
        value, power = value / 1000, power + 1
    return f"{digits(value)} {_LARGE[power]}{unit}"


def digits(value: float) -> str:
    """Format with three significant digits: no exponent, no trailing zeros, integers in full."""
    if value == 0:
        return "0"
    places = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds_text(value: float) -> str:
    """Format a duration in a unit from nanoseconds to days."""
    if value == 0:
        return "0 s"
    for most, size, unit in ((1e-6, 1e-9, "ns"), (1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s")):
        if value < 0.9995 * most:
            return f"{digits(value / size)} {unit}"
    for most, size, unit in ((7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if value < most:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value / 86400.0)} days"


def bytes_text(value: float) -> str:
    """Format bytes in powers of 1000, as vendors state device memory and bandwidth: 80 GB."""
    return scaled(value, "B")


def tokens_text(value: int) -> str:
    """Format a token count as flags take it: 1M is 1024 x 1024, 96K is 96 x 1024; others in full."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= size and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value:,}"
