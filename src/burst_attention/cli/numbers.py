"""Whole numbers on command lines as people write them: 4096, 128K, 1M."""

from __future__ import annotations

from typing import Any

import tyro

UNITS = {"K": 1 << 10, "M": 1 << 20}


def whole_number(text: str) -> int:
    """``1M`` is 1024 times 1024, ``128K`` 128 times 1024; all else is as Python reads it.

    Raises:
        ValueError: it is no whole number.
    """
    return int(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else int(text)


def numbers() -> tyro.constructors.ConstructorRegistry:
    """For ``tyro.cli(registry=...)``: every integer may be written so."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type is not int:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda args: whole_number(args[0]),
            is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
            str_from_instance=lambda value: [str(value)],
        )

    return registry
