"""Unusual steps: non-finite values, and losses that stand out."""

import json
import math
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from burst_attention.integrations.hf import token_wise
from burst_attention.launch.join import join
from burst_train.health.finite import Spikes
from burst_train.step.loop import Trainer, train
from tests.support.training import config_of, records, summary_of


def spoil(trainer, layer, *, steps, rank, backward, place=0):
    """Have one number of a layer's output, or of its gradient, be NaN on one rank, in some steps."""

    def hook(_, __, output):
        if trainer.step + 1 not in steps or trainer.context.rank != rank:
            return None
        local = output.to_local() if isinstance(output, DTensor) else output
        spoilt = torch.zeros_like(local)
        spoilt.view(-1)[place] = math.nan
        if backward:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient + spoilt)
            return None
        if isinstance(output, DTensor):  # by hand, for a sum of these is of all ranks
            return DTensor.from_local(local + spoilt, output.device_mesh, output.placements, run_check=False)
        return local + spoilt

    trainer.model.model.get_submodule(layer).register_forward_hook(token_wise(hook))


def spoilt(layer, **named):
    """Within it the trainers that are made are spoilt."""
    make = Trainer.__init__

    def made(trainer, *given):
        make(trainer, *given)
        spoil(trainer, layer, **named)

    return patch.object(Trainer, "__init__", made)


def train_spoilt_at_end(config):
    return train_spoilt(config, "model.layers.1.mlp.down_proj", [2], 0, place=-1)


def train_spoilt(config, layer, steps, rank, backward=False, place=0):
    with spoilt(layer, steps=steps, rank=rank, backward=backward, place=place):
        try:
            return train(config)
        except FloatingPointError as error:
            return str(error)


def test_the_rank_and_the_layer_where_a_number_was_lost_are_named_alike_on_all_ranks(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run", global_batch=2)
    reported = pools(2).run(train_spoilt, config, "model.layers.0.mlp.down_proj", [2], 1)
    assert reported[0] == reported[1]
    assert reported[0].startswith(
        "step 2: loss nan, gradient norm nan: the output of model.layers.0.mlp.down_proj is the "
    )
    assert "first non-finite one, on rank 1 (1 of " in reported[0] and "--on-nan skip" in reported[0]
    assert len(records(tmp_path / "run")) == 1


@pytest.mark.long
@pytest.mark.parametrize("more", [{"remat": "layer", "mlp_chunks": 3}, {"strategy": "tensor-sequence", "seq_len": 64}])
def test_a_layer_is_named_whatever_is_done_to_layers(pools, corpus, tmp_path, more):
    config = config_of(corpus, tmp_path / "run", **more)
    reported = pools(2).run(train_spoilt, config, "model.layers.1.post_attention_layernorm", [1], 1)
    assert reported[0] == reported[1]
    assert "the output of model.layers.1.post_attention_layernorm is the first non-finite one, on rank 1" in reported[0]


@pytest.mark.long
def test_a_token_without_a_target_is_found_by_its_output_too(pools, corpus, tmp_path):
    """The loss does not see it: the gradient does, by the weights that saw it."""
    config = config_of(corpus, tmp_path / "run", pack="none", seq_len=61)
    reported = pools(1).run(train_spoilt_at_end, config)[0]
    assert reported.startswith("step 2: loss ") and "loss nan" not in reported and "gradient norm nan" in reported
    assert "the output of model.layers.1.mlp.down_proj is the first" in reported


def test_a_gradient_that_is_no_number_is_named(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run")
    reported = pools(2).run(train_spoilt, config, "model.layers.0.mlp.down_proj", [2], 1, True)
    assert reported[0] == reported[1]
    assert reported[0].startswith("step 2: loss ") and "loss nan" not in reported[0]
    assert (
        "gradient norm nan: the gradient of model.layers.0.mlp.down_proj.weight is the first non-finite one"
        in reported[0]
    )


def leave_out(config, layer, steps, rank, backward):
    """Weights, moments, rate and the next sequence before and after each step."""
    with spoilt(layer, steps=steps, rank=rank, backward=backward), join(device="cpu", timeout=60) as context:
        trainer = Trainer(config, context)
        states, records = [], []
        for record in trainer.steps():
            weights = torch.cat([p.detach().to_local().flatten() for p in trainer.model.parameters()])
            moments = [s["exp_avg"].to_local().flatten().clone() for s in trainer.optimizer.state.values()]
            rate, at = trainer.schedule.get_last_lr()[0], trainer.sequences.cursor().taken
            states.append((weights, torch.cat(moments), rate, at))
            records.append(record)
    return states, records


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.long
def test_a_step_that_is_left_out_changes_nothing_but_the_place_in_the_data(pools, corpus, tmp_path, backward):
    config = config_of(corpus, tmp_path / "run", on_nan="skip", global_batch=2)
    for states, found in pools(2).run(leave_out, config, "model.layers.1.mlp.up_proj", [3], 0, backward):
        assert [record.left_out is not None for record in found] == [False, False, True, False]
        (before, *_), (moved, *_) = states[1], states[3]
        assert all(torch.equal(x, y) for x, y in zip(states[1][:2], states[2][:2], strict=True))
        assert states[1][2] == states[2][2] != states[3][2] and not torch.equal(before, moved)
        assert [state[3] for state in states] == [2, 4, 6, 8]
        assert math.isfinite(found[3].loss) and torch.isfinite(moved).all()


@pytest.mark.long
def test_left_out_steps_are_reported_and_a_run_goes_on_from_there(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run", on_nan="skip", save_every="2")
    summary = pools(2).run(train_spoilt, config, "model.layers.1.mlp", [1, 2], 0)[1]
    assert summary.left_out == [1, 2]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    assert [record["loss"] is None for record in found] == [True, True, False, False]
    assert "model.layers.1.mlp" in found[1]["left_out"]
    assert summary.first_loss == found[2]["loss"]
    again = config_of(corpus, tmp_path / "run", on_nan="skip", resume=str(tmp_path / "run/checkpoints/step-00000002"))
    assert pools(2).run(train, again)[0].last_loss == summary.last_loss


@pytest.mark.long
def test_ten_steps_in_a_row_end_a_run(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run", on_nan="skip", steps=30)
    steps = [step for step in range(1, 31) if step != 9]
    reported = pools(2).run(train_spoilt, config, "model.layers.1.mlp", steps, 0)
    assert reported[0] == reported[1] and reported[0].startswith("step 19: ")
    assert "left out 10 steps in a row" in reported[0]


def test_a_loss_that_stands_out_is_reported_as_a_multiple_of_the_median():
    spikes = Spikes()
    assert [spikes.multiple(loss) for loss in [9.0, 1.0] * 5] == [None] * 10, "too few to judge by"
    spikes = Spikes()
    assert not any(spikes.multiple(loss) for loss in [1.0, 3.0, 2.0] * 5)
    assert spikes.multiple(3.9) is None
    assert spikes.multiple(math.nan) is None
    assert spikes.multiple(5.0) == 2.5
    assert spikes.multiple(2.0) is None


def train_with_a_spike(config):
    """The loss of step 12 is ten times what it is."""
    backward = Trainer.backward

    def spiking(trainer, sequences):
        loss, predicted = backward(trainer, sequences)
        return loss * (10 if trainer.step == 11 else 1), predicted

    with patch.object(Trainer, "backward", spiking):
        return train(config)


@pytest.mark.long
def test_a_spike_is_in_the_metrics_and_the_summary(pools, corpus, tmp_path):
    summary = pools(1).run(train_with_a_spike, config_of(corpus, tmp_path / "run", steps=13))[0]
    assert list(summary.spikes) == [12] and summary.spikes[12] > 5
    assert [record["step"] for record in records(tmp_path / "run") if record["spike"]] == [12]
    assert "12" in summary_of(tmp_path / "run")["spikes"]
