"""Test the loss of Hugging Face models' logits over ranks, and that all ranks refuse an unsupported head."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from burst_attention import make_plan
from burst_attention.integrations import hf
from tests.support.hf_models import HEADS, SEQLEN, errors_against_the_model, make_batch, make_model, make_plans


def summed(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def errors_over_ranks(name):
    return errors_against_the_model(name, make_plans(name, 41, timeout=20, layout="zigzag"), summed)


@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradients_equal_the_models_own(pools, name):
    for errors, from_plain in pools(3).run(errors_over_ranks, name, timeout=60.0):
        assert max(errors.values()) <= 2e-6, errors
        assert from_plain > 1e-3, "the product alone would do"


class Shifted(LlamaForCausalLM):
    """A model that adds a constant to its logits, which no known form describes."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 1
        return out


def odd_model(name):
    return Shifted(make_model("llama").config).double() if name == "shifted" else make_model(name)


def odd_model_on_rank_1(name):
    """Return the text of this rank's error, and whether a later correct call works."""
    plan = make_plan(SEQLEN, timeout=10)
    labels, good = plan.shard_labels(make_batch()["labels"]), make_model("llama")
    hidden = torch.ones(2, plan.length, 32, dtype=torch.float64)
    dist.barrier()
    try:
        hf.next_token_loss(odd_model(name) if plan.rank == 1 else good, hidden, labels, plan)
        reported = "nothing was raised"
    except ValueError as error:
        reported = str(error)
    return reported, hf.next_token_loss(good, hidden, labels, plan).isfinite().item()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shifted", "the logits of Shifted are neither a factor times its head's product"),
        ("cohere", "factor differs over the ranks (rank 0: 1.0, rank 1: 0.25)"),
        ("gemma2", "softcap differs over the ranks (rank 0: None, rank 1: 2.5)"),
        ("phi", "the length of bias differs over the ranks (rank 0: None, rank 1: 64.0)"),
    ],
)
def test_another_head_on_one_rank_is_refused_on_all(pools, name, message):
    for reported, works_afterwards in pools(2).run(odd_model_on_rank_1, name):
        assert message in reported
        assert works_afterwards
