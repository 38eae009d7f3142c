"""docs/results/published.md equals its command's output, and all predictions are close."""

from __future__ import annotations

import re

from burst_bench.claims.published import CELLS, PAGE, causes, page


def test_the_page_is_what_the_command_draws() -> None:
    assert page() == PAGE.read_text("utf-8"), "burst bench published --draw"


def test_predictions_are_near_what_was_published() -> None:
    """FPDT's copies to host memory are not predicted."""
    text = page()
    errors = dict(zip(CELLS, map(int, re.findall(r"\| ([+-]\d+)% \|", text)), strict=True))
    assert max(abs(error) for (scheme, *_), error in errors.items() if scheme != "FPDT") <= 20
    assert max(errors.values()) <= 25


def test_the_parts_of_a_predicted_step_add_up_to_the_published_time() -> None:
    parts = dict(re.findall(r"^\| (\D+) \| (-?\d+) \|$", causes(128 << 10, 2320), re.M))
    *rest, published = map(int, parts.values())
    assert published == round(1e6 / 2320) and abs(sum(rest) - published) <= 3  # rounded one by one
    assert abs(int(parts["not explained"])) < 0.1 * published
