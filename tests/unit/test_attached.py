"""docs/attached.md: modules attached to a model give one process's results over ranks, or are refused by name."""

from __future__ import annotations

import pytest

from tests.tools.attached import CASES, PAGE, judge_all, page


@pytest.mark.long
def test_everything_attached_is_equal_or_refused_and_stands_on_the_page() -> None:
    verdicts = judge_all()
    assert sum(map(len, CASES.values())) >= 60
    assert not [name for area in verdicts.values() for name, each in area.items() if each.kind == "WRONG"]
    assert page(verdicts) == PAGE.read_text("utf-8"), "python tests/tools/attached.py"
