"""Where a step's time goes, as a run tells it."""

import json
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from burst_attention.comm.transport import Transport
from burst_attention.integrations.hf import token_wise
from burst_attention.launch.join import join
from burst_train.step.loop import Trainer, train
from burst_train.step.model import model_in
from tests.support.training import config_of, events, metrics, records

LATE = 0.2
LONG = 20


def step_with_rank_1_late(config):
    """Once rank 0 waits for its attention, rank 1 stays away for a while; how long this rank is said to have waited."""
    mark, wait = Path(config.run.out), Transport.wait

    def marking(transport, pending):
        mark.touch()
        wait(transport, pending)

    with join(device="cpu", timeout=LONG) as context:
        trainer = Trainer(config, context)

        def hook(*_):
            if context.rank == 0:
                Transport.wait = marking
                return
            until = time.monotonic() + LONG
            while not mark.exists() and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(LATE)

        model_in(trainer.model).get_submodule("model.layers.0.input_layernorm").register_forward_hook(token_wise(hook))
        try:
            return next(trainer.steps()).exchange_seconds
        finally:
            Transport.wait = wait


def test_a_rank_that_others_wait_for_is_seen_in_their_waits(pools, corpus, tmp_path):
    assert pools(2).run(step_with_rank_1_late, config_of(corpus, tmp_path / "waits"))[0] >= LATE


def test_waits_and_mfu_are_in_the_metrics_the_summary_and_tensorboard(pools, corpus, tmp_path):
    out = tmp_path / "run"
    summary = pools(2).run(train, config_of(corpus, out, peak_tflops=0.25))[1]
    for record in records(out):
        assert record["mfu"] == pytest.approx(record["flops"] / record["seconds"] / 0.5e12)
        assert 0 < record["exchange_seconds"] < record["seconds"]
    seconds, flops = (sum(metrics(out, name)) for name in ("seconds", "flops"))
    assert summary.mfu == pytest.approx(flops / seconds / 0.5e12)
    assert len(summary.exchange_seconds) == 2
    assert summary.exchange_seconds[0] == pytest.approx(sum(metrics(out, "exchange_seconds")) / 4)
    assert [event.value for event in events(out, "mfu")] == pytest.approx(metrics(out, "mfu"))
    assert len(events(out, "exchange_seconds")) == 4


def test_unknown_values_are_left_open(pools, corpus, tmp_path):
    summary = pools(2).run(train, config_of(corpus, tmp_path / "run", strategy="tensor", seq_len=64, steps=2))[0]
    assert summary.mfu is None and summary.exchange_seconds == [None, None]


def step_until_reported(config):
    """Keep rank 1 in its data phase until rank 0 has reported; return this rank's lines."""
    mark, lines = Path(config.run.out), []

    def tell(text):
        lines.append(text)
        if "behind" in text:
            mark.touch()

    class Late:
        def __init__(self, stream):
            self.stream, self.place = stream, stream.place

        def __next__(self):
            until = time.monotonic() + LONG
            while not mark.exists() and time.monotonic() < until:
                time.sleep(0.01)
            return next(self.stream)

    with join(device="cpu", timeout=2 * LONG) as context:
        trainer = Trainer(config, context)
        trainer.watch._tell = tell
        if context.rank == 1:
            trainer.sequences = Late(trainer.sequences)
        next(trainer.steps())
        trainer.watch.close()
        return lines


@pytest.mark.long
def test_a_rank_that_keeps_others_waiting_is_named_while_they_wait(pools, corpus, tmp_path):
    first, second = pools(2).run(step_until_reported, config_of(corpus, tmp_path / "reported", step_timeout=5.0))
    assert first[0].startswith("rank 0: step 1 has taken ") and "it has been in its forward phase" in first[0]
    assert second[0].startswith("rank 1: step 1 has taken ") and "it has been in its data phase" in second[0]
    assert first[1:] == ["step 1: behind: rank 1, in the data phase; others are in the forward phase"]


def test_a_step_is_recorded_on_every_rank_and_belongs_to_the_run(pools, corpus, tmp_path):
    out = tmp_path / "run"
    pools(2).run(train, config_of(corpus, out, profile=3))
    names = [f"step-00000003-rank-0000{rank}.json" for rank in (0, 1)]
    assert sorted(path.name for path in (out / "profile").iterdir()) == names
    for name in names:
        events = json.loads((out / "profile" / name).read_text())["traceEvents"]
        steps = [event for event in events if event.get("name") == "Optimizer.step#AdamW.step"]
        assert len(steps) == 1, "of one step"
        assert any("burst" in event.get("name", "") for event in events)
    pools(2).run(train, config_of(corpus, out, overwrite=True))
    assert not (out / "profile").exists(), "another run does not keep it"


def test_a_trace_that_can_not_be_written_ends_nothing(pools, corpus, tmp_path):
    out = tmp_path / "run"
    (out / "profile").parent.mkdir()
    summary = pools(1).run(train_without_room, config_of(corpus, out, profile=2))[0]
    assert summary.steps == 4


def train_without_room(config):
    """A file stands where the traces' folder would be, once the run has its folder."""
    steps = Trainer.steps

    def blocked(trainer):
        (Path(config.run.out) / "profile").touch()
        return steps(trainer)

    with patch.object(Trainer, "steps", blocked):
        return train(config)
