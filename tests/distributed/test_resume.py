"""Interrupted or killed runs go on: the same bits on the same ranks, the same losses on any."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from burst_attention import Hardware, make_plan
from burst_attention.cli import main
from burst_attention.launch import local as launch
from burst_attention.testing import WorkerError
from burst_train.checkpoint import writer as draft
from burst_train.checkpoint.manifest import discard
from burst_train.run.folder import list_checkpoints
from burst_train.run.interrupt import InterruptedRunError, StopRequests
from burst_train.step.loop import train
from tests.distributed.test_saving import Reporter, train_noting
from tests.support.training import config_of, losses, norms, summary_of, weights
from tests.tools.survive import ROOT

STEPS = 4


def changed(config, **changes):
    """The configuration with settings of ``run`` replaced."""
    return replace(config, run=replace(config.run, **changes))


def end_at(pool, config, step):
    """Have rank 0 alone asked to stop at a step: all ranks end after it, and save."""
    _, errors, lost = pool.gather(train_asked_at, config, step)
    assert not lost and {type(error) for error in errors.values()} == {InterruptedRunError}, errors


def train_asked_at(config, step):
    train(config, [Reporter(lambda record: os.kill(os.getpid(), signal.SIGTERM) if record.step == step else None)])


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {}),
        pytest.param(2, {"data_parallel": 2, "pack": "none"}, marks=pytest.mark.slow),
        pytest.param(2, {"packing": "balanced", "batch": 2}, marks=pytest.mark.slow),
    ],
    ids=["1 rank", "2 ranks", "2 groups", "balanced"],
)
def test_a_run_that_goes_on_has_the_weights_of_one_that_was_never_interrupted(pools, corpus, tmp_path, world, changes):
    config = config_of(corpus, tmp_path / "whole", steps=STEPS, global_batch=2, **changes)
    pools(world).run(train, config)
    lost = changed(config, out=str(tmp_path / "lost"), save_every="2")
    end_at(pools(world), lost, 3)
    discard(list_checkpoints(tmp_path / "lost")[0])  # as if it had been killed there
    assert [path.name for path in list_checkpoints(tmp_path / "lost")] == ["step-00000002"]
    with pytest.raises(WorkerError, match="holds an unfinished run, saved after step 2; add --resume to continue"):
        pools(world).run(train, lost)
    pools(world).run(forget_rates)
    pools(world).run(train, changed(lost, resume="newest"))
    assert losses(tmp_path / "lost") == losses(tmp_path / "whole")
    assert norms(tmp_path / "lost") == norms(tmp_path / "whole")
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "lost")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    first, second = (summary_of(tmp_path / name) for name in ("whole", "lost"))
    for key in ("steps", "first_loss", "last_loss", "held_out_loss"):
        assert first[key] == second[key], key
    last, *_, early = (rates_of(folder) for folder in list_checkpoints(tmp_path / "lost"))
    alone = world == 1 or "data_parallel" in changes
    assert last == early and (last is None) == alone  # measured once, with its date


def with_a_spare_weight(function, *arguments):
    """On a rank: call ``function`` while each feed-forward part has a weight that no forward uses."""
    made = LlamaMLP.__init__

    def with_spare(self, config):
        made(self, config)
        self.spare = nn.Linear(4, 4)

    with patch.object(LlamaMLP, "__init__", with_spare):
        return function(*arguments)


@pytest.mark.long
def test_weights_without_a_gradient_are_saved_and_restored(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "whole", steps=STEPS, global_batch=2)
    pools(2).run(with_a_spare_weight, train, config)
    lost = changed(config, out=str(tmp_path / "lost"), save_every="2")
    _, errors, _ = pools(2).gather(with_a_spare_weight, train_asked_at, lost, 2)
    assert {type(error) for error in errors.values()} == {InterruptedRunError}, errors
    (newest, *_) = list_checkpoints(tmp_path / "lost")
    saved = json.loads((newest / "state.json").read_text())["optimizer"]
    assert saved["steps"] == 2 and {*saved["fewer"].values()} == {0}
    assert {name.split(".")[-2] for name in saved["fewer"]} == {"spare"}
    pools(2).run(with_a_spare_weight, train, changed(lost, resume="newest"))
    assert losses(tmp_path / "lost") == losses(tmp_path / "whole")
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "lost")
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def forget_rates() -> None:
    """On a rank: let the next plan measure rates, as in a new process."""
    make_plan(1, hardware=Hardware(rates="preset")).transport.health.measured.clear()


def rates_of(checkpoint: Path) -> dict | None:
    """Return the rates by which a checkpoint's run was planned; a plan cuts their source to 200 characters."""
    rates = json.loads((checkpoint / "state.json").read_text())["rates"]
    return rates and rates | {"source": rates["source"][:200]}


@pytest.mark.long
def test_a_run_goes_on_over_other_ranks_layouts_strategies_and_groups(pools, corpus, tmp_path):
    places = [
        (1, {"strategy": "single"}),
        (2, {"strategy": "layout=contiguous"}),
        (4, {"data_parallel": 2}),
        (3, {"strategy": "layout=striped"}),
        (3, {"packing": "balanced", "batch": 2}),
        (4, {"strategy": "tensor", "data_parallel": 2}),
    ]
    shared = {"steps": len(places), "global_batch": 2, "save_every": "1", "keep": 1, "seq_len": 96}
    pools(1).run(train, config_of(corpus, tmp_path / "whole", **shared))
    for step, (world, changes) in enumerate(places, start=1):
        resume = "newest" if step > 1 else None
        config = config_of(corpus, tmp_path / "moved", **shared, resume=resume, **changes)
        if step < len(places):
            end_at(pools(world), config, step)
        else:
            pools(world).run(train, config)
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


@pytest.fixture(scope="module")
def interrupted(pools, corpus, tmp_path_factory):
    """A run over two ranks that was asked to stop after its second step, and saved after both."""
    out = tmp_path_factory.mktemp("interrupted") / "run"
    end_at(pools(2), config_of(corpus, out, steps=STEPS, global_batch=2, save_every="1"), 2)
    return out


def test_changed_data_is_reported(pools, corpus, tmp_path, interrupted):
    shutil.copytree(interrupted, tmp_path / "run")
    other = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    for path in other.iterdir():
        path.write_text(path.read_text().replace("sense", "cents"))
    state = tmp_path / "run"
    config = config_of(str(other), state, steps=STEPS, global_batch=2, resume="newest")
    with pytest.raises(WorkerError, match=r"--data .* differs from the checkpoint .*, which has "):
        pools(2).run(train, config)
    for path in Path(corpus).iterdir():  # by the same name
        path.rename(path.with_suffix(".kept"))
    try:
        for path in other.iterdir():
            shutil.copy(path, Path(corpus) / path.name)
        with pytest.raises(WorkerError, match="is not the data of the checkpoint: document"):
            pools(2).run(train, replace(config, data=replace(config.data, data=corpus)))
    finally:
        for path in Path(corpus).iterdir():
            if path.suffix == ".kept":
                path.rename(path.with_suffix(".txt"))


def test_what_a_run_can_not_resume_with_starts_no_rank(pools, corpus, tmp_path, monkeypatch, capsys):
    """Status 2: not started."""
    out = str(tmp_path / "run")
    shared = {"dtype": "float32", "lr": 2e-3, "save_every": "1", "steps": 2}  # as the command resolves them
    pools(1).run(train, config_of(corpus, out, **shared))
    monkeypatch.setattr(launch, "launch", lambda *_, **__: 0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    resumed = ["train", "--out", out, "--resume", "--ranks", "2", "--device", "cpu", "--steps", "4"]
    assert main(resumed) == 0, capsys.readouterr().err
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    assert main([*resumed, "--seq-len", "64"]) == 2
    assert "--seq-len 64 differs from the checkpoint state.json, which has 97; omit" in capsys.readouterr().err
    held = {path: path.read_text() for path in Path(corpus).iterdir()}
    try:
        for path, text in held.items():
            path.write_text(text.replace("sense", "cents"))
        assert main(resumed) == 2
        assert "--data is not the data of the checkpoint: document" in capsys.readouterr().err
    finally:
        for path, text in held.items():
            path.write_text(text)


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(pools, corpus, tmp_path, interrupted):
    shutil.copytree(interrupted, tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints" / "step-00000002").glob("shard-00002*"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    config = config_of(corpus, tmp_path / "run", steps=STEPS, global_batch=2, resume="newest")
    notes = pools(2).run(train_noting, config)[0]
    assert len(notes) == 1 and f"{file.name} is damaged" in notes[0] and "trying the checkpoint before it" in notes[0]
    assert len(losses(tmp_path / "run")) == STEPS


def save_what_is_no_tensor(config):
    from burst_attention.launch.join import join

    with join(device="cpu", timeout=20) as context:
        tensors = {"w": torch.zeros(3), "step": 3}
        with pytest.raises(TypeError, match=r"tensors\['step'\] is a int; only tensors of F64, F32"):
            draft.CheckpointWriter(Path(config.run.out), tensors, {}, step=1, context=context)
    return list(Path(config.run.out).rglob("*"))


def test_what_is_no_tensor_is_refused_before_anything_is_written(pools, corpus, tmp_path):
    assert pools(1).run(save_what_is_no_tensor, config_of(corpus, tmp_path)) == [[]]


def test_a_deadline_that_comes_near_is_seen_before_it_has_come():
    now = [0.0]
    requests = StopRequests(10.0, clock=lambda: now[0])
    assert not requests.pending(reserve=3.0)
    now[0] = 7.5
    assert requests.pending(reserve=3.0) and not requests.pending(reserve=1.0)
    assert not StopRequests(None).pending(reserve=1e9)


def survivors(points, seed, *worlds):
    """Run the command in a separate process and return its output: a fork server must start without threads."""
    words = ["tests/tools/survive.py", "--points", str(points), "--seed", str(seed), "--worlds", *worlds]
    result = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60 * points + 200
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_that_are_disturbed_fifty_times_end_with_the_same_bits():
    status, reported = survivors(50, 0, "2", "3")
    assert status == 0 and "50 of 50 disturbances left the weights" in reported, reported
