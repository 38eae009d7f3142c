"""Weights & Biases gets the contents of the run's folder, and its errors never end a run."""

import sys
from types import SimpleNamespace

import pytest

from burst_train import config as settings
from burst_train.run.metrics import StepRecord, Summary
from burst_train.run.tracking import Tracking
from burst_train.step.loop import train
from tests.support.training import config_of, losses, write_corpus

SUMMARY = Summary(1, 2.5, 2.5, None, 0, 10.0, 0, [1], [None], [0.0])


class Fake:
    """A stand-in for the package and for one of its runs."""

    def __init__(self, fails_at=0):
        self.logged, self.asked, self.finished, self.summary, self.fails_at = [], [], [], {}, fails_at
        self.id, self.url, self.dir = "abc", None, "folder"
        self.Settings = SimpleNamespace

    def init(self, **asked):
        self.asked.append(asked)
        return self

    def define_metric(self, *_, **__):
        pass

    def log(self, values):
        if values.get("step") == self.fails_at:
            raise ConnectionError("no network\nat all")
        self.logged.append(values)

    def finish(self, exit_code=0):
        self.finished.append(exit_code)


def record(step):
    return StepRecord(step, 2.5, 1e-3, float("nan"), 10.0, 1.0, 97, None, 0)


def test_a_run_that_goes_on_is_the_same_one(monkeypatch, tmp_path):
    fake, reported = Fake(), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume in (None, "newest"):
        each = Tracking("long", reported.append)
        each.start(config_of("corpus", tmp_path, wandb="long", resume=resume), 7, 0)
        each.step(record(1))
        each.finish(SUMMARY)
    assert [asked["id"] for asked in fake.asked] == [None, "abc"]
    assert fake.asked[0]["project"] == "long" and fake.asked[0]["config"]["run"]["steps"] == 4
    assert [values["loss"] for values in fake.logged] == [2.5, 2.5] and "grad_norm" not in fake.logged[0]
    assert fake.finished == [0, 0] and fake.summary["final/steps"] == 1
    assert reported == ["Weights & Biases, project long: folder"] * 2


def test_a_failure_there_is_reported_once(monkeypatch, tmp_path):
    fake, reported = Fake(fails_at=2), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    each = Tracking("long", reported.append)
    each.start(config_of("corpus", tmp_path), 7, 0)
    for step in (1, 2, 3):
        each.step(record(step))
    each.finish(SUMMARY)
    assert reported[1:] == ["--wandb: ConnectionError: no network; the run continues without logging to it"]
    assert [values["step"] for values in fake.logged] == [1] and not fake.finished


def train_with(config, fails_at):
    sys.modules["wandb"] = fake = Fake(fails_at)  # type: ignore[assignment]
    try:
        train(config)
    finally:
        del sys.modules["wandb"]
    return [values["loss"] for values in fake.logged if "loss" in values], fake.finished


def test_a_run_tells_every_step_and_ends_well_whatever_happens_there(pools, tmp_path):
    (tmp_path / "corpus").mkdir()
    corpus = write_corpus(tmp_path / "corpus")
    config = config_of(corpus, tmp_path / "run", wandb="long", steps=3, held_out=0)
    logged, finished = pools(1).run(train_with, config, 0)[0]
    assert logged == losses(tmp_path / "run") and len(logged) == 3 and finished == [0]
    logged, finished = pools(1).run(train_with, config_of(corpus, tmp_path / "2", wandb="long", steps=3), 2)[0]
    assert len(logged) == 1 and not finished and len(losses(tmp_path / "2")) == 3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"wandb": "long"}, "--wandb 'long' needs wandb: pip install wandb"),
        ({"lora": 8}, r"--lora 8 needs PEFT: in the checkout, run pip install -e '.\[trainer\]'"),
        ({"optimizer": "adamw-8bit"}, "--optimizer adamw-8bit needs torchao: pip install torchao"),
    ],
)
def test_without_its_package_a_flag_is_refused(monkeypatch, tmp_path, given, text):
    monkeypatch.setattr(settings, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=text):
        config_of("corpus", tmp_path, **given).check_packages()
    config_of("corpus", tmp_path).check_packages()


def test_the_package_itself_takes_it_offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    reported = []
    each = Tracking("long", reported.append)
    each.start(config_of("corpus", tmp_path, wandb="long"), 7, 0)
    each.step(record(1))
    each.note("something")
    each.finish(SUMMARY)
    assert len(reported) == 1 and reported[0].startswith("Weights & Biases, project long: ")
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
