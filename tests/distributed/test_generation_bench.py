"""``burst bench generate``: the same tokens as one process, the predicted bytes, and ratios by round."""

from __future__ import annotations

import pytest
from burst_bench.claims.generation import GenerationArguments, line, measured, over_contexts

from tests.distributed.test_cluster import emulated

SIZES = GenerationArguments(new_tokens=3, rounds=2)


def test_figures_of_two_ranks(pools) -> None:
    row = measured(pools(1), pools(2), 200, SIZES)
    assert [len(side) for side in (*row["first"], *row["later"])] == [2] * 4
    alone, ours = row["cache"]
    assert alone / 2 < ours <= alone / 2 + 64 * alone / 202, "half of the tokens, and a page"
    assert all(0 <= peak < 2**28 for peak in row["peak"])
    assert row["sent"] == 2 * 4 * (64 + 1) * 4


@emulated
def test_a_link_delays_the_first_token() -> None:
    """Each rank sends keys and values of 100 tokens in two layers, 200 kB: 1.6 s at 1 Mbit/s."""
    (row,) = over_contexts(2, GenerationArguments(contexts=(200,), new_tokens=3, rounds=1, link="1mbit"))
    assert row["first"][1][0] > 0.8
    assert row["sent"] == 2 * 4 * (64 + 1) * 4


@pytest.mark.parametrize(("name", "text"), [("tokens", "other tokens than one process"), ("sent", "bytes a token")])
def test_other_tokens_or_bytes_give_no_figures(pools, name, text) -> None:
    class Off:
        world = 2

        def run(self, *given, **how):
            return [(found | {name: None}, peak) for found, peak in pools(2).run(*given, **how)]

    with pytest.raises(SystemExit, match=text):
        measured(pools(1), Off(), 100, SIZES)


def test_a_line_compares_round_by_round() -> None:
    sides = {"first": [[2.0, 4.0], [1.0, 1.0]], "later": [[0.01, 0.01], [0.02, 0.02]], "cache": [2**20, 2**19]}
    sides["peak"] = [2**22, 2**21]
    cells = line({"context": 1024, "ranks": 2, "sent": 10, **sides})
    assert cells["first token, ratio"] == "3.00 (2.00 to 4.00)" and cells["later token, ratio"].startswith("0.50")
    assert (cells["cache per rank"], cells["one process's"]) == ("0.5 MiB", "1.0 MiB")
    assert (cells["peak per rank"], cells["one process's peak"]) == ("2.0 MiB", "4.0 MiB")
