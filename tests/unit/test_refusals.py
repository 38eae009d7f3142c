"""docs/refusals.md: every message on it equals the library's current message."""

from __future__ import annotations

import pytest

from burst_attention import Mask, make_plan
from tests.tools import refusals


def test_the_page_has_todays_messages() -> None:
    found = refusals.provoke()
    assert sum(map(len, found.values())) >= 60
    assert all(each.text and each.why for area in found.values() for each in area)
    assert refusals.page(found) == refusals.PAGE.read_text("utf-8"), "python tests/tools/refusals.py"


def test_what_is_not_refused_is_no_case() -> None:
    known = {"make_plan": make_plan, "Mask": Mask}
    with pytest.raises(AssertionError, match="is not refused"):
        refusals.reported("make_plan(8)", known)
    with pytest.raises(NameError):  # a slip in the case itself
        refusals.reported("make_plan(eight)", known)
    with pytest.raises(AssertionError, match="exit status 0"):
        refusals.reported("burst --version", known)
