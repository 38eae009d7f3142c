"""Test Hugging Face models over ranks: results equal one device's, and all ranks refuse wrong calls together."""

import itertools
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, LlamaForCausalLM

from burst_attention import Mask, Strategy, make_plan
from burst_attention.integrations import hf
from burst_attention.loss import next_token_loss
from tests.support.equal import check, equal
from tests.support.hf_models import MODELS, SEQLEN, WINDOW, make_batch, make_model, on_shards

DOCUMENTS = (0, 3, 21, 22, 41)


class LossModel(torch.nn.Module):
    """An FSDP root whose forward returns the loss; it keeps the hidden states."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, shard):
        hidden = self.model.model(**shard).last_hidden_state
        self.hidden = hidden.detach()
        return next_token_loss(hidden, self.model.lm_head.weight, shard.labels, shard.plan)


def on_the_body(name, cu_seqlens, *, layout="zigzag", checkpointing=False, fsdp=False):
    """Compare loss and gradients, which are sums over ranks, and logits."""
    batch, alone = make_batch(41), make_model(name, "sdpa").train()
    if checkpointing:
        alone.gradient_checkpointing_enable({"use_reentrant": False})

    def prepare(model):
        root, mesh = LossModel(model), init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.model.layers, root) if fsdp else ():
            fully_shard(part, mesh=mesh)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        return root

    def call(root, described):
        with hf.shards(root.model, batch, mask=Mask(cu_seqlens=cu_seqlens)) as shard:
            loss = root(shard)
        if not fsdp:
            logits = shard.plan.unshard(root.model.lm_head(root.hidden).detach(), 1)
            expected = alone(**{name: described[name] for name in ("input_ids", "position_ids")}, use_cache=False)
            assert (logits - expected.logits).norm() <= 2e-6 * expected.logits.norm()
        return loss

    # transformers' attention finds documents by restarting positions
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cu_seqlens or (0, 41))])
    described = {"position_ids": positions.repeat(2, 1), "labels": batch["labels"].masked_fill(positions == 0, -100)}
    how = {"strategy": Strategy(layout=layout), "gradients": "sum", "whole": fsdp, "timeout": 20}
    return equal(alone, batch | described, call=call, prepare=prepare, **how)


@pytest.mark.parametrize(
    ("name", "world", "cu_seqlens", "options"),
    [
        *((name, 2 + n % 2, DOCUMENTS, {}) for n, name in enumerate(MODELS)),
        ("gemma3", 3, None, {}),
        ("qwen3", 2, None, {"layout": "contiguous"}),
        ("qwen3", 3, DOCUMENTS, {"layout": "striped"}),
        ("llama", 2, DOCUMENTS, {"checkpointing": True}),
    ],
)
def test_equals_the_one_device_model(pools, name, world, cu_seqlens, options):
    found = pools(world).run(partial(on_the_body, name, cu_seqlens, **options))
    check(*found, loss=2e-6, gradient=2e-6)


def test_the_body_under_fsdp(pools):
    check(*pools(2).run(partial(on_the_body, "gemma3", DOCUMENTS, fsdp=True)), loss=2e-6, gradient=2e-6)


def raised(call):
    """Run a call and return (class, text, seconds) of its error."""
    dist.barrier()
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing was raised", time.monotonic() - start


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
# Text of the error: what rank 1 alone does wrong with the call, the batch or the configuration.
BAD = {
    "a mask Tensor": {"call": {"attention_mask": torch.ones(2, 1, SEQLEN // 2, SEQLEN // 2).bool()}},
    "position_ids differ from": {"call": {"position_ids": None}},
    "sinks has shape [3]": {"call": {"s_aux": torch.zeros(3)}},
    "input_ids has 40 tokens": {
        "call": make_batch() | {"labels": None, "shift_labels": None, "position_ids": torch.arange(SEQLEN)[None]}
    },
    "a padding mask": {"batch": {"attention_mask": torch.zeros(2, SEQLEN)}},
    "dropout=0.5": {"model": {"attention_dropout": 0.5}},
    "rope type 'dynamic'": {"model": DYNAMIC},
    "sliding_window=9 of the layer is not the window=7": {"model": {"sliding_window": 9}},
}


def bad_on_rank_1(message):
    bad = BAD[message] if dist.get_rank() == 1 else {}
    name = "mistral" if "sliding" in message else "llama"
    mask = Mask(window=WINDOW if name == "mistral" else None)
    plan = make_plan(SEQLEN, mask=mask, timeout=10, strategy=Strategy(layout="contiguous"))
    good, batch = make_model(name).train(), make_batch()
    model = make_model(name, **bad["model"]).train() if "model" in bad else good
    options = {"plan": plan, "use_cache": False}

    def call():
        shard = hf.shard_batch(batch | bad.get("batch", {}), plan)
        model(**shard | options | bad.get("call", {}))

    return raised(call), good(**hf.shard_batch(batch, plan), **options).logits.isfinite().all().item()


def assert_refused_by_rank_1(results, message):
    assert len({kind for (kind, _, _), _ in results}) == 1
    for (_, text, seconds), works_afterwards in results:
        assert message in text
        assert seconds < 5
        assert works_afterwards
    assert results[0][0][1].startswith("rank 1 refused the call")


@pytest.mark.parametrize("message", BAD)
def test_a_mistake_of_one_rank_is_refused_on_all(pools, message):
    assert_refused_by_rank_1(pools(2).run(bad_on_rank_1, message), message)


def bad_scaling_on_rank_1():
    hf.register()
    plan = make_plan(SEQLEN, timeout=10)
    q, k, v = (torch.randn(1, 2, plan.length, 8) for _ in range(3))
    arguments = {"plan": plan, "position_ids": plan.positions[None]}
    attend = AttentionInterface._global_mapping["burst"]

    def call(scaling):
        return attend(torch.nn.Module(), q, k, v, None, scaling=scaling, **arguments)[0]

    return raised(lambda: call(float("inf") if plan.rank == 1 else 0.5)), call(0.5).isfinite().all().item()


def test_a_bad_scaling_on_one_rank_is_refused_on_all(pools):
    assert_refused_by_rank_1(pools(2).run(bad_scaling_on_rank_1), "scale=inf")


def inferred():
    """Compare logits in inference mode, and return the error of rank 1's wrong positions there."""
    plan = make_plan(SEQLEN, timeout=10)
    model, batch = make_model("llama"), make_batch()
    expected = model(**hf.shard_batch(batch, plan), plan=plan, use_cache=False).logits
    with torch.inference_mode():
        shard = hf.shard_batch({"input_ids": batch["input_ids"].clone()}, plan)
        equal = torch.equal(model(**shard, plan=plan, use_cache=False).logits, expected)
        plan = make_plan(SEQLEN, timeout=10)  # ranks compare a plan's first call
        if plan.rank == 1:
            shard["position_ids"] += 1
        reported = raised(lambda: model(**shard, plan=plan, use_cache=False))
    model(**hf.shard_batch(batch, plan), plan=plan, use_cache=False).logits.sum().backward()
    return reported, equal


def test_inference_mode(pools):
    assert_refused_by_rank_1(
        pools(2).run(inferred), "position_ids differ from the positions of the plan's tokens on rank 1"
    )


@pytest.mark.parametrize("name", ["cohere2", "gemma3 capped", "phi"])
def test_loss_and_gradients_of_a_models_own_logits(pools, name):
    how = {"strategy": Strategy(layout="zigzag"), "timeout": 20}
    for found, from_plain in pools(3).run(partial(on_shards, name, 41, **how), timeout=60.0):
        check(found)
        assert from_plain > 1e-3, "the product alone would do"


class Shifted(LlamaForCausalLM):
    """A model that adds a constant to its logits, which no known form describes."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 1
        return out


def odd_model_on_rank_1(name):
    """Return the text of this rank's error, and whether a later correct call works."""
    plan = make_plan(SEQLEN, timeout=10)
    labels, good = plan.shard_labels(make_batch()["labels"]), make_model("llama")
    odd = {"shifted": lambda: Shifted(good.config).double(), "headless": lambda: torch.nn.Linear(2, 2)}
    odd = odd.get(name, lambda: make_model(name))()
    hidden = torch.ones(2, plan.length, 32, dtype=torch.float64)
    dist.barrier()
    try:
        hf.next_token_loss(odd if plan.rank == 1 else good, hidden, labels, plan)
        reported = "nothing was raised"
    except (TypeError, ValueError) as error:
        reported = str(error)
    return reported, hf.next_token_loss(good, hidden, labels, plan).isfinite().item()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("headless", "model is a Linear, and its body or its head is not"),
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
