"""docs/architecture.md lists the same rooms as the tree and the import rules."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.test_rooms import ROOMS, ROOT, levels

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")


def test_the_table_of_rooms_is_the_law() -> None:
    rows = re.findall(r"^\| (\d) \| (\w+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert {room: int(level) for level, room, _ in rows} == levels(ROOMS)
    assert {room: set(re.findall(r"\w+", named)) for _, room, named in rows} == {
        room: others - {""} for room, others in ROOMS.items()
    }


def test_the_tree_names_every_module() -> None:
    tree = PAGE[PAGE.index("src/burst_attention/ ") :]
    tree = tree[: tree.index("```")]
    for room in ROOMS:
        reported = re.search(rf"^  {room}/(.+?)(?=^  \w|^\w)", tree, re.MULTILINE | re.DOTALL)
        assert reported is not None, room
        modules = {path.stem for path in (ROOT / room).rglob("*.py")} - {"__init__", "__main__"}
        assert not modules - set(re.findall(r"\w+", reported[1])), room
