"""Memory while documents are read: the slope of a fitted line, and the real readers' sequences."""

from __future__ import annotations

import pytest
from burst_bench.claims.reading import Look, config_of, growth, watch, write_documents


def test_growth_is_of_the_later_half_and_as_sure_as_the_line_is():
    filling = [Look(s, 0, 10_000 * s) for s in range(50)]
    flat, leaking = ([*filling, *(Look(s, 0, 500_000 + each * s) for s in range(50, 101))] for each in (0, 7))
    assert growth(flat) == pytest.approx((0, 0), abs=1e-3)
    assert growth(leaking) == pytest.approx((7 * 3600, 0), abs=1e-3)
    uneven = [Look(s, 0, 500_000 + 10_000 * (s % 2)) for s in range(101)]
    slope, error = growth(uneven)
    assert abs(slope) < error, "up and down is no growth"


@pytest.mark.parametrize("through", ["files", "datasets"])
def test_documents_are_read_through_either(tmp_path, through):
    write_documents(tmp_path / "documents.jsonl.gz", 300)
    looks = watch(config_of(tmp_path, through, 64), seconds=1.0, every=0.0)
    assert looks[0].sequences == 0 < looks[-1].sequences and all(look.bytes > 2**20 for look in looks)
