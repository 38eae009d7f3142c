"""JSON that was read from a file, each value checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from burst_attention.cli.flags import MOST

T = TypeVar("T")

LARGEST = 2**28  # bytes of a JSON file that is read at all


class Checked:
    """An object of a JSON file. Every error names the file and the entry.

    Args:
        content: the object.
        where: the file, and the way to the object in it.
    """

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self.content, self.where = content, where

    def value(self, name: str, kind: type[T]) -> T:
        """The entry ``name``, of exactly the type ``kind``.

        Raises:
            ValueError: there is none, or it is of another type.
        """
        found = self.content.get(name)
        if type(found) is not kind:  # not isinstance: true is no number
            raise self.wrong(name, f"must be of type {kind.__name__}")
        return found

    def natural(self, name: str) -> int:
        """A whole number from 0 to 2**31."""
        found = self.value(name, int)
        if not 0 <= found <= MOST:
            raise self.wrong(name, f"must be from 0 to {MOST:,}")
        return found

    def number(self, name: str) -> float:
        """A number, whole or not."""
        found = self.content.get(name)
        if type(found) not in (int, float):
            raise self.wrong(name, "must be a number")
        return float(found)  # type: ignore[arg-type]  # it is one

    def part(self, name: str) -> Checked:
        """An object within it."""
        return Checked(self.value(name, dict), f"{self.where}, {name}")

    def parts(self, name: str) -> list[Checked]:
        """Objects in a list within it."""
        found = self.value(name, list)
        if not all(type(each) is dict for each in found):
            raise self.wrong(name, "must be a list of objects")
        return [Checked(each, f"{self.where}, {name} {index}") for index, each in enumerate(found)]

    def wrong(self, name: str, rule: str) -> ValueError:
        """The error of an entry that breaks a rule."""
        return ValueError(f"{self.where}: {name!r} {rule}")


def read_json(path: Path, *, largest: int = LARGEST, check: Callable[[bytes], None] | None = None) -> Checked:
    """The object in a JSON file.

    Args:
        largest: bytes of the file that are read at most.
        check: is given the file's bytes before they are parsed, and raises if they are not as they should be.

    Raises:
        ValueError: it can't be read, is larger, or holds no JSON object.
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
    """The JSON object that ``data`` spells.

    Raises:
        ValueError: it spells none.
    """
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError(f"{where} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON that can be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds no JSON object")
    return Checked(content, where)
