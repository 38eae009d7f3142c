"""Flag values: integers with units (4096, 128K, 1M), and rules in the annotations of settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import tyro

UNITS = {"K": 1 << 10, "M": 1 << 20}
BYTES = {"GiB": 1 << 30, "MiB": 1 << 20, "TiB": 1 << 40, "GB": 10**9, "MB": 10**6, "TB": 10**12}
MOST = 2**31  # of any count: its square, such as a mask's area, must fit an int64
MOST_RANKS = 1024
MOST_SECONDS = 1e9

NUMBERS = tyro.constructors.ConstructorRegistry()  # for ``tyro.cli(registry=...)``: integers by whole_number

# A rule returns the complaint that follows the flag's name in the error, or an empty string if the value is valid.
Rule: TypeAlias = Callable[[Any], str]


def whole_number(text: str) -> int:
    """Parse an integer; K multiplies it by 1024, M by 1024 times 1024. Raise ValueError for other text."""
    return int(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else int(text)


def byte_count(text: str) -> int:
    """Parse an amount of memory with its unit, such as 32GiB. Raise ValueError for other text."""
    unit = next((unit for unit in BYTES if text.endswith(unit)), "")
    if not unit or not 0 < (amount := float(text.removesuffix(unit))) < math.inf:
        raise ValueError(text)
    return int(amount * BYTES[unit])


@NUMBERS.primitive_rule
def _integers(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda args: whole_number(args[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def whole(least: int = 1, most: int = MOST) -> Rule:
    """Return the rule for integers from ``least`` to ``most``."""

    def rule(value: int) -> str:
        """Check that ``value`` is within the limits."""
        if value < least:
            return f"{value} must be at least {least}"
        return f"{value} must be at most {most:,}" if value > most else ""

    return rule


def number(holds: Callable[[float], bool], text: str) -> Rule:
    """Return the rule that ``holds(value)`` must be true; ``text`` describes it in the error."""
    return lambda value: "" if holds(value) else f"{value} {text}"


def distinct(values: Sequence[object]) -> str:
    """Require at least one value and no duplicates."""
    twice = next((value for n, value in enumerate(values) if value in values[:n]), None)
    if twice is not None:
        return f"names {twice} twice; give it once"
    return "" if values else "is empty; give at least one"


def text(value: str) -> str:
    """Require non-empty text that can be stored in a path and in TOML."""
    if "\0" in value or value.encode("utf-8", "replace").decode("utf-8") != value:
        return f"{value!r} must be UTF-8 text without zero bytes; rename it"
    return "" if value else "'' is empty; give a name"


def interval(value: str) -> str:
    """Require a number of steps, or of minutes with the suffix m."""
    digits = value.removesuffix("m")
    if digits.isascii() and digits.isdecimal() and 0 < int(digits[:12]) <= MOST:
        return ""
    return f"{value!r} must be steps, as in 500, or minutes, as in 30m"


def size(value: str) -> str:
    """Require an amount of memory with its unit."""
    try:
        byte_count(value)
    except ValueError:
        return f"{value!r} must be an amount with its unit ({', '.join(BYTES)}), as in 32GiB"
    return ""


DeviceOrAuto = Literal["auto", "cpu", "cuda"]
Count = Annotated[int, whole()]
Length = Annotated[int, whole(2)]  # of a sequence: each token's target is the next token
NonNegativeInt = Annotated[int, whole(0)]
Ranks = Annotated[int, whole(most=MOST_RANKS)]
Name = Annotated[str, text]
Interval = Annotated[str, interval]
Size = Annotated[str, size]
Positive = Annotated[float, number(lambda value: 0 < value < math.inf, "must be a number above 0")]
NonNegative = Annotated[float, number(lambda value: 0 <= value < math.inf, "must be a number of at least 0")]
Fraction = Annotated[float, number(lambda value: 0 <= value < 1, "must be at least 0 and below 1")]
Seconds = Annotated[Positive, number(lambda value: value <= MOST_SECONDS, f"must be at most {MOST_SECONDS:.0e}")]


def check_settings(settings: object) -> None:
    """Raise ValueError for the first of a dataclass's flags whose value breaks a rule of its annotation."""
    for name, annotation in get_type_hints(type(settings), include_extras=True).items():
        for complaint in filter(None, _complaints(annotation, getattr(settings, name))):
            raise ValueError(f"{flag(name)} {complaint}")


def _complaints(annotation: Any, value: Any) -> Iterator[str]:
    """Yield what each rule of the annotation returns for the value, or for each element of a tuple."""
    if get_origin(annotation) is Annotated:
        annotation, *rules = get_args(annotation)
        yield from (rule(value) for rule in rules if callable(rule))  # others are tyro's
    if get_origin(annotation) is tuple:
        for item in value:
            yield from _complaints(get_args(annotation)[0], item)
    elif value is not None:
        for choice in get_args(annotation):
            yield from _complaints(choice, value)


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise ValueError unless ``holds``. The error names the flag of ``name``, the value and the broken rule."""
    if not holds:
        raise ValueError(f"{flag(name)} {value} {rule}")


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"
