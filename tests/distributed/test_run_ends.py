"""How runs end: on a full disk, finished before, resumed from damage; and what their last lines say."""

import errno
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig

from burst_attention import cli
from burst_attention.launch.join import join
from burst_attention.launch.local import RefusedError
from burst_attention.testing import WorkerError
from burst_train.checkpoint import writer as draft
from burst_train.checkpoint.manifest import discard
from burst_train.checkpoint.saving import Saver
from burst_train.checkpoint.writer import CheckpointWriter
from burst_train.cli.train import parse
from burst_train.run.folder import SaveError, list_checkpoints, name_of
from burst_train.run.interrupt import InterruptedRunError
from burst_train.run.metrics import RunFolder, StepRecord, Summary, claim_run
from burst_train.step.export import export
from burst_train.step.loop import Trainer, train
from tests.distributed.test_saving import Reporter, end_at, steps_saved, train_noting, train_scripted
from tests.distributed.test_train_command import command, environment
from tests.support.training import config_of, events, losses, metrics, summary_of

SCHEDULE = 6  # steps of the runs whose rates are compared


def outcome_of(words, *, most=None):
    """(exit status, all that it printed) of ``burst``; ``most``: bytes of the largest file that it may write."""
    limit = None if most is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    ended = subprocess.run(
        [sys.executable, "-m", "burst_attention.cli", *words],
        env=environment(),
        preexec_fn=limit,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return ended.returncode, ended.stdout


def outcome_here(words, capsys):
    """The same in this process, for commands that only the launcher answers."""
    capsys.readouterr()
    status = cli.main(words)
    return status, "".join(capsys.readouterr())


# A full disk


@pytest.mark.long
def test_a_run_whose_saves_all_failed_says_so_and_ends_with_its_own_status(corpus, tmp_path):
    """The disk takes the model, 6.4 MB, and not a rank's shard of weights and moments, 9.6 MB."""
    flags = ("--ranks", "2", "--steps", "4", "--save-every", "2")
    status, reported = outcome_of(command(corpus, tmp_path, *flags), most=8_000_000)
    assert status == 74, reported
    last = "burst train: checkpoints after step 2, 4 could not be written; no checkpoint was saved. "
    assert reported.splitlines()[-1] == last + "Training is finished; the exit status is 74"
    assert summary_of(tmp_path)["missing_checkpoints"] == [2, 4] and steps_saved(tmp_path) == []
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert "to resume" not in reported


def train_full(config, failing, held_out):
    """Rank 1's disk is full when some steps' checkpoints are written; held-out losses are given, by step."""
    put = CheckpointWriter._put

    def full(self, path):
        if self.step in failing and self._context.rank == self._context.world - 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(self, path)

    with patch.object(CheckpointWriter, "_put", full):
        return train_scripted(config, held_out) if held_out else train(config)


@pytest.mark.parametrize(
    ("failing", "keep", "held_out", "missing", "saved"),
    [
        pytest.param({2}, 1, [], [], [4], id="replaced by a later one", marks=pytest.mark.slow),
        pytest.param({2}, 2, [], [2], [4], id="one of two kept"),
        pytest.param({4}, 1, [], [4], [2], id="the last", marks=pytest.mark.slow),
        pytest.param({2}, 1, [9.0, 1.0, 2.0, 1.5], [2], [4], id="the best"),
        pytest.param({2}, 1, [9.0, 1.0, 2.0, 0.5], [], [4], id="a better one later"),
    ],
)
@pytest.mark.long
def test_missing_are_checkpoints_that_the_run_would_hold(
    pools, corpus, tmp_path, failing, keep, held_out, missing, saved
):
    config = config_of(corpus, tmp_path, save_every="2", keep=keep, eval_every=1 if held_out else 0)
    summaries = pools(2).run(train_full, config, failing, dict(enumerate(held_out, start=1)))
    assert [summary.missing_checkpoints for summary in summaries] == [missing] * 2
    assert steps_saved(tmp_path) == saved


def train_without_room_for_the_model(config):
    """Rank 0 can write no large file from the last step on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def at(record):
        if record.step == config.run.steps:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))

    try:
        train(config, [Reporter(at)])
    except SaveError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_model_that_can_not_be_written_ends_all_ranks_with_a_sentence(pools, corpus, tmp_path):
    reported = pools(2).run(train_without_room_for_the_model, config_of(corpus, tmp_path), timeout=100)
    wanted = f"the trained model could not be written to {tmp_path}/model.unfinished: rank 0: File too large"
    assert reported == [wanted] * 2
    assert not (tmp_path / "summary.json").exists()


def train_on_a_full_disk(config, freed):
    """Limit files to 300 bytes from step 1 until step ``freed``; return the reported notes and the error."""
    before, noted = resource.getrlimit(resource.RLIMIT_FSIZE), []

    def at(record):
        limits = {1: 300, freed: before[0]}
        if record.step in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[record.step], before[1]))

    reporter = Reporter(at, noted.append)
    try:
        train(config, [reporter])
    except RefusedError as error:
        return noted, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return noted, ""


def test_metrics_wait_for_room_on_a_full_disk(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path, steps=6, save_every="9")
    ((reported, raised),) = pools(1).run(train_on_a_full_disk, config, 4)
    wanted = f"{tmp_path}/metrics.jsonl could not be written: File too large; "
    assert [note for note in reported if "metrics.jsonl" in note] == [
        wanted + "training goes on, and its metrics wait in memory for disk space"
    ]
    assert raised == "" and metrics(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
    assert summary_of(tmp_path)["steps"] == 6


def folder_that_fills_up(config):
    """What a run's folder tells if its disk is full from the second step to the end, and its error."""
    before, folder, reported = resource.getrlimit(resource.RLIMIT_FSIZE), RunFolder(config.run.out), []
    folder.tell = reported.append
    record = StepRecord(1, 2.0, 0.1, 1.0, 10.0, 1.0, 10, 0, 0)
    with claim_run(config):
        folder.start(config, 1, 0)
        folder.step(record)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
        try:
            folder.step(replace(record, step=2))
            folder.step(replace(record, step=3))
            folder.finish(Summary(3, 2.0, 2.0, None, 0, 10.0, 0, [1], [0.0], [0.0]))
        except RefusedError as error:
            return reported, str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return reported, ""


def test_metrics_that_never_find_room_end_the_run_with_a_sentence(pools, corpus, tmp_path):
    ((reported, raised),) = pools(1).run(folder_that_fills_up, config_of(corpus, tmp_path))
    cause = f"{tmp_path}/metrics.jsonl could not be written: File too large; "
    assert [note for note in reported if "metrics.jsonl" in note] == [
        cause + "training goes on, and its metrics wait in memory for disk space"
    ]
    assert raised == cause + f"the model is in {tmp_path}/model"


def draft_without_memory(out):
    """Rank 1 has no memory for its copy; (what is raised, what is left in the folder)."""

    def full(tensor):
        raise MemoryError("no room")

    with join(device="cpu", timeout=20) as context:
        raised = "nothing"
        with patch.object(draft, "_copy_of", full if context.rank == 1 else draft._copy_of):
            try:
                CheckpointWriter(Path(out), {"w": torch.zeros(3), "v": torch.zeros(4)}, {}, step=1, context=context)
            except (MemoryError, SaveError) as error:
                raised = f"{type(error).__name__}: {error}"
        context.collect(None)
        return raised, [path.name for path in (Path(out) / "checkpoints").iterdir()]


def test_a_rank_without_memory_for_its_copy_fails_the_save_on_all_ranks(pools, tmp_path):
    answers = pools(2).run(draft_without_memory, str(tmp_path), timeout=30)
    assert answers == [("SaveError: rank 1: MemoryError: no room", [])] * 2


# A finished run


@pytest.fixture(scope="module")
def finished(pools, corpus, tmp_path_factory):
    """A run of six steps over one rank that was saved after every second one."""
    out = tmp_path_factory.mktemp("finished") / "run"
    pools(1).run(train, config_of(corpus, out, steps=SCHEDULE, save_every="2", keep=9))
    return out


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.long
def test_a_finished_run_is_not_resumed_and_keeps_its_summary(pools, corpus, finished, capsys, named):
    before = (finished / "summary.json").read_bytes(), (finished / "metrics.jsonl").read_bytes()
    resume = str(finished / "checkpoints" / name_of(SCHEDULE)) if named else "newest"
    config = config_of(corpus, finished, steps=SCHEDULE, resume=resume)
    with pytest.raises(
        WorkerError, match=r"holds a finished run, and --steps 6 leaves no step after step 6; its model"
    ):
        pools(1).run(train, config)
    status, reported = outcome_here(["train", "--out", str(finished), "--resume", *([resume] if named else [])], capsys)
    assert status == 2 and "holds a finished run" in reported and reported.count("\n") == 1, reported
    assert before == ((finished / "summary.json").read_bytes(), (finished / "metrics.jsonl").read_bytes())


def test_a_run_that_was_killed_before_its_summary_is_finished_without_made_up_figures(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path, save_every="2")
    whole = pools(1).run(train, config)[0]
    (tmp_path / "summary.json").unlink()
    (again,) = pools(1).run(train, replace(config, run=replace(config.run, resume="newest")))
    assert (again.tokens_per_second, again.bytes_sent, again.bytes_predicted) == (None, [None], [None])
    assert (again.last_loss, again.held_out_loss) == (whole.last_loss, whole.held_out_loss)
    assert (tmp_path / "summary.json").exists() and (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("ended", [3, SCHEDULE], ids=["interrupted", "finished"])
@pytest.mark.long
def test_raised_steps_keep_the_schedule_of_the_run_and_say_how(pools, corpus, tmp_path, finished, ended):
    config = config_of(corpus, tmp_path, steps=SCHEDULE, save_every="2")
    if ended < SCHEDULE:
        assert pools(1).run(end_at, config, ended, {}) == [75]
    else:
        pools(1).run(train, config)
    more = parse(["--out", str(tmp_path), "--resume", "--steps", "9"])
    assert (more.run.steps, more.optim.decay_steps) == (9, SCHEDULE)
    notes = [note for note in pools(1).run(train_noting, more)[0] if "Training waits" not in note]  # on a slow disk
    kept = "--steps 9: the learning rate keeps the schedule of the run's start, which ends at step 6"
    assert notes == [kept + " and then stays at its minimum, 0.0002"]
    assert metrics(tmp_path, "lr") == metrics(finished, "lr") + [pytest.approx(2e-4, rel=1e-12)] * 3
    assert metrics(tmp_path, "loss")[:SCHEDULE] == losses(finished)
    assert parse(["--config", str(tmp_path / "config.toml")]).optim.decay_steps == SCHEDULE


def test_another_schedule_is_refused(pools, corpus, tmp_path, finished):
    config = config_of(corpus, tmp_path / "run", resume=str(finished / "checkpoints" / name_of(4)), steps=9)
    reported = "--steps 9 would change the learning rates .* has 6 steps; add --decay-steps 6 to keep them"
    with pytest.raises(WorkerError, match=reported):
        pools(1).run(train, config)
    with pytest.raises(WorkerError, match=r"--decay-steps 9 differs from the checkpoint .*, which has 6"):
        pools(1).run(train, replace(config, optim=replace(config.optim, decay_steps=9)))


# Damage


@pytest.mark.long
def test_damaged_checkpoints_have_one_way_out_which_works(pools, corpus, tmp_path, capsys):
    config = config_of(corpus, tmp_path, save_every="2", dtype="float32", lr=2e-3)  # as the command resolves them
    assert pools(1).run(end_at, config, 3, {}) == [75]
    assert steps_saved(tmp_path) == [2, 3]
    for folder in list_checkpoints(tmp_path):
        os.truncate(next(folder.glob("shard-*")), 100)
    status, reported = outcome_here(["train", "--out", str(tmp_path), "--resume"], capsys)
    assert status != 0
    last = reported.splitlines()[-1]
    assert all(f"{name_of(step)}: shard-00001" in last for step in (2, 3)) and "is truncated: 100 bytes" in last
    assert last.endswith("Give --overwrite instead of --resume to start the run again")
    assert "to resume" not in reported and "newest checkpoint" not in reported, reported
    pools(1).run(train, replace(config, run=replace(config.run, overwrite=True)))


# What is said of steps, and of the best


@pytest.mark.long
def test_a_held_out_loss_is_of_the_step_after_which_it_was_measured(pools, corpus, tmp_path):
    """Other steps have no held-out loss in metrics and checkpoints, so the best checkpoint was evaluated."""
    config = config_of(corpus, tmp_path, steps=5, eval_every=2, save_every="1", keep=9)
    held_out = {2: 1.0, 4: 2.0, 5: 3.0}
    (summary,) = pools(1).run(train_scripted, config, held_out)
    assert metrics(tmp_path, "held_out_loss") == [None, 1.0, None, 2.0, 3.0]
    states = {path.name: json.loads((path / "state.json").read_text()) for path in list_checkpoints(tmp_path)}
    assert [states[name_of(step)]["losses"]["held_out"] for step in range(1, 6)] == [None, 1.0, None, 2.0, 3.0]
    assert (summary.best_step, summary.best_held_out_loss) == (2, 1.0)
    config = replace(config, run=replace(config.run, out=str(tmp_path / "again")))
    (summary,) = pools(1).run(train_full, config, {2}, held_out)
    assert (summary.best_step, summary.best_held_out_loss) == (4, 2.0), "what was evaluated after step 2 is lost"


def test_a_short_run_leaves_a_checkpoint_that_goes_on(pools, corpus, tmp_path):
    """By default a run saves every 30 minutes, and at its end."""
    config = config_of(corpus, tmp_path, steps=2, decay_steps=4)
    pools(1).run(train, config)
    assert steps_saved(tmp_path) == [2]
    pools(1).run(train, replace(config, run=replace(config.run, steps=4, resume="newest")))
    assert steps_saved(tmp_path) == [2, 4] and len(losses(tmp_path)) == 4


def test_a_run_that_went_back_forgets_the_best_of_the_way_that_it_gave_up(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path, steps=4, eval_every=1, save_every="9", keep=9)
    pools(1).run(train_scripted, config, {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0})
    early = str(tmp_path / "checkpoints" / name_of(2))
    config = replace(config, run=replace(config.run, resume=early))
    (summary,) = pools(1).run(train_scripted, config, {3: 2.5, 4: 2.7})
    assert (summary.best_step, summary.best_held_out_loss) == (3, 2.5)
    assert steps_saved(tmp_path) == [1, 2, 3, 4]


def train_evaluating_slowly(config, seconds):
    """Return the seconds of each step that the saver got, and the deadline's reserve."""
    after_step, reported, began = Saver.after_step, [], time.monotonic()

    def slow(trainer):
        time.sleep(seconds)
        return 1.0, 10

    def note(saver, step_seconds):
        reported.append((step_seconds, saver.run.step))
        after_step(saver, step_seconds)

    with patch.object(Trainer, "evaluate", slow), patch.object(Saver, "after_step", note):
        try:
            train(config)
        except InterruptedRunError as interrupted:
            return reported, interrupted.reason, time.monotonic() - began
    return reported, "", time.monotonic() - began


@pytest.mark.long
def test_an_evaluation_counts_as_a_part_of_its_step_before_a_deadline(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path, steps=20, eval_every=2, save_every="9", deadline=12.0)
    ((reported, reason, seconds),) = pools(1).run(train_evaluating_slowly, config, 2.0)
    assert reason == "--deadline" and seconds < 12.0
    assert len(reported) > 1 and all(took >= 2.0 for took, step in reported if step % 2 == 0)


def test_tensorboard_has_each_step_once_after_a_run_went_back(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path, steps=4, save_every="2")
    assert pools(1).run(end_at, config, 3, {}) == [75]
    discard(list_checkpoints(tmp_path)[0])  # as if it had been killed: step 3 is taken again
    pools(1).run(train, replace(config, run=replace(config.run, resume="newest")))
    found = events(tmp_path, "loss")
    assert [event.step for event in found] == [1, 2, 3, 4]
    assert [event.value for event in found] == pytest.approx(losses(tmp_path), rel=1e-6)


def test_the_trained_model_and_an_exported_one_have_the_dtype_that_was_asked_for(pools, corpus, tmp_path):
    pools(1).run(train, config_of(corpus, tmp_path / "run", steps=1, save_every="1", save_dtype="float16"))
    export(list_checkpoints(tmp_path / "run")[0], tmp_path / "exported")
    for folder in (tmp_path / "run" / "model", tmp_path / "exported"):
        from safetensors.torch import load_file

        assert {x.dtype for x in load_file(folder / "model.safetensors").values()} == {torch.float16}, folder
        assert AutoConfig.from_pretrained(folder).dtype == torch.float16, folder
