"""docs/predicted-scaling.md equals its command's output."""

from __future__ import annotations

from itertools import product

import pytest
from burst_bench.claims import scaling
from burst_train.figures import bytes_text
from burst_train.forecast.models import MODELS


def test_the_page_holds_what_is_drawn() -> None:
    page = scaling.PAGE.read_text("utf-8")
    for ranks in (8, 32):
        row = scaling.row(MODELS["llama-3-8b"], scaling.PER_RANK * ranks, ranks)
        for tell in (scaling.sent, scaling.taken):
            assert [*scaling.table([row], tell)][-1] in page
    assert (row.calls[1] is None) and all(call is not None for n, call in enumerate(row.calls) if n != 1)
    for line in scaling._head():
        assert line in page


def test_what_is_kept_saves_bytes_and_costs_memory_under_keep_attention_alone() -> None:
    page, model = scaling.PAGE.read_text("utf-8"), MODELS["llama-3-8b"]
    for ranks, remat in product(scaling.KEPT_RANKS, scaling.REMATS):
        (sent, retained), (sent_kept, retained_kept) = (
            scaling.kept_row(model, ranks, remat, keep=keep) for keep in (False, True)
        )
        reported = " | ".join(map(bytes_text, (sent, sent_kept, retained, retained_kept)))
        assert sent_kept < sent and f"| {ranks} | {remat} | {reported} |" in page
        assert retained_kept == retained or remat == "keep-attention" or ranks > model.kv_heads


@pytest.mark.slow
def test_all_of_the_page_is_what_is_drawn() -> None:
    assert scaling.PAGE.read_text("utf-8") == scaling.page()
