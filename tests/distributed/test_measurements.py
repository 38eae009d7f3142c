"""Measurements beside the tasks: each runs once at a tiny size, and other results give no figures."""

import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from burst_bench.claims import gpu, kernels, longest, pretrained
from burst_bench.claims.generation import GenerationArguments, line, measured, over_contexts
from burst_bench.claims.packing import (
    Arrangement,
    PackingArguments,
    arrangements,
    assigned,
    check_same,
    draw,
    lines,
)
from burst_bench.claims.packing import (
    measured as steps_measured,
)
from burst_bench.claims.pretrained import Plain
from burst_bench.command import PROGRAMS
from burst_bench.harness.traffic_meter import TrafficMeter
from burst_bench.harness.workload import Workload
from burst_bench.peers import compare
from burst_bench.pool import WorkerPool
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention.kernels.reference import Reference
from burst_train.data.tokenizer import ByteTokenizer
from tests.distributed.test_cluster import emulated

SIZES = GenerationArguments(new_tokens=3, rounds=2)
TINY = {
    "generate": "--worlds 2 --contexts 64 --rounds 1 --new-tokens 3",
    "hybrid": "--models qwen3_5_text --seq-len 64 --worlds 2 --rounds 1",
    "indexed": "--seq-lens 300 --ours 400 --threads 1 --rounds 1",
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
            kernels.main([])
    with pytest.raises(SystemExit, match="--tables kernels ranks memory needs a GPU"):
        kernels.main(["--device", "cpu"])


class Unordered(Reference):
    """A kernel whose sums have no fixed order, as cuDNN's and, unless asked for one, FlashAttention's."""

    runs = 0

    def backward(self, inputs):
        Unordered.runs += 1
        dq, dk, dv = super().backward(inputs)
        return dq * (1 + Unordered.runs * 1e-6), dk, dv


@pytest.mark.parametrize("ordered", [False, True])
def test_kernels_need_equal_bits_only_under_deterministic_algorithms(ordered, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "choose", lambda *_, **__: Unordered())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: ordered)
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in "qkv")
    able, refused = kernels.subjects(["cudnn"], q, k, v, kernels.tiles_of(kernels.MASKS["causal"], 32))
    if ordered:
        assert not able and "cudnn: its dq differs from run to run" in refused[0]
    else:
        assert [each.name for each in able] == ["cudnn"] and not refused


def test_a_kernel_that_gives_nan_far_below_zero_is_named() -> None:
    class Faulty(Reference):
        def backward(self, inputs):
            dq, dk, dv = super().backward(inputs)
            return (dq * math.nan if inputs.k.shape[2] == 192 else dq), dk, dv

    cpu = torch.device("cpu"), torch.float16
    assert not list(gpu.wrong_far_below_zero(Reference(), *cpu))
    found = list(gpu.wrong_far_below_zero(Faulty(), *cpu))
    assert found == [f"reference, {shape}, 192 keys: dq nan" for shape in gpu.SHAPES]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_gpus_first_minutes_run_without_one(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHON": sys.executable, "WORKERS": "0", "SLOWER": "20"}
    script = [root / "benchmarks" / "gpu_first.sh", tmp_path]
    run = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    printed = run.stdout.splitlines()
    assert run.returncode == 0, run.stdout + run.stderr
    parts = ["explain", "explain", "nan", "tests", "kernels", "step", "waits", "packed", "profile", "offload"]
    assert [text.partition(": ")[0] for text in printed] == parts
    for text in printed:
        assert re.fullmatch(r"[a-z]+: .+ \(.+\)", text), text


@pytest.mark.long
def test_figures_of_two_ranks_that_generate(pools) -> None:
    rows = measured(pools(1), pools(2), 200, SIZES)
    for row in rows:
        assert [len(side) for side in (*row["first"], *row["later"])] == [2] * 4
        alone, ours = row["cache"]
        assert alone / 2 < ours <= alone / 2 + 64 * alone / 202, "half of the tokens, and a page"
        assert all(0 <= peak < 2**28 for peak in row["peak"])
    whole, sharded = rows
    assert whole["held"][0] == whole["held"][1] and 0.5 <= sharded["held"][1] / sharded["held"][0] < 0.51
    assert whole["sent"] == 2 * 4 * (64 + 1) * 4
    columns = 256 + 2 * (256 + 128 + 128 + 256 + 512 + 512 + 256) // 2
    assert sharded["sent"] == whole["sent"] + 4 * columns + 8, "a greatest logit and its token"


@emulated
@pytest.mark.slow
def test_a_link_delays_the_first_token() -> None:
    """Each rank sends keys and values of 100 tokens in two layers, 200 kB: 1.6 s at 1 Mbit/s."""
    row, _ = over_contexts(2, GenerationArguments(contexts=(200,), new_tokens=3, rounds=1, link="1mbit"))
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
    sides |= {"held": [2**22, 2**21], "peak": [2**22, 2**21]}
    cells = line({"context": 1024, "weights": "sharded", "ranks": 2, "sent": 10, **sides})
    assert cells["first token, ratio"] == "3.00 (2.00 to 4.00)" and cells["later token, ratio"].startswith("0.50")
    assert (cells["cache per rank"], cells["one process's"]) == ("0.5 MiB", "1.0 MiB")
    assert (cells["weights per rank"], cells["whole"]) == ("2.0 MiB", "4.0 MiB")


def test_the_longest_length_is_the_last_that_fits() -> None:
    policy = {"strategy": "auto", "remat": "layer", "mlp_chunks": 8, "attention_chunks": 1, "offload": "none"}
    rows = [policy | {"tokens": 1024 * n, "fits": n < 4, "peak": n * 2**20, "predicted": None} for n in (1, 2, 4)]
    (cells,) = longest.longest_of(rows)
    assert (cells["longest"], cells["peak per rank"], cells["twice that"]) == ("2,048 tokens", "2 MiB", "takes 4 MiB")


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
def test_all_arrangements_take_the_same_step() -> None:
    """Which ``measured`` checks: it exits if losses or gradient norms differ."""
    sizes = PackingArguments(ranks=4, tokens=512, longest=128, batches=1, rounds=1)
    with WorkerPool(4) as pool:  # ranks that generated before send small messages where no meter of the group counts
        rows = steps_measured(pool, "lognormal", sizes)
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


@pytest.mark.long
def test_a_pretrained_model_over_ranks_is_compared_with_transformers(tmp_path, capsys) -> None:
    """With 9 heads and 3 key-value heads, which two ranks can't split."""
    sizes = {"hidden_size": 72, "intermediate_size": 96, "num_attention_heads": 9, "num_key_value_heads": 3}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=258, num_hidden_layers=2, **sizes)).save_pretrained(tmp_path / "model")
    ByteTokenizer().save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 5)
    given = f"--model {tmp_path}/model --data {tmp_path}/text.txt --seq-len 64 --strategies ring ulysses --new-tokens 3"
    pretrained.main([*given.split(), "--steps", "2", "--json", str(tmp_path / "figures.json")])
    written, printed = json.loads((tmp_path / "figures.json").read_text()), capsys.readouterr().out
    plain, ring, ulysses = written["rows"]
    assert plain["largest"] == 0 < plain["largest_from_fp64"] < 1e-5
    assert 0 < ring["largest"] < 1e-5 and ring["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-6)
    assert "ulysses_degree=2 can't split 9 query heads and 3 key-value heads" in ulysses["refused"]
    assert f"ulysses, 2 ranks: {ulysses['refused']}" in printed and "perplexity" in printed
    (run,) = written["runs"]
    assert run["equal_tokens"] == 3 and len(run["losses"]) == 2
    assert abs(run["losses"][1] - run["losses"][0]) > 0, "a step has changed the adapters"
    assert run["losses"] == pytest.approx(written["losses_of_one_process"], rel=1e-5)


def test_wrong_log_probabilities_tokens_or_losses_of_a_pretrained_model_give_no_figures() -> None:
    exact = -torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = Plain(exact, exact + 1e-6, [1, 2, 3], [2.0, 1.0])
    assert plain.row(2, "ring", exact - 4e-6)["largest"] == pytest.approx(5e-6)
    for wrong in (6e-6, float("nan")):
        own = exact.clone()
        own[7] += wrong
        with pytest.raises(SystemExit, match=r"ring, 2 ranks: .* nothing is reported"):
            plain.row(2, "ring", own)
    assert plain.equal_tokens([1, 2, 4], "bfloat16") == 2
    with pytest.raises(SystemExit, match="nothing is reported"):
        plain.equal_tokens([1, 2, 4], "float32")
    assert plain.largest_difference([2.0, 1.00005], "float32") == pytest.approx(5e-5)
    for losses in ([2.0, 1.001], [2.0, float("nan")]):
        with pytest.raises(SystemExit, match="nothing is reported"):
            plain.largest_difference(losses, "float32")


@pytest.mark.parametrize(
    ("given", "text"),
    [("--model nowhere", "has no config.json; `python examples/pretrained.py"), ("--strategies best", "is unknown")],
)
def test_a_pretrained_model_that_can_not_be_read_is_refused(given, text, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=text):
        pretrained.main(["--model", str(tmp_path), *given.split()])


WORLD = 2
SIZE = Workload(seq_len=256, heads=4, kv_heads=4, head_dim=32)


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; see `burst bench peers`")


def test_each_column_of_the_table_of_peers_is_explained_and_none_contradicts_another() -> None:
    """The machine slowed down: the quotient of the median seconds, 1.5, is not the median of the rounds' ratios."""
    ours = {"seconds": [1.0, 2.0, 4.0], "ratios": [1.0] * 3, "copying": [0.0] * 3}
    theirs = {"seconds": [1.0, 3.0, 4.0], "ratios": [1.0, 1.5, 1.0], "copying": [0.5, 0.0, 0.0]}
    exact = {"errors": {"out": 0.0}, "bounds": {"out": 1.0}}
    kinds = {each.name: each for each in compare.VARIANTS}
    shown = [compare.Outcome(kinds["burst"], **exact, **ours, bytes=[10, 10])]
    shown += [compare.Outcome(kinds[compare.STRONGEST], **exact, **theirs, bytes=[20, 20])]
    shown += [compare.Outcome(kinds["ringmaster ring"], **exact, comparable=False, bytes=[40, 40])]
    console = compare.Console(record=True, width=150, file=io.StringIO())
    compare.show(console, shown, "")
    head, _, ours_line, theirs_line, untimed, *below = console.export_text().splitlines()
    columns = [name.strip() for name in head.split("  ") if name.strip()]
    assert columns == ["variant", *compare.LEGEND]
    assert ours_line.split()[2:] == ["1.00", "1.00", "10", "B", "0.500"]
    assert "1.00 (1.00 to 1.50)" in theirs_line and "1.00 (0.50 to 1.50)" in theirs_line
    assert untimed.split()[-3:] == ["40", "B", "2.000"] and "(" not in untimed
    text = " ".join(below)
    assert "ringmaster ring is right and not timed" in text
    assert all(f"{name}: " in text for name in compare.LEGEND) and "a call of burst takes 2.00 (1.00 to 4.00) s" in text


def compared(*given: Any, **options: Any) -> dict[str, compare.Outcome]:
    return {own.variant.name: own for own in compare.compare(WORLD, *given, **options)}


@pytest.mark.long
def test_every_variant_is_right_timed_and_sends_what_its_formula_says() -> None:
    need("ring_flash_attn", "yunchang", "ringmaster")
    found = compared(SIZE, 2)
    assert found.pop("yunchang hybrid zigzag").refused == "needs at least 4 ranks, not 2"
    for name, own in found.items():
        assert own.correct, (name, own)
        assert own.comparable != (name in ("ringmaster ring", "ringmaster distflash")), name
        assert len(own.seconds) == len(own.ratios) == (2 if own.comparable else 0), name
        assert set(own.errors) == {"out", "dq", "dk", "dv"}, name
        assert 0 < max(own.errors.values()) < 0.02, name
    pairs = zip(found["ring-flash-attn zigzag"].seconds, found["burst"].seconds, strict=True)
    assert found["ring-flash-attn zigzag"].ratios == [theirs / ours for theirs, ours in pairs]
    assert found["burst"].ratios == [1.0, 1.0]
    n = SIZE.seq_len // WORLD * SIZE.heads * SIZE.head_dim
    ring = 2 * n * (WORLD - 1) * 2 + 2 * n * (WORLD - 1) * 2 + 2 * n * WORLD * 4  # K, V twice; dK, dV in fp32
    for name in ("ring-flash-attn basic", "ring-flash-attn zigzag", "ring-flash-attn stripe", "yunchang zigzag"):
        assert found[name].bytes == [ring] * WORLD, name
    assert found["yunchang ulysses"].bytes == [8 * n * 2 * (WORLD - 1) // WORLD] * WORLD
    assert found["ringmaster ulysses"].bytes == [8 * n * 2 * (WORLD - 1)] * WORLD, "gathered: gloo lacks its all-to-all"
    assert sum(found["burst"].bytes) <= 0.6 * ring * WORLD


@pytest.mark.long
def test_a_wrong_result_gets_no_time() -> None:
    need("ring_flash_attn")
    name = "ring-flash-attn zigzag"  # whose fp32 accumulators alias its buffers if the inputs are fp32
    found = compared(SIZE.at(256, dtype="float32"), 1, names=[name])
    wrong, ours = found[name], found["burst"]
    assert wrong.errors["dq"] > 0.05 > wrong.bounds["dq"]
    assert not wrong.correct and not wrong.seconds and not wrong.ratios
    assert ours.correct and len(ours.seconds) == 1
    console = compare.Console(record=True, width=130, file=io.StringIO())
    compare.show(console, [*found.values()], "")
    assert "WRONG" in console.export_text()


@pytest.mark.long
def test_what_is_not_installed_is_named(monkeypatch, capsys, tmp_path):
    """And ours is compared with PyTorch in one process all the same."""
    real = importlib.util.find_spec
    missing = ("ring_flash_attn", "yunchang", "ringmaster")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name in missing else real(name))
    sizes = ["--seq-len", "256", "--heads", "4", "--head-dim", "32", "--rounds", "1"]
    compare.main([*sizes, "--json", str(tmp_path / "peers.json")])
    assert "not installed: pip install ring-flash-attn==" in capsys.readouterr().out
    for row in json.loads((tmp_path / "peers.json").read_text())["rows"]:
        theirs = row["name"].startswith(("ring-", "yunchang", "ringmaster"))
        assert row["correct"] != theirs and (row["refused"] or "").startswith("not installed: pip") == theirs
        assert len(row["seconds"]) == (not theirs) and (row["version"] is None) == theirs


@pytest.mark.parametrize(("world", "names", "reported"), [(1, None, "world=1"), (2, ["unknown"], "names has")])
def test_arguments_are_refused_by_name(world: int, names: Any, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        compare.compare(world, SIZE, 0, names=names)


def move_and_count() -> dict[str, tuple[int, int]]:
    """For each kind of traffic: the meter's count and what the process wrote into its sockets."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, rows = torch.zeros(world, 1 << 18), [torch.empty(1 << 18) for _ in range(world)]

    def ring() -> None:
        operations = [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, x + 1, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    kinds = {
        "point to point": ring,
        "all to all": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "all gather": lambda: dist.all_gather(rows, x[0].contiguous()),
    }
    counts = {}
    for kind, move in kinds.items():
        dist.barrier()
        before = written()
        with TrafficMeter() as meter:
            move()
        dist.barrier()  # all is written: gloo's ranks leave it after their peers came
        counts[kind] = meter.sent, written() - before
    with TrafficMeter() as meter:
        dist.all_reduce(torch.zeros(4))
    counts["all reduce"] = meter.sent, 0
    return counts


def written() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads /proc/self/io, which only Linux has")
@pytest.mark.long
def test_the_meter_counts_what_the_sockets_carry() -> None:
    with WorkerPool(3) as pool:
        for counts in pool.run(move_and_count):
            assert counts.pop("all reduce")[0] is None, "what can't be counted isn't guessed"
            for kind, (counted, carried) in counts.items():
                assert counted <= carried <= counted * 1.001 + 4096, (kind, counted, carried)
