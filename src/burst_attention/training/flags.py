"""What the values of flags must be, so that a wrong one is refused in a sentence that names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

MOST = 2**31  # of any count: its square is an int64 yet, as areas of masks are
MOST_RANKS = 1024
MOST_SECONDS = 1e9


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise ValueError unless ``holds``: the flag of the setting ``name``, its value, the rule that it breaks."""
    if not holds:
        raise ValueError(f"--{name.replace('_', '-')} {value} {rule}")


def each(values: Mapping[str, float], holds: Callable[[float], bool], rule: str) -> None:
    """:func:`require` of several settings."""
    for name, value in values.items():
        require(holds(value), name, value, rule)


def check_counts(values: Mapping[str, int | None], *, least: int = 1, most: int = MOST) -> None:
    """Raise ValueError for a number below ``least`` or above ``most``; None is not given."""
    for name, value in values.items():
        if value is not None:
            require(value >= least, name, value, f"must be at least {least}")
            require(value <= most, name, value, f"must be at most {most:,}")


def check_ranks(name: str, ranks: int | None) -> None:
    """Raise ValueError for a number of ranks that can't be; None is not given."""
    check_counts({name: ranks}, most=MOST_RANKS)


def check_seconds(values: Mapping[str, float]) -> None:
    """Raise ValueError for what is no span of time above 0."""
    each(values, lambda value: 0 < value < math.inf, "must be a number above 0")
    each(values, lambda value: value <= MOST_SECONDS, f"must be at most {MOST_SECONDS:.0e}")


def check_lists(values: Mapping[str, Sequence[object]]) -> None:
    """Raise ValueError for a list that is empty or names something twice."""
    for name, given in values.items():
        flag = f"--{name.replace('_', '-')}"
        if not given:
            raise ValueError(f"{flag} is empty; give at least one")
        twice = next((value for n, value in enumerate(given) if value in given[:n]), None)
        if twice is not None:
            raise ValueError(f"{flag} names {twice} twice; give it once")


def check_names(names: Mapping[str, str | None]) -> None:
    """Raise ValueError if what a flag names is empty, or is not text that a path and TOML can hold."""
    for flag, given in names.items():
        if given is None:
            continue
        if not given:
            raise ValueError(f"{flag} '' is empty; give a name")
        if "\0" in given or given.encode("utf-8", "replace").decode("utf-8") != given:
            raise ValueError(f"{flag} {given!r} is not UTF-8 text without zero bytes; rename it")
