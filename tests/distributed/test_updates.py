"""What an update does to the weights, against AdamW and its schedule written out, and in what gradients are summed."""

import itertools
import math
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from burst_attention.launch.join import join
from burst_train.data.sequences import open_sequences
from burst_train.parallel.parameters import SumByRank
from burst_train.step.loop import Trainer
from burst_train.step.model import model_config
from tests.support.training import config_of

from .test_train import one_device

STEPS, CLIP = 3, 0.1
OPTIM = {"lr": 0.02, "min_lr": 0.5, "warmup": 2, "weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-5}


def whole_weights(model):
    return {key.removeprefix("model."): p.full_tensor().detach().clone() for key, p in model.named_parameters()}


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
