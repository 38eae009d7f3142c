"""Provoke every refusal and write its message to docs/refusals.md.

    python tests/tools/refusals.py

Every case of ``tests/support/refusal_cases.py`` is asked for in this process, on two ranks as threads where needed.
A test asks again and compares with the page, so that no text on it can go stale.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "refusals.md"
LONGEST = 300  # characters of a text on the page
HEAD = """# What is refused, and why

The library refuses unsupported calls; it never approximates or ignores an option. Every rank raises the same class
before any data moves, except for [three failures](architecture.md#before-anything-moves) that raise on one rank. The
error names the argument, its value and the remedy. This page lists each error's message with a call that raises it.
`python tests/tools/refusals.py` writes the page, and a test compares them.
[Models](models.md) has a verdict for every family of transformers.

`q`, `k` and `v` have 4, 2 and 2 heads and the 8 tokens of `plan`. `right` holds valid arguments of a tiny Llama. Calls
with `rank` run on two ranks; the message is rank 0's. The other names are in `tests/support/refusal_cases.py`.
"""


@dataclass(frozen=True)
class Refusal:
    """A refused call, its message and the reason."""

    asked: str
    kind: str
    text: str
    why: str


def provoke() -> dict[str, list[Refusal]]:
    """Every area's refusals. AssertionError for a case that is not refused, or not by the library."""
    from burst_attention.testing import local_world
    from tests.support.refusal_cases import AREAS

    found = {}
    for area, (cases, names, world) in AREAS.items():

        def ask(group: Any, cases: Any = cases, names: Any = names) -> list[tuple[str, str]]:
            known = names(group)
            return [reported(asked, known) for asked, _ in cases]

        with _elsewhere():
            if world == 1:
                answers = [ask(None)]
            else:
                with local_world(world, timeout=30) as ranks:
                    answers = ranks.run(ask)
        for (asked, _), *kinds in zip(cases, *([kind for kind, _ in rank] for rank in answers), strict=True):
            assert len(set(kinds)) == 1, f"{asked}: {kinds}"
        found[area] = [Refusal(asked, *each, why) for (asked, why), each in zip(cases, answers[0], strict=True)]
    return found


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """In an empty folder, as if no torchrun were around and no hub to be reached."""
    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def reported(asked: str, known: dict[str, Any]) -> tuple[str, str]:
    """(the error's class, its text in one line)."""
    if asked.startswith("burst "):
        return _printed_by_command(asked)
    try:
        eval(asked, known)
    except Exception as error:
        from tests.tools.families import is_ours

        if not is_ours(error):
            raise
        return type(error).__name__, _stable(str(error))
    raise AssertionError(f"{asked} is not refused")


def _printed_by_command(line: str) -> tuple[str, str]:
    from burst_attention import cli

    words = shlex.split(line)
    started = AssertionError(f"{line} is not refused: it starts ranks")
    with (
        contextlib.redirect_stderr(io.StringIO()) as screen,
        mock.patch("burst_attention.launch.local.launch", side_effect=started),
    ):
        status = cli.main(words[1:])
    text, start = screen.getvalue(), f"{' '.join(words[:2])}: "
    assert status == 2, f"{line}: exit status {status}, {text}"
    assert text.startswith(start), text
    return "exit status 2", _stable(text.removeprefix(start))


def _stable(text: str) -> str:
    """In one line, without what differs from run to run, cut at a word if it is long."""
    text = re.sub(r"process \d+ on \S+(?=;)", "process … on …", " ".join(text.split()))
    text = re.sub(r"\b0x[0-9a-f]+", "0x…", re.sub(r"(?<=\(by )[\de+-]+", "…", text))
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " …"


def page(found: dict[str, list[Refusal]]) -> str:
    """docs/refusals.md."""
    lines = [HEAD]
    for area, refusals in found.items():
        assert not any("|" in each.asked for each in refusals), "a bar in code ends a table's cell, here or there"
        lines += [f"## {area}", "", "| call | error | message | why |", "|---|---|---|---|"]
        lines += [f"| `{x.asked}` | {x.kind} | {_plain(x.text)} | {x.why} |" for x in refusals]
        lines.append("")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """So that Markdown takes no sign of it for its own."""
    return re.sub(r"([\\*_<>\[\]`|])", r"\\\1", text)


def main() -> int:
    import torch

    torch.set_num_threads(1)
    PAGE.write_text(page(provoke()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
