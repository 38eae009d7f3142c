"""``burst bench``: what it measures is what was sent, what is wrong gets no figures, what can't be is refused."""

import json
import math
import os
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from burst_bench.command import CLUSTER, Arguments, ClusterArguments, compare, main
from burst_bench.harness import run
from burst_bench.harness.calibration import calibrated
from burst_bench.harness.judge import judge, sampled_error
from burst_bench.harness.measure import Measurement, measure
from burst_bench.harness.memory import give_back, peak_during, resident
from burst_bench.harness.results import Span
from burst_bench.harness.run import World
from burst_bench.harness.subjects import AttentionSubject, Fingerprint, ModelSubject
from burst_bench.harness.trace import Trace
from burst_bench.harness.workload import Workload, random_qkv

from burst_attention.plan.layout import Layout
from burst_attention.planner.presets import preset
from burst_train.strategies import choose
from tests.support.conditioning import greatest

EVERY = ("auto", "burst", "ring", "zigzag-ring", "ulysses", "tensor", "tensor-sequence")
SMALL = Workload(task="train", strategies=EVERY, seq_len=64, rounds=1, heads=4, kv_heads=4, head_dim=8, vocabulary=64)
NAMESPACES = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not (shutil.which("ip") or Path("/usr/sbin/ip").exists()),
    reason="an emulated cluster needs root and iproute2",
)


@pytest.mark.parametrize("task", ["attention", "train", pytest.param("prefill", marks=pytest.mark.slow)])
@pytest.mark.long
def test_what_is_counted_is_what_was_predicted(pools, task):
    ranks = pools(2).run(measure, replace(SMALL, task=task, dtype="float32", timeline=True))
    by_strategy = {figures[0].strategy: figures for figures in zip(*ranks, strict=True)}
    assert list(by_strategy) == list(EVERY)
    able = [strategy for strategy in EVERY if task != "attention" or not strategy.startswith("tensor")]
    for strategy in {*EVERY} - {*able}:
        assert f"--strategies {strategy} exchanges around attention" in by_strategy[strategy][0].refused
    first = by_strategy["burst"][0].fingerprints
    assert first and all(each.size > 0 for each in first)
    for strategy in able:
        for rank in by_strategy[strategy]:
            assert rank.counted == rank.predicted, strategy
            assert len(rank.seconds) == 1 and rank.seconds[0] > 0 and rank.peak >= 0
            waits, compute = (sum(s.end - s.start for s in rank.spans if s.kind == k) for k in ("wait", "compute"))
            assert waits > 0 and compute > 0 and any(span.kind == "exchange" for span in rank.spans)
            assert waits + compute == pytest.approx(max(span.end for span in rank.spans), rel=1e-6)
        found = by_strategy[strategy][0].fingerprints
        assert all(abs(x.value - y.value) < 1e-3 * y.size for x, y in zip(found, first, strict=True))
        assert sum(rank.counted for rank in by_strategy[strategy]) > 0, strategy


@pytest.mark.parametrize(("task", "dtype"), [("attention", "bfloat16"), ("train", "float32"), ("prefill", "bfloat16")])
@pytest.mark.long
def test_the_judge_finds_every_strategy_right(pools, task, dtype):
    first, second = pools(2).run(judge, replace(SMALL, task=task, dtype=dtype))
    assert first == second
    assert set(first) == {strategy for strategy in EVERY if task != "attention" or not strategy.startswith("tensor")}
    assert all(1e-9 < error <= bound < 0.1 for error, bound in first.values())


def sampled(spoil):
    job = replace(SMALL, task="attention", seq_len=128, dtype="float32")
    subject = AttentionSubject(job, choose("burst"), Trace())
    subject.run()
    if spoil is not None:
        subject.results[spoil] = subject.results[spoil] * (1.01 if spoil < 2 else 2.0)
    return sampled_error(job, subject)


def test_rows_at_the_timed_length_are_compared_with_fp64(pools):
    assert greatest(pools(2).run(sampled, None)) < 1e-5
    for spoiled in (0, 1):  # out and dq
        assert min(pools(2).run(sampled, spoiled)) == pytest.approx(0.01, rel=0.01)
    for spoiled in (2, 3):  # dk and dv, by sums
        assert min(pools(2).run(sampled, spoiled)) > 0.01


def spoiled_gradient(spoil):
    """Judge a strategy whose gradient of one kind of parameter is a fifth too small, in bf16."""
    backward = ModelSubject.backward

    def wrong(self):
        loss = backward(self)
        if self.groups == 1:
            for name, parameter in self.model.named_parameters():
                if spoil in name:
                    parameter.grad.mul_(0.8)
        return loss

    with patch.object(ModelSubject, "backward", wrong):
        return judge(replace(SMALL, strategies=("burst",), dtype="bfloat16"))["burst"]


@pytest.mark.parametrize("spoil", ["k_proj", "input_layernorm", "lm_head"])
@pytest.mark.long
def test_the_judge_sees_one_wrong_parameter(pools, spoil):
    for error, bound in pools(2).run(spoiled_gradient, spoil):
        assert error > bound


class Scripted:
    """In place of a pool: ranks that answer from a script, and what they were asked to measure."""

    world = 2

    def __init__(self, judged, figures):
        self.judged, self.figures, self.jobs = judged, figures, []

    def run(self, function, *arguments, timeout=0.0, patience=None):
        if function is judge:
            return [self.judged] * 2
        if function is not measure:
            return [0, 0]
        self.jobs += arguments
        return self.figures


def figures_of(strategy, **changes):
    fingerprints = [Fingerprint(6.0, 6.0), Fingerprint(2.0, 1.0)]
    right = {"seconds": [1.0], "wire": [0], "counted": 10, "predicted": 10, "peak": 100, "fingerprints": fingerprints}
    return Measurement(strategy, **(right | changes))


def test_no_figure_is_reported_of_a_strategy_that_is_wrong():
    good = (1e-6, 1e-5)
    for bad, changes in (
        ((1e-4, 1e-5), {}),
        ((math.nan, 1e-5), {}),
        (good, {"sampled": 1e-3}),
        (good, {"sampled": math.nan}),
        (good, {"fingerprints": [Fingerprint(6.0, 6.0), Fingerprint(2.01, 1.0)]}),
        (good, {"fingerprints": [Fingerprint(math.nan, 6.0), Fingerprint(2.0, 1.0)]}),
        (good, {"fingerprints": [Fingerprint(6.0, 6.0), Fingerprint(math.nan, math.nan)]}),
    ):
        figures = [figures_of("burst"), figures_of("ring", **changes), figures_of("ulysses")]
        scripted = Scripted({"burst": good, "ring": bad, "ulysses": good}, [figures] * 2)
        world = World(scripted, None, 1, lambda text: None)
        rows = world.rows(replace(SMALL, strategies=("burst", "ring", "ulysses"), dtype="float32"), [64])
        assert [row.passed for row in rows] == [True, False, True], (bad, changes)
        assert rows[1].seconds == () and rows[0].seconds == [1.0]
        assert rows[1].median is rows[1].tokens_per_second is rows[1].bytes_counted is rows[1].peak_memory is None


def test_a_strategy_by_itself_is_held_to_what_several_agreed_on():
    """And the loss to a closer bound than gradients in half precision."""
    scripted = Scripted({"burst": (1e-3, 1e-2), "ring": (1e-3, 1e-2)}, [[figures_of("burst"), figures_of("ring")]] * 2)
    world = World(scripted, None, 1, lambda text: None)
    job = replace(SMALL, strategies=("burst", "ring"), dtype="bfloat16")
    assert all(row.passed for row in world.rows(job, [64]))
    for fingerprints, passes in (
        ([Fingerprint(6.0, 6.0), Fingerprint(2.05, 1.0)], True),
        ([Fingerprint(6.0, 6.0), Fingerprint(2.2, 1.0)], False),
        ([Fingerprint(6.03, 6.0), Fingerprint(2.0, 1.0)], False),
    ):
        scripted.figures = [[figures_of("ring", fingerprints=fingerprints)]] * 2
        (row,) = world.rows(replace(job, strategies=("ring",), rounds=2), [64])
        assert row.passed == passes, fingerprints


def test_the_slowest_rank_is_timed_and_the_highest_weighed():
    ranks = [
        [figures_of("burst", seconds=[1.0, 4.0], counted=10, peak=100)],
        [figures_of("burst", seconds=[3.0, 2.0], counted=30, peak=300)],
    ]
    world = World(Scripted({"burst": (1e-6, 1e-5)}, ranks), None, 1, lambda text: None)
    (row,) = world.rows(replace(SMALL, strategies=("burst",), dtype="float32"), [64])
    assert (list(row.seconds), row.median, row.tokens_per_second) == ([3.0, 4.0], 3.5, 64 / 3.5)
    assert (row.bytes_counted, row.peak_memory, row.bytes_wire) == (20, 300, None)


def test_a_calibrated_world_plans_for_each_limit_of_its_links(monkeypatch):
    """Bytes are counted again at each link, because the plans differ."""
    monkeypatch.setattr(run, "calibrated", lambda pool: preset("cpu"))
    network, jobs = SimpleNamespace(set_rate=lambda rate: None, nodes=2), []
    for calibrates in (True, False):
        scripted = Scripted({"burst": (1e-6, 1e-5)}, [[figures_of("burst", chosen="zigzag, heads=2, query")]] * 2)
        world = World(scripted, network, 1, lambda text: None, calibrates=calibrates)
        rows = world.rows(replace(SMALL, strategies=("burst",)), [64], [None, 2e6])
        assert [row.chosen for row in rows] == ["zigzag, heads=2, query"] * 2
        jobs += scripted.jobs
    planned, slow, *uncalibrated = jobs
    assert planned.rates == preset("cpu")
    assert slow.rates == replace(preset("cpu"), across=slow.rates.across)
    assert slow.rates.across.bytes_per_second == pytest.approx(0.95 * 2e6 / 8)
    assert slow.resources and planned.resources
    assert [(job.rates, job.resources) for job in uncalibrated] == [(None, True), (None, False)]


def test_a_trace_shares_out_all_time():
    trace = Trace()
    trace.start = time.perf_counter() - 10
    trace.spans = [Span("wait", 2, 3, "b"), Span("wait", 0.5, 1, "a"), Span("exchange", 0, 3, "b")]
    found = [(span.kind, round(span.start, 3)) for span in trace.finish()]
    assert found == [("exchange", 0), ("compute", 0), ("wait", 0.5), ("compute", 1), ("wait", 2), ("compute", 3)]
    assert trace.finish()[-1].end == pytest.approx(10, abs=1.0)


def test_a_peak_is_seen_after_it_has_passed():
    give_back()
    before = resident()
    result, peak = peak_during(lambda: torch.ones(2**25).sum().item())  # 128 MiB, freed at once
    assert result == 2**25
    assert 120 * 2**20 < peak - before < 180 * 2**20
    give_back()  # a free part of the heap, left by earlier tests, may have held it
    assert resident() - before < 40 * 2**20


def test_inputs_drawn_for_some_positions_are_those_of_all():
    job = replace(SMALL, task="attention", seq_len=9001)
    everything = random_qkv(job)
    for layout in ("contiguous", "zigzag", "striped"):
        positions = torch.from_numpy(Layout(layout, job.seq_len, 3).positions(1))
        for mine, x in zip(random_qkv(job, positions), everything, strict=True):
            assert torch.equal(mine, x[:, :, positions])


@pytest.mark.slow
def test_memory_is_of_one_strategy_by_itself(pools):
    """The same strategy before and after another: 2 MiB for each of q, k, v, out, dout and their gradients.

    What is on its way when a rank is at its peak depends on how ranks happen to meet, 10 MiB of it: hence the lesser
    of two, after one that a process runs first. What another strategy leaves behind would be 16 MiB at least.
    """
    job = replace(SMALL, task="attention", seq_len=8192, head_dim=32, dtype="float32", rounds=0)
    strategies = ("burst", "burst", "burst", "ulysses", "burst", "burst")
    for figures in pools(2).run(measure, replace(job, strategies=strategies)):
        first, last = (min(each.peak for each in some) for some in (figures[1:3], figures[4:]))
        assert 14 * 2**20 < first < 48 * 2**20
        assert last == pytest.approx(first, abs=12 * 2**20)
        assert len(figures[0].seconds) == 1


@pytest.mark.parametrize(
    "task", ["train", *(pytest.param(each, marks=pytest.mark.slow) for each in ("attention", "prefill"))]
)
@pytest.mark.long
def test_the_command_writes_results_and_report(tmp_path, capsys, task):
    """And a row for each strategy and length, the refused ones included."""
    out = tmp_path / "bench"
    shape = ["--heads", "4", "--head-dim", "8", "--vocabulary", "64", "--rounds", "2"]
    arguments = [task, "--strategies", "burst", "ring", "single", "--seq-lens", "64", "96", *shape, "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "left out: single, 2 ranks: --strategy single runs each sequence on one rank" in printed
    assert "/ first's" in printed
    results = json.loads((out / "results.json").read_text())
    assert [(row["strategy"], row["seq_len"]) for row in results["rows"]] == [
        (strategy, length) for length in (64, 96) for strategy in ("burst", "ring", "single")
    ]
    for row in results["rows"]:
        if row["strategy"] == "single":
            assert row["refused"]
            continue
        assert row["error"] <= row["bound"] and len(row["seconds"]) == len(row["timeline"]) == 2
        assert row["bytes_counted"] == row["bytes_predicted"] > 0 and row["bytes_wire"] is None
        flops = replace(SMALL, task=task, seq_len=row["seq_len"]).flops()
        assert row["flops_per_second"] == pytest.approx(flops / statistics.median(row["seconds"]))
    assert f"burst bench {task}" in results["command"]
    assert results["revision"] and results["versions"]["torch"] == torch.__version__
    assert "ring" in (out / "report.html").read_text()
    assert main(arguments) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.long
def test_ranks_are_calibrated_and_plans_go_by_it(pools):
    rates = calibrated(pools(2))
    assert rates.source.startswith("measured by burst calibrate on 2 ranks")
    job = replace(SMALL, task="attention", strategies=("auto", "ulysses"), rates=rates, rounds=0)
    for ours, ulysses in pools(2).run(measure, job):
        assert "circulate=" in ours.chosen and "ulysses_degree=" in ours.chosen and ulysses.chosen is None
        assert ours.counted == ours.predicted > 0


@NAMESPACES
@pytest.mark.long
def test_a_cluster_counts_the_true_bytes_and_limits_them():
    """The strategy is fixed: with measured links, a slow one would change the plan."""
    job = replace(SMALL, strategies=("layout=zigzag,ulysses_degree=1", "tensor-sequence"), seq_len=1024, rounds=1)
    rate = 40e6
    with World.of(2, (2, 1)) as world:
        rows = world.rows(job, [1024], [None, rate])
    free, limited = ({row.strategy: row for row in rows if row.link == link} for link in (None, rate))
    for strategy in job.strategies:
        row = limited[strategy]
        assert row.passed
        assert row.bytes_counted < row.bytes_wire < 5 * row.bytes_counted + 1e6
        assert row.bytes_wire == pytest.approx(free[strategy].bytes_wire, rel=0.05)
        assert row.median > 8 * row.bytes_wire / rate * 0.8, "what is sent takes its time"
        assert row.bytes_uncounted == row.bytes_wire - row.bytes_counted


@pytest.mark.long
def test_tensor_parallelism_is_compared_with_one_process(pools):
    cut = replace(SMALL, task="train", strategies=("auto", "auto/tp:2", "ring/tp:4"), kv_heads=4, dtype="float32")
    for found in pools(4).run(judge, cut):
        assert found.keys() == {*cut.strategies}
        assert all(error <= bound for error, bound in found.values())


def test_strategies_taken_by_default_can_all_train_over_several_ranks():
    for spec in Arguments().strategies:
        choose(spec).check(SMALL.sizes, SMALL.seq_len, 2)  # ValueError if not


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["nothing"], "attention, train, prefill"),
        (["train", "--strategies", "megatron"], "'megatron' is unknown"),
        (["train", "--strategies", "ring:striped"], "'ring:striped' is unknown"),
        (["train", "--link", "10mbit"], "needs --cluster"),
        (["train", "--strategies", "tensor/tp:2"], "give a strategy of burst attention and a number of ranks"),
        (["train", "--seq-lens", "3", "--worlds", "4"], "--seq-lens 3 is shorter than the 4 ranks"),
        (["train", "--heads", "8", "--kv-heads", "3"], "--heads 8 must be a multiple of --kv-heads 3"),
    ],
)
def test_what_can_not_be_asked_is_refused_in_a_line(arguments, reported, capsys):
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert reported in message and message.startswith("burst bench: ") and message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["train", "--cluster", "8by1"], "'8by1'"),
        (["train", "--cluster", "2x1", "--link", "fast"], "'fast'"),
        (["train", "--cluster", "2x1", "--worlds", "4"], "--worlds can't be given with --cluster 2x1"),
    ],
)
def test_what_no_cluster_can_do_is_refused_in_a_line(arguments, reported, capsys):
    assert compare(CLUSTER, ClusterArguments, arguments) == 2
    message = capsys.readouterr().err
    assert reported in message and message.startswith(f"{CLUSTER}: ") and message.count("\n") == 1
    assert main(arguments) == 2
    assert f"--cluster is an option of `{CLUSTER}`" in capsys.readouterr().err
