"""docs/results/published.md equals its command's output, and all predictions are close."""

from __future__ import annotations

import re

from burst_bench.claims.published import CELLS, PAGE, page


def test_the_page_is_what_the_command_draws() -> None:
    assert page() == PAGE.read_text("utf-8"), "python benchmarks/published.py --draw"


def test_predictions_are_near_what_was_published() -> None:
    errors = [int(error) for error in re.findall(r"\| ([+-]\d+)% \|", page())]
    assert len(errors) == sum(engine is not None for _, engine, _, _ in CELLS)
    assert max(map(abs, errors)) <= 20
