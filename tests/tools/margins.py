"""Print which comparisons of a test run come near their bounds.

    PYTHONPYCACHEPREFIX=/tmp/margins python -m pytest -p tests.tools.margins -o enable_assertion_pass_hook=true tests

A bound that another processor's rounding can exceed fails there alone. The table lists each assertion whose value is
more than a third of its bound: its place, the value and the bound. The prefix makes pytest compile the tests again,
with the hook. Assertions inside ranks of a pool run without it, and are not listed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

NEAR = 3.0  # bound / value
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?)"
_LESS = re.compile(rf"(?:tensor\()?({_NUMBER})(?:, dtype=[\w.]+)?\)? <=? (?:\w+\()?({_NUMBER})")
_APPROX = re.compile(rf"({_NUMBER}) == ({_NUMBER}) ± ({_NUMBER})")
_SMALL = 0.05  # a bound above this is no bound of rounding, but for 1: a share of a bound


class Margins:
    """Collects comparisons; the workers of pytest-xdist write to one file."""

    def __init__(self, path: Path) -> None:
        self._path, self._test = path, ""

    @pytest.hookimpl
    def pytest_runtest_setup(self, item: Any) -> None:
        self._test = item.nodeid

    @pytest.hookimpl
    def pytest_assertion_pass(self, item: Any, lineno: int, orig: str, expl: str) -> None:
        text = expl.split("\n", 1)[0]
        for value, bound in _LESS.findall(text):
            self.note(abs(float(value)), float(bound), orig)
        for value, right, bound in _APPROX.findall(expl):
            self.note(abs(float(value) - float(right)), float(bound), orig)

    def note(self, value: float, bound: float, source: str) -> None:
        """Write a comparison down if it came near its bound."""
        if (0 < bound <= _SMALL or bound == 1) and value * NEAR > bound:
            with self._path.open("a") as file:
                file.write(f"{bound / max(value, 1e-300):.2f}\t{value:.3g}\t{bound:.3g}\t{self._test}\t{source[:80]}\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._path.exists() and "PYTEST_XDIST_WORKER" not in os.environ:
            terminalreporter.section(f"comparisons within a factor of {NEAR:g} of their bound")
            for line in sorted(set(self._path.read_text().splitlines()), key=lambda line: float(line.split("\t")[0])):
                terminalreporter.write_line(line)


def pytest_configure(config: Any) -> None:
    path = Path(
        os.environ.setdefault("MARGINS_FILE", str(config.rootpath / ".pytest_cache" / f"margins-{os.getpid()}"))
    )
    path.parent.mkdir(exist_ok=True)
    margins = Margins(path)
    config.pluginmanager.register(margins)
    close = torch.testing.assert_close

    def watched(
        actual: Any, expected: Any, *args: Any, rtol: float | None = None, atol: float | None = None, **options: Any
    ) -> None:
        close(actual, expected, *args, rtol=rtol, atol=atol, **options)
        if isinstance(actual, torch.Tensor) and rtol is not None and atol is not None and actual.is_floating_point():
            apart = (actual.double() - expected.double()).abs()
            allowed = atol + rtol * expected.double().abs()
            share = (apart / allowed).nan_to_num(0.0).max().item() if actual.numel() else 0.0
            margins.note(share * 1e-3, 1e-3, f"assert_close(rtol={rtol}, atol={atol}), as shares of the bound / 1000")

    torch.testing.assert_close = watched
