"""Measurements beside the tasks: each runs once at a tiny size, and other results give no figures."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from burst_bench.claims import longest
from burst_bench.claims.generation import GenerationArguments, line, measured, over_contexts
from burst_bench.command import PROGRAMS

from tests.distributed.test_cluster import emulated

SIZES = GenerationArguments(new_tokens=3, rounds=2)
TINY = {
    "generate": "--worlds 2 --contexts 64 --rounds 1 --new-tokens 3",
    "hybrid": "--models qwen3_5_text --seq-len 64 --worlds 2 --rounds 1",
    "longest": "--ranks 2 --first 2048 --most 2048 --document 512",
    "memory": "--seq-len 512 --worlds 1 2 --heads 2",
    "step": "--seq-len 64 --worlds 1 --rounds 1 --recompute --peak-tflops 1",
    "packing": "--sources lognormal --ranks 2 --tokens 512 --longest 128 --batches 1 --rounds 1",
}


@pytest.mark.parametrize("program", TINY)
@pytest.mark.long
def test_each_measurement_writes_its_rows(program, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(longest, "CASES", [longest.CASES[3], longest.CASES[-1]])
    out = tmp_path / "figures.json"
    import_module(f"burst_bench.{PROGRAMS[program]}").main([*TINY[program].split(), "--json", str(out)])
    written = json.loads(out.read_text())
    assert written["rows"] and written["versions"]["torch"] == torch.__version__ and written["size"]
    assert "\u2500" * 8 in capsys.readouterr().out, "a table"


@emulated
@pytest.mark.long
def test_the_cost_model_is_compared_with_a_cluster(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    sizes = "--clusters 2x1 --links 200mbit --seq-len 256 --rounds 1"
    import_module("burst_bench.claims.cost_model").main([*sizes.split(), "--json", str(out)])
    summary = json.loads(out.read_text())["summary"]
    assert summary["calls"] == 6 and summary["configurations"] >= 12


def test_kernels_need_a_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="run it on a machine with a GPU"):
            import_module("burst_bench.claims.kernels").main([])


@pytest.mark.long
def test_figures_of_two_ranks_that_generate(pools) -> None:
    row = measured(pools(1), pools(2), 200, SIZES)
    assert [len(side) for side in (*row["first"], *row["later"])] == [2] * 4
    alone, ours = row["cache"]
    assert alone / 2 < ours <= alone / 2 + 64 * alone / 202, "half of the tokens, and a page"
    assert all(0 <= peak < 2**28 for peak in row["peak"])
    assert row["sent"] == 2 * 4 * (64 + 1) * 4


@emulated
@pytest.mark.slow
def test_a_link_delays_the_first_token() -> None:
    """Each rank sends keys and values of 100 tokens in two layers, 200 kB: 1.6 s at 1 Mbit/s."""
    (row,) = over_contexts(2, GenerationArguments(contexts=(200,), new_tokens=3, rounds=1, link="1mbit"))
    assert row["first"][1][0] > 0.8


@pytest.mark.parametrize(("name", "text"), [("tokens", "other tokens than one process"), ("sent", "bytes a token")])
@pytest.mark.long
def test_other_tokens_or_bytes_give_no_figures(pools, name: str, text: str) -> None:
    class Off:
        world = 2

        def run(self, *given, **how):
            return [(found | {name: None}, peak) for found, peak in pools(2).run(*given, **how)]

    with pytest.raises(SystemExit, match=text):
        measured(pools(1), Off(), 100, SIZES)


def test_a_line_compares_round_by_round() -> None:
    sides = {"first": [[2.0, 4.0], [1.0, 1.0]], "later": [[0.01, 0.01], [0.02, 0.02]], "cache": [2**20, 2**19]}
    cells = line({"context": 1024, "ranks": 2, "sent": 10, **sides, "peak": [2**22, 2**21]})
    assert cells["first token, ratio"] == "3.00 (2.00 to 4.00)" and cells["later token, ratio"].startswith("0.50")
    assert (cells["cache per rank"], cells["one process's"]) == ("0.5 MiB", "1.0 MiB")


def test_the_longest_length_is_the_last_that_fits() -> None:
    policy = {"strategy": "auto", "remat": "layer", "mlp_chunks": 8, "attention_chunks": 1, "offload": "none"}
    rows = [policy | {"tokens": 1024 * n, "fits": n < 4, "peak": n * 2**20, "predicted": None} for n in (1, 2, 4)]
    (cells,) = longest.longest_of(rows)
    assert (cells["longest"], cells["peak per rank"], cells["twice that"]) == ("2,048 tokens", "2 MiB", "takes 4 MiB")
