"""The library's rooms: lines, levels of the import order, what each may import; circles would end it with an error.

    python tests/tools/rooms.py

The law is that of ``tests/unit/test_rooms.py``, which holds the sources against it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.unit.test_rooms import ROOMS, ROOT, crossings, levels

PROPER = (
    "plan",
    "planner",
    "comm",
    "kernels",
    "attention",
    "loss",
)  # attention proper


def lines(room: str) -> int:
    """Lines of a room's sources; of ``""`` the package's own."""
    paths = (ROOT / room).rglob("*.py") if room else ROOT.glob("*.py")
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def main() -> int:
    floors, broken = levels(ROOMS), crossings(ROOT, ROOMS)
    total = sum(map(lines, ["", *ROOMS]))
    print(f"{'room':14}{'level':>5}{'lines':>8}{'share':>8}  may import")
    for room, floor in sorted(floors.items(), key=lambda each: each[1]):
        share = f"{lines(room) / total:.1%}"
        print(f"{room:14}{floor:5}{lines(room):8}{share:>8}  {', '.join(sorted(ROOMS[room] - {''}))}")
    proper = sum(map(lines, PROPER))
    print(f"{'(package)':19}{lines(''):8}\n{'in all':19}{total:8}, of them {', '.join(PROPER)}: {proper / total:.1%}")
    print(
        f"levels: {max(floors.values())}, circles: none, imports outside of the law: {len(broken)}", *broken, sep="\n"
    )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
