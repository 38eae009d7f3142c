"""Integers with unit suffixes on command lines: 4096, 128K, 1M."""

from __future__ import annotations

from typing import Any

import tyro

UNITS = {"K": 1 << 10, "M": 1 << 20}


def whole_number(text: str) -> int:
    """Parse an integer; K multiplies it by 1024, M by 1024 times 1024. Raise ValueError for other text."""
    return int(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else int(text)


def numbers() -> tyro.constructors.ConstructorRegistry:
    """Return a registry for ``tyro.cli(registry=...)`` that parses integers with :func:`whole_number`."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        """Parse ``int`` flags with :func:`whole_number`; leave other types to tyro."""
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
