"""Seeded faults are current: each names text that stands once, valid Python, and tests that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.tools.mutation import ROOT, SEEDED, Fault

# Names of tests and of their parameters, which may stand in another file.
TESTS = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("fault", SEEDED, ids=lambda fault: fault.name)
def test_a_fault_can_be_seeded(fault: Fault) -> None:
    folder = ROOT if fault.file.startswith(("train/", "benchmarks/")) else ROOT / "src" / "burst_attention"
    text = (folder / fault.file).read_text("utf-8")
    assert text.count(fault.old) == 1
    if fault.file.endswith(".py"):
        ast.parse(text.replace(fault.old, fault.new))
    assert all((ROOT / each.split("::")[0]).exists() for each in fault.tests.split())
    words = [word for word in re.findall(r"\w+", fault.only) if word not in ("and", "or", "not")]
    assert all(word in TESTS for word in words), f"no test has the name {fault.only!r}"


def test_names_are_unique() -> None:
    names = [fault.name for fault in SEEDED]
    assert len(names) == len(set(names))
