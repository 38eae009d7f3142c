"""JSON read from a file, with each value checked before use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from burst_attention.cli.flags import MOST

T = TypeVar("T")

LARGEST = 2**28  # default limit of a JSON file's size, in bytes


class Checked:
    """A JSON object of a file. Every error names the file and the entry.

    Args:
        content: the object.
        where: the file, and the path to the object in it.
    """

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self.content, self.where = content, where

    def value(self, name: str, kind: type[T]) -> T:
        """Return the entry ``name``, which must have exactly the type ``kind``.

        Raises:
            ValueError: the entry is missing or has another type.
        """
        found = self.content.get(name)
        if type(found) is not kind:  # not isinstance: a bool must not pass as an int
            raise self.wrong(name, f"must be of type {kind.__name__}")
        return found

    def non_negative_int(self, name: str) -> int:
        """Return an integer from 0 to 2**31."""
        found = self.value(name, int)
        if not 0 <= found <= MOST:
            raise self.wrong(name, f"must be from 0 to {MOST:,}")
        return found

    def number(self, name: str) -> float:
        """Return a number as a float; integers are allowed."""
        found = self.content.get(name)
        if type(found) not in (int, float):
            raise self.wrong(name, "must be a number")
        return float(found)  # type: ignore[arg-type]  # checked above

    def part(self, name: str) -> Checked:
        """Return a nested object."""
        return Checked(self.value(name, dict), f"{self.where}, {name}")

    def parts(self, name: str) -> list[Checked]:
        """Return a nested list of objects."""
        found = self.value(name, list)
        if not all(type(each) is dict for each in found):
            raise self.wrong(name, "must be a list of objects")
        return [Checked(each, f"{self.where}, {name} {index}") for index, each in enumerate(found)]

    def wrong(self, name: str, rule: str) -> ValueError:
        """Return the error for an entry that breaks ``rule``."""
        return ValueError(f"{self.where}: {name!r} {rule}")


def read_json(path: Path, *, largest: int = LARGEST, check: Callable[[bytes], None] | None = None) -> Checked:
    """Read the JSON object in a file.

    Args:
        largest: size limit of the file, in bytes.
        check: called with the file's bytes before parsing; raises if they are wrong.

    Raises:
        ValueError: the file can't be read, is too large, or holds no JSON object.
    """
    try:
        if path.stat().st_size > largest:
            raise ValueError(f"{path.name} is larger than {largest:,} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror or error}") from None
    if check is not None:
        check(data)
    return parse_json(data, path.name)


def parse_json(data: bytes, where: str) -> Checked:
    """Parse ``data`` as a JSON object.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError(f"{where} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds no JSON object")
    return Checked(content, where)
