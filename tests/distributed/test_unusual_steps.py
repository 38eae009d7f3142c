"""Steps: updates are AdamW's as written out; non-finite values and losses that stand out are reported."""

import itertools
import json
import math
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from burst_attention.integrations.hf import token_wise
from burst_attention.launch.join import join
from burst_train.data.sequences import open_sequences
from burst_train.health.finite import Spikes
from burst_train.step.loop import Trainer, train
from burst_train.step.model import model_config, model_in
from burst_train.step.sharding import SumByRank
from tests.support.training import config_of, records, summary_of

from .test_train import one_device


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

    model_in(trainer.model).get_submodule(layer).register_forward_hook(token_wise(hook))


def spoilt(layer, **named):
    """Within it the trainers that are made are spoilt."""
    make = Trainer.__init__

    def made(trainer, *given):
        make(trainer, *given)
        spoil(trainer, layer, **named)

    return patch.object(Trainer, "__init__", made)


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
    reported = pools(1).run(train_spoilt, config, "model.layers.1.mlp.down_proj", [2], 0, False, -1)[0]
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


STEPS, CLIP = 3, 0.1
OPTIM = {"lr": 0.02, "min_lr": 0.5, "warmup": 2, "weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-5}


def whole_weights(model):
    return {key: p.full_tensor().detach().clone() for key, p in model.named_parameters()}


def joined(config):
    parallel = config.parallel
    return join(device=parallel.device, timeout=parallel.timeout, data_parallel=parallel.data_parallel)


def trained(config):
    """Return (weights before, weights after ``steps`` steps, (rate, norm) of each step) of the trainer."""
    with joined(config) as context:
        trainer = Trainer(config, context)
        before = whole_weights(trainer.model)
        reported = [(record.lr, record.grad_norm) for record in itertools.islice(trainer.steps(), STEPS)]
        return before, whole_weights(trainer.model), reported


def adamw(model, state, step, rate):
    """One update as Loshchilov and Hutter write it, decay first; norms, which have one dim, don't decay."""
    norm = math.sqrt(sum((p.grad**2).sum().item() for p in model.parameters()))
    scale = min(1.0, CLIP / (norm + 1e-6))
    for p in model.parameters():
        first, second = state.setdefault(p, (torch.zeros_like(p), torch.zeros_like(p)))
        grad = p.grad * scale
        first.mul_(OPTIM["beta1"]).add_((1 - OPTIM["beta1"]) * grad)
        second.mul_(OPTIM["beta2"]).add_((1 - OPTIM["beta2"]) * grad**2)
        p.data -= rate * (OPTIM["weight_decay"] if p.ndim > 1 else 0.0) * p.data
        root = (second / (1 - OPTIM["beta2"] ** step)).sqrt() + OPTIM["eps"]
        p.data -= rate * first / (1 - OPTIM["beta1"] ** step) / root
        p.grad = None
    return norm


def test_updates_are_adamws_at_the_reported_rates(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path, steps=4, seq_len=33, dtype="float64", data_parallel=2, clip=CLIP, **OPTIM)
    before, after, reported = pools(2).run(trained, config)[0]
    reader, tokenizer = open_sequences(config)
    plain = AutoModelForCausalLM.from_config(model_config("tiny", tokenizer, 33), dtype=torch.float64)
    plain.load_state_dict(before)
    sequences, state = reader.training(), {}
    rates = [0.01, 0.02, 0.02 * (0.5 + 0.5 / 2)]  # up to the peak in two steps, then half a cosine's middle
    for step, rate in enumerate(rates, start=1):
        one_device(plain, itertools.islice(sequences, 2)).backward()
        norm = adamw(plain, state, step, rate)
        assert reported[step - 1] == pytest.approx((rate, norm), rel=1e-9)
        assert norm > 2 * CLIP, "it is clipped"
    for key, p in plain.named_parameters():
        moved = (p - before[key]).norm()
        assert (after[key] - p).norm() < 1e-7 * moved, key


def summed(config):
    """The dtypes that gradients are summed in and come in, and how many sums are no bf16 numbers."""
    seen = set()
    whole = SumByRank.__call__

    def watched(self, output_tensor, input_tensor, group, op, async_op=False):
        seen.add((input_tensor.dtype, output_tensor.dtype))
        return whole(self, output_tensor, input_tensor, group, op, async_op)

    with joined(config) as context, patch.object(SumByRank, "__call__", watched):
        trainer = Trainer(config, context)
        trainer.backward(list(itertools.islice(trainer.reader.training(), 1)))
        grads = torch.cat([p.grad.full_tensor().flatten() for p in trainer.model.parameters()])
    grads = grads[grads != 0]
    return seen, (grads != grads.bfloat16().float()).double().mean().item()


def test_gradients_in_bf16_are_summed_over_ranks_in_fp32(pools, corpus, tmp_path):
    for seen, finer in pools(2).run(summed, config_of(corpus, tmp_path, dtype="bfloat16", seq_len=64)):
        assert seen == {(torch.float32, torch.float32)}
        assert finer > 0.3, "sums that bf16 would have rounded"
