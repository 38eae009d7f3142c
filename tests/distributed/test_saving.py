"""Checkpoints written during training, the best checkpoint, and when each is due."""

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from burst_attention.launch.join import join
from burst_attention.testing import WorkerError
from burst_train.checkpoint import files as checkpoint
from burst_train.checkpoint import writer
from burst_train.checkpoint.saving import Saver
from burst_train.checkpoint.writer import CheckpointWriter
from burst_train.cli.export import chosen
from burst_train.run.folder import list_checkpoints, name_of
from burst_train.run.interrupt import InterruptedRunError, StopRequests
from burst_train.step.export import export
from burst_train.step.loop import Trainer, train
from tests.support.checkpoints import state_at
from tests.support.training import config_of, losses, metrics, weights

LONG = 60.0  # seconds that a test waits for what comes at once


def train_noting(config):
    reporter = Reporter()
    train(config, [reporter])
    return reporter.notes


def names(out):
    """What is in a run's folder of checkpoints."""
    return sorted(path.name for path in (Path(out) / "checkpoints").iterdir())


def steps_saved(out):
    return sorted(int(path.name.removeprefix("step-")) for path in list_checkpoints(Path(out)))


class Reporter:
    """Record all events; tests pass callbacks for steps and notes."""

    def __init__(self, at=lambda record: None, noted=lambda text: None):
        self.notes, self.at, self.noted = [], at, noted

    def start(self, config, parameters, done):
        pass

    def step(self, record):
        self.at(record)

    def note(self, text):
        self.notes.append(text)
        self.noted(text)

    def interrupt(self, interrupted):
        pass

    def finish(self, summary):
        pass


def write_what_changes(out):
    """Change every tensor as soon as it was copied, and only then write; returns what came back."""
    with join(device="cpu", timeout=LONG) as context:
        torch.manual_seed(0)
        whole = torch.randn(6, 3)
        spread = distribute_tensor(whole.clone(), context.everyone, [Shard(0)])
        tensors = {"spread": spread, "strided": whole.clone().t(), "half": whole.to(torch.bfloat16), "none": whole[:0]}
        state = state_at(3, generation={"list": [1]})
        draft = CheckpointWriter(Path(out), tensors, state, step=3, context=context)
        for tensor in (spread.to_local(), tensors["strided"], tensors["half"]):
            tensor.fill_(7.0)
        state["generation"]["list"].append(2)
        draft.write_during_training()
        folder = draft.seal()
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        checkpoint.load(folder, found)
        same = [torch.equal(found["spread"].full_tensor(), whole), torch.equal(found["strided"], whole.t())]
        same.append(torch.equal(found["half"], whole.to(torch.bfloat16)))
        return same, checkpoint.check(folder).generation["list"], folder.name


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_changed_after_it_was_copied_does_not_reach_the_disk(pools, tmp_path, world):
    for same, reported, name in pools(world).run(write_what_changes, str(tmp_path)):
        assert same == [True] * 3 and reported == [1] and name == name_of(3)


def train_while_writing(config):
    """Writing waits until two more steps were taken, on all ranks; returns what was to be seen then."""
    written, seen, write = threading.Event(), [], CheckpointWriter.write

    def late(draft):
        assert written.wait(LONG)
        write(draft)

    def at(record):
        if record.step == 5:
            seen.append(names(config.run.out))
            written.set()

    if os.environ.get("RANK") != "0":
        written.set()
    reporter = Reporter(at)
    with patch.object(CheckpointWriter, "write", late):
        train(config, [reporter])
    return seen, reporter.notes


@pytest.mark.long
def test_steps_go_on_while_a_checkpoint_is_written_and_none_is_to_be_seen_before_it_is_whole(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run", steps=6, save_every="3", keep=9)
    seen, notes = pools(2).run(train_while_writing, config)[0]
    assert seen == [["step-00000003.unfinished"]]
    assert names(tmp_path / "run") == [name_of(step) for step in (3, 6)], "the last one was waited for"
    assert not [note for note in notes if "could not" in note]


def train_slowly(config):
    """Block the write until a reporter notes that training waits for it; return the notes."""
    reported, write = threading.Event(), CheckpointWriter.write
    reporter = Reporter(noted=lambda _: reported.set())

    def late(draft):
        if os.environ.get("RANK") == "0":
            assert reported.wait(LONG)
        write(draft)

    with patch.object(CheckpointWriter, "write", late):
        train(config, [reporter])
    return reporter.notes


def test_a_checkpoint_that_is_due_while_one_is_written_waits_for_it(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run", steps=6, save_every="2", keep=9)
    notes = pools(2).run(train_slowly, config)[0]
    assert [note for note in notes if "Training waits for it" in note] == notes and len(notes) == 1
    assert "the checkpoint after step 2 is still being written" in notes[0]
    assert steps_saved(tmp_path / "run") == [2, 4, 6]


def train_with_other_bytes(config):
    """Damage what rank 1 writes for the first checkpoint; return the reported notes."""
    put = CheckpointWriter._put

    def damaging(draft, path):
        written = put(draft, path)
        if draft.step == 2 and os.environ.get("RANK") == "1":
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
        return written

    with patch.object(CheckpointWriter, "_put", damaging):
        return train_noting(config), names(config.run.out)


def test_a_checkpoint_that_reads_back_differently_is_reported(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run", steps=4, save_every="2")
    notes, kept = pools(2).run(train_with_other_bytes, config)[0]
    failed = [note for note in notes if "could not be written" in note]
    assert len(failed) == 1 and "after step 2" in failed[0] and "rank 1" in failed[0] and "other bytes" in failed[0]
    assert kept == [name_of(4)]


def train_scripted(config, held_out):
    """The held-out losses are given, by step."""
    with patch.object(Trainer, "evaluate", lambda self: (held_out[self.step], 10)):
        return train(config)


def end_at(config, step, held_out):
    """Ask for an end after a step, in a run whose held-out losses are given."""
    reporter = Reporter(lambda record: os.kill(os.getpid(), 15) if record.step == step else None)
    with patch.object(Trainer, "evaluate", lambda self: (held_out[self.step], 10)):
        try:
            train(config, [reporter])
        except InterruptedRunError as interrupted:
            return interrupted.status
    return 0


@pytest.mark.long
def test_the_best_held_out_checkpoint_is_kept_and_exported(pools, corpus, tmp_path):
    held_out = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 1.0, 6: 1.5}
    config = config_of(corpus, tmp_path / "run", steps=6, save_every="2", keep=1, eval_every=1)
    assert pools(2).run(end_at, config, 4, held_out) == [75, 75]
    assert steps_saved(tmp_path / "run") == [2, 4]
    again = replace(config, run=replace(config.run, resume="newest"))
    summaries = pools(2).run(train_scripted, again, held_out)
    assert steps_saved(tmp_path / "run") == [2, 6], "what is as good later is not better"
    assert [(summary.best_step, summary.best_held_out_loss) for summary in summaries] == [(2, 1.0)] * 2
    assert metrics(tmp_path / "run", "held_out_loss")[:3] == [3.0, 1.0, 2.0]
    source = chosen(tmp_path / "run", pytest.fail, best=True)
    assert source.name == name_of(2)
    export(source, tmp_path / "model")
    with pytest.raises(ValueError, match=r"--best: .* holds no evaluated checkpoint"):
        chosen(tmp_path, pytest.fail, best=True)


@pytest.mark.slow
def test_a_run_that_is_evaluated_on_the_way_has_the_weights_of_one_that_is_not(pools, corpus, tmp_path):
    plain = config_of(corpus, tmp_path / "plain", steps=4)
    often = config_of(corpus, tmp_path / "often", steps=4, eval_every=3, save_every="1")
    (plain_sum, *_), (often_sum, *_) = pools(2).run(train, plain), pools(2).run(train, often)
    expected, got = weights(tmp_path / "plain"), weights(tmp_path / "often")
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert plain_sum.held_out_loss == often_sum.held_out_loss and plain_sum.best_step is None
    found = metrics(tmp_path / "often", "held_out_loss")
    assert [loss is not None for loss in found] == [False, False, True, True], "and after the last step"
    assert found[3] == often_sum.held_out_loss


def test_a_way_that_was_given_up_goes_with_the_first_save_of_another(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run", steps=6, save_every="2", keep=3)
    pools(1).run(train, config)
    assert steps_saved(tmp_path / "run") == [2, 4, 6]
    (tmp_path / "run" / "checkpoints" / "step-00000008.unfinished").mkdir()
    early = str(tmp_path / "run" / "checkpoints" / name_of(2))
    other = replace(config, run=replace(config.run, resume=early, steps=3, save_every="3", keep=1))
    other = replace(other, optim=replace(other.optim, decay_steps=6))
    pools(1).run(train, other)
    assert names(tmp_path / "run") == [name_of(3)]


@pytest.mark.long
def test_resume_auto_goes_on_where_there_is_something_to_go_on_from(pools, corpus, tmp_path):
    out = tmp_path / "run"
    config = config_of(corpus, out, steps=2, resume="auto")

    def note(config):
        return pools(2).run(train_noting, config)[0]

    assert pools(2).run(end_at, config, 1, {}) == [75, 75]
    assert note(config) == [f"--resume auto: {out} holds an unfinished run, saved after step 1: resuming it"]
    assert len(losses(out)) == 2
    with pytest.raises(WorkerError, match="already holds a run; choose another folder or add --overwrite"):
        note(config)
    over = replace(config, run=replace(config.run, overwrite=True))
    assert note(over) == [f"--resume auto: {out} holds a finished run: starting a run"]
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    (out / "summary.json").unlink()  # as if it had been killed before it saved
    assert note(config) == [f"--resume auto: {out} holds a run without checkpoints: starting a run"]
    new = config_of(corpus, tmp_path / "new", steps=1, resume="auto")
    assert note(new) == [f"--resume auto: {tmp_path / 'new'} holds no run: starting a run"]


class Alone:
    """A context of one rank without communication."""

    rank, world = 0, 1

    def collect(self, value):
        return [value]

    def greatest(self, *values):
        return list(values)


def saver_of(tmp_path, now, **changes):
    """A Saver whose clock is ``now[0]``, and the steps at which it began to save."""
    config = config_of("none", tmp_path, **changes)
    run = SimpleNamespace(config=config, context=Alone(), step=0, held_out=None, model=torch.nn.Linear(2, 2))
    saver = Saver(run, StopRequests(None), lambda text: None, clock=lambda: now[0])
    begun = []

    def begin():
        begun.append(run.step)
        saver._saved_at = now[0]

    saver._begin = begin
    return saver, run, begun


def test_minutes_between_saves_are_counted_by_the_clock(tmp_path):
    now = [1000.0]
    saver, run, begun = saver_of(tmp_path, now, save_every="2m", steps=99)
    for at in (1060.0, 1119.9, 1120.0, 1121.0, 1239.0, 1240.0, 1500.0):
        now[0], run.step = at, run.step + 1
        saver.after_step(0.1)
    assert begun == [3, 6, 7]


def test_before_the_first_save_a_deadline_leaves_it_the_time_that_its_bytes_take(tmp_path, monkeypatch):
    """All ranks' weights and moments, at the rate of the disk: of a byte a millisecond here."""
    wrote = []

    def write(path, tensors, *_):
        path.write_bytes(bytes(4))
        wrote.append((path, sum(x.numel() for x in tensors.values())))
        now[0] += wrote[-1][1] / 1000

    now = [0.0]
    monkeypatch.setattr(writer, "write_tensors", write)
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    run = SimpleNamespace(config=config_of("none", tmp_path, steps=9, save_every="60m"), context=Alone(), step=1)
    run.held_out, run.model = None, torch.nn.Linear(100, 25, bias=False)  # 2,500 weights: with moments 30,000 bytes
    saver = Saver(run, StopRequests(80.0, clock=lambda: now[0]), lambda text: None, clock=lambda: now[0])
    assert [size for _, size in wrote] == [writer.TRIAL // 8, writer.TRIAL]
    assert saver._expected_save == pytest.approx(30.0)
    assert not wrote[0][0].parent.exists()
    saver.save = lambda: tmp_path / "saved"
    now[0] = 17.0  # of 80: 63 are left, and 61 + 1.5 are asked for
    saver.after_step(1.0)
    now[0] = 18.0
    with pytest.raises(InterruptedRunError, match="--deadline after step 1: saved to"):
        saver.after_step(1.0)


def test_a_disk_is_tried_by_what_a_save_does_and_larger_saves_take_longer(tmp_path):
    began = time.monotonic()
    few = writer.seconds_to_write(tmp_path / "a", 1000)
    assert 0 < few <= time.monotonic() - began and {x.parent.name for x in tmp_path.rglob("*")} >= {"a"}
    began = time.monotonic()
    assert writer.seconds_to_write(tmp_path / "b", 1000 * writer.TRIAL) > 10 * (time.monotonic() - began)
    sizes = sorted(each.stat().st_size for each in (tmp_path / "b").iterdir())
    assert writer.TRIAL < sizes[-1] < 1.01 * writer.TRIAL and len(sizes) == 2, "of a small part"


def test_a_clock_of_the_day_that_jumps_back_changes_nothing(tmp_path, monkeypatch):
    began = time.time()
    requests = StopRequests(3600.0)
    saver, *_ = saver_of(tmp_path, [0.0], save_every="60m")
    real = Saver(saver.run, requests, lambda text: None)
    monkeypatch.setattr(time, "time", lambda: began - 10 * 24 * 3600)
    assert not requests.pending(1.0) and requests.pending(3700.0) and not real._is_due()
    monkeypatch.setattr(time, "time", lambda: began + 10 * 24 * 3600)
    assert not requests.pending(1.0) and not real._is_due()


@pytest.mark.long
def test_how_a_model_generates_is_kept(pools, corpus, tmp_path):
    from transformers import GenerationConfig

    pools(1).run(train, config_of(corpus, tmp_path / "first", steps=1))
    model = tmp_path / "first" / "model"
    GenerationConfig(eos_token_id=[3, 5], do_sample=True, temperature=0.3, max_new_tokens=11).save_pretrained(model)
    config = config_of(corpus, tmp_path / "run", steps=1, save_every="1", model=str(model))
    pools(2).run(train, config)
    export(list_checkpoints(tmp_path / "run")[0], tmp_path / "exported")
    for folder in (tmp_path / "run" / "model", tmp_path / "exported"):
        kept = GenerationConfig.from_pretrained(folder)
        assert (kept.eos_token_id, kept.temperature, kept.max_new_tokens) == ([3, 5], 0.3, 11), folder
