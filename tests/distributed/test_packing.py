"""The comparison of static grids with one balanced plan: the same losses, and the busiest rank's time."""

import pytest
from burst_bench.claims.packing import (
    Arrangement,
    PackingArguments,
    arrangements,
    assigned,
    check_same,
    draw,
    lines,
    measured,
)


@pytest.mark.parametrize("source", ["stdlib", "lognormal"])
def test_lengths_fill_a_batch(source) -> None:
    batches = [draw(source, tokens=20_000, longest=4096, seed=seed) for seed in range(20)]
    assert draw(source, tokens=20_000, longest=4096, seed=3) == batches[3] != batches[4]
    assert all(sum(lengths) == 20_000 and min(lengths) > 0 for lengths in batches)
    drawn = sorted(length for lengths in batches for length in lengths)
    assert 20 * drawn[len(drawn) // 2] < drawn[-1] <= 4096, "a long tail"


def test_whole_documents_are_assigned_longest_first() -> None:
    assert assigned((5, 3, 8, 2, 2), 2) == [[2, 3], [0, 1, 4]]
    assert assigned((5, 3, 8), 1) == [[0, 1, 2]]


def test_a_grid_needs_room_for_the_longest_document() -> None:
    grids = arrangements(4)
    assert [each.name for each in grids] == ["1x4 zigzag", "2x2 zigzag", "4x1 zigzag", "1x4 balanced"]
    assert [each.fits([(4, 4, 4, 4), (1, 5, 5, 5)]) for each in grids] == [True, True, False, True]
    assert not Arrangement(4, 1, "zigzag").fits([(1, 1, 1)]), "a group without a document"


@pytest.mark.long
def test_all_arrangements_take_the_same_step(pools) -> None:
    """Which ``measured`` checks: it exits if losses or gradient norms differ."""
    sizes = PackingArguments(ranks=4, tokens=512, longest=128, batches=1, rounds=1)
    rows = measured(pools(4), "lognormal", sizes)
    assert [row["arrangement"] for row in rows] == [each.name for each in arrangements(4)]
    for row in rows:
        assert [len(by_rank) for by_rank in row["seconds"]] == [len(by_rank) for by_rank in row["sent"]] == [4]
        assert min(seconds for by_rank in row["seconds"] for seconds in by_rank) > 0
    zigzag, pairs, alone, ours = (sum(map(sum, row["sent"])) for row in rows)
    assert alone == 0 < pairs < zigzag and ours > 0


def test_other_results_give_no_figures() -> None:
    check_same({"a": (6.0, 2.0), "b": (6.0001, 2.0)})
    for other in ((6.01, 2.0), (6.0, 2.01), (float("nan"), 2.0)):
        with pytest.raises(SystemExit, match="nothing is reported"):
            check_same({"a": (6.0, 2.0), "b": other})


def test_the_busiest_rank_counts() -> None:
    rows = [
        {"arrangement": "1x2 zigzag", "seconds": [[1.0, 3.0], [4.0, 4.0]], "sent": [[10, 10], [10, 10]]},
        {"arrangement": "2x1 zigzag", "seconds": [[6.0, 1.0], [6.0, 1.0]], "sent": [[0, 0], [0, 0]]},
        {"arrangement": "1x2 balanced", "seconds": [[2.0, 2.0], [2.0, 1.0]], "sent": [[4, 0], [4, 0]]},
    ]
    zigzag, alone, ours = lines(rows, 12)
    assert (zigzag["tokens/s"], alone["tokens/s"], ours["tokens/s"]) == ("3", "2", "6")
    assert (zigzag["ours / its"], alone["ours / its"]) == ("1.75 (1.50 to 2.00)", "3.00 (3.00 to 3.00)")
    assert (zigzag["busiest / mean"], ours["busiest / mean"]) == ("1.17", "1.14")
    assert (zigzag["sent per rank"], ours["sent per rank"]) == ("10 B", "2 B")
