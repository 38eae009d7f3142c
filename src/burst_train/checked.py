"""JSON read from a file, checked against a pydantic model before use."""

from __future__ import annotations

import re
import reprlib
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from burst_attention.cli.flags import MOST

LARGEST = 2**28  # default limit of a JSON file's size, in bytes
FORMAT = 1  # of checkpoints and markers


class Checked(BaseModel):
    """Content of a file: exact types (no integer from a boolean), and no entry that the model does not declare."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", defer_build=True)


Content = TypeVar("Content", bound=Checked)


def _known_format(value: int) -> int:
    if value != FORMAT:
        raise ValueError(f"must be {FORMAT}")
    return value


Format = Annotated[int, AfterValidator(_known_format)]  # not Literal[1], which takes true and 1.0
Natural = Annotated[int, Field(ge=0, le=MOST)]


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Read a file of at most ``largest`` bytes; ValueError names the file."""
    try:
        if path.stat().st_size > largest:
            raise ValueError(f"{path.name} is larger than {largest:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror or error}") from None


def parse_json(data: bytes, kind: type[Content], where: str) -> Content:
    """Parse ``data`` as ``kind``; ValueError names ``where`` and the entry."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(sentence(error, where)) from None


def sentence(error: ValidationError, *where: str) -> str:
    """Return the first of pydantic's errors as one sentence: file, entry, rule and value."""
    first = error.errors(include_url=False)[0]
    path = list(where)
    for part in first["loc"]:
        if isinstance(part, int):
            path[-1] += f"[{part}]"
        elif part != "[key]":  # pydantic's mark of a key, which stands before it
            path.append(part)
    at = ", ".join(path[:-1]) + f": {path[-1]!r}" if path[1:] else path[0]
    if first["type"] == "json_invalid":
        return f"{at} is not valid JSON: {first['ctx']['error']}"
    texts = {"missing": "is missing", "extra_forbidden": "is not a known entry"}
    rule = texts.get(first["type"]) or re.sub("^[A-Z][a-z]+ should", "must", first["msg"].removeprefix("Value error, "))
    return f"{at} {rule}" + f", not {reprlib.repr(first['input'])}" * (rule.startswith("must") and ", not" not in rule)
