"""Test Hugging Face models over ranks: results equal one device's, and all ranks refuse wrong calls together."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface

from burst_attention import Mask, Strategy, make_plan
from burst_attention.integrations import hf
from burst_attention.loss import next_token_loss
from tests.support.hf_models import (
    MODELS,
    SEQLEN,
    WINDOW,
    cache_with_earlier_tokens,
    make_batch,
    make_model,
    make_plans,
)

DOCUMENTS = (0, 3, 21, 22, 41)


def relative(x, y):
    return ((x - y).norm() / y.norm()).item()


def one_device(name, batch, cu_seqlens):
    """Return (logits, loss, gradients) of transformers' attention, which finds documents by restarting positions."""
    model = make_model(name, "sdpa")
    rows, seqlen = batch["input_ids"].shape
    positions = torch.arange(seqlen)
    targets = batch["labels"].roll(-1, 1)
    for start, stop in zip(cu_seqlens or (0,), (cu_seqlens or (0,))[1:] or (seqlen,), strict=False):
        positions[start:stop] = torch.arange(stop - start)
        targets[:, stop - 1] = -100
    logits = model(batch["input_ids"], position_ids=positions.repeat(rows, 1), use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return logits.detach(), loss.item(), {key: p.grad for key, p in model.named_parameters()}


def distributed_loss(model, shard, plan, one):
    out = model.model(
        input_ids=shard["input_ids"], position_ids=shard["position_ids"], plan=plan, use_cache=False
    ).last_hidden_state
    return out, next_token_loss(out, model.lm_head.weight, shard["shift_labels"], one)


def errors_of_model(name, seqlen, cu_seqlens, options):
    """Return relative errors of logits, loss and every parameter's gradient, summed over ranks."""
    batch = make_batch(seqlen)
    expected = one_device(name, batch, cu_seqlens)
    plan = make_plans(name, seqlen, cu_seqlens, timeout=20, layout=options.get("layout", "zigzag"))
    one = plan[None] if isinstance(plan, dict) else plan
    model = make_model(name).train()
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    hidden, loss = distributed_loss(model, hf.shard_batch(batch, plan), plan, one)
    loss.backward()
    logits = one.unshard(model.lm_head(hidden).detach(), 1)
    errors = {"logits": relative(logits, expected[0]), "loss": abs(loss.item() - expected[1]) / expected[1]}
    for key, parameter in model.named_parameters():
        gradient = parameter.grad.clone()
        dist.all_reduce(gradient)
        errors[key] = relative(gradient, expected[2][key])
    return errors


@pytest.mark.parametrize("cu_seqlens", [None, DOCUMENTS])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_one_device_model(pools, name, world, cu_seqlens):
    for errors in pools(world).run(errors_of_model, name, 41, cu_seqlens, {}):
        assert max(errors.values()) <= 2e-6, errors


@pytest.mark.parametrize("options", [{"layout": "contiguous"}, {"layout": "striped"}, {"checkpointing": True}])
def test_layouts_and_checkpointing(pools, options):
    for errors in pools(2).run(errors_of_model, "qwen3", 41, DOCUMENTS, options):
        assert max(errors.values()) <= 2e-6, errors


class LossModel(torch.nn.Module):
    """An FSDP root whose forward returns the loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, shard, plan, one):
        return distributed_loss(self.model, shard, plan, one)[1]


def errors_under_fsdp(name):
    batch = make_batch(41)
    expected = one_device(name, batch, DOCUMENTS)
    plan = make_plans(name, 41, DOCUMENTS, timeout=20)
    root = LossModel(make_model(name).train())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in root.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    for module in (*root.model.model.layers, root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    loss = root(hf.shard_batch(batch, plan), plan=plan, one=plan[None])
    loss.backward()
    errors = {"loss": abs(loss.item() - expected[1]) / expected[1]}
    for key, parameter in root.model.named_parameters():
        errors[key] = relative(parameter.grad.full_tensor(), expected[2][key])
    return errors


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_mapping_of_plans_under_fsdp(pools, name):
    for errors in pools(2).run(errors_under_fsdp, name):
        assert max(errors.values()) <= 2e-6, errors


def raised(call):
    """Run a call and return (class, text, seconds) of its error."""
    dist.barrier()
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing was raised", time.monotonic() - start


# Text of the error: wrong arguments that only rank 1 passes to model(...).
BAD_CALLS = {
    "a padding mask": lambda plan: {"attention_mask": (torch.arange(plan.length) > 1).repeat(2, 1)},
    "a mask Tensor": lambda plan: {"attention_mask": torch.ones(2, 1, plan.length, plan.length).bool()},
    "position_ids differ from": lambda plan: {"position_ids": None},
    "past_key_values": lambda plan: {"past_key_values": cache_with_earlier_tokens(), "use_cache": True},
    "is_causal=False": lambda plan: {"is_causal": False},
    "cu_seq_lens_q": lambda plan: {"cu_seq_lens_q": torch.tensor([0, 1])},
    "seq_idx": lambda plan: {"seq_idx": torch.zeros(1, 1)},
    "softcap=-30.0 must be": lambda plan: {"softcap": -30.0},
    "sinks has shape [3]": lambda plan: {"s_aux": torch.zeros(3)},
    "head_mask": lambda plan: {"head_mask": torch.ones(2, 4)},
    "position_bias": lambda plan: {"position_bias": torch.zeros(1)},
    "alibi": lambda plan: {"alibi": torch.zeros(4)},
    "temperature": lambda plan: {"temperature": 2.0},
    "input_ids has 40 tokens": lambda plan: make_batch() | {"labels": None, "position_ids": torch.arange(SEQLEN)[None]},
    "sliding_window=None of the layer is not among": lambda plan: {"plan": {WINDOW: plan}},
}


def bad_call_on_rank_1(message):
    plan = make_plan(SEQLEN, timeout=10, strategy=Strategy(layout="contiguous"))
    model = make_model("llama")
    good = {**hf.shard_batch(make_batch(), plan), "plan": plan, "use_cache": False}
    arguments = good | BAD_CALLS[message](plan) if plan.rank == 1 else good
    reported = raised(lambda: model(**arguments))
    return reported, model(**good).logits.isfinite().all().item()


def assert_refused_by_rank_1(results, message):
    assert len({kind for (kind, _, _), _ in results}) == 1
    for (_, text, seconds), works_afterwards in results:
        assert message in text
        assert seconds < 5
        assert works_afterwards
    assert results[0][0][1].startswith("rank 1 refused the call")


@pytest.mark.parametrize("message", BAD_CALLS)
def test_a_bad_call_on_one_rank_is_refused_on_all(pools, message):
    assert_refused_by_rank_1(pools(2).run(bad_call_on_rank_1, message), message)


# Text of the error: (model, changes on rank 1 only, window of the plan's mask).
BAD_MODELS = {
    "dropout=0.5": ("llama", {"attention_dropout": 0.5}, None),
    "rope type 'dynamic'": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        None,
    ),
    "sliding_window=9 of the layer is not the window=7": ("mistral", {"sliding_window": 9}, WINDOW),
}


def bad_model_on_rank_1(message):
    name, changes, window = BAD_MODELS[message]
    plan = make_plan(SEQLEN, mask=Mask(window=window), timeout=10)
    good = make_model(name).train()
    model = make_model(name, **changes).train() if plan.rank == 1 else good
    arguments = {**hf.shard_batch(make_batch(), plan), "plan": plan, "use_cache": False}
    return raised(lambda: model(**arguments)), good(**arguments).logits.isfinite().all().item()


@pytest.mark.parametrize("message", BAD_MODELS)
def test_a_bad_model_on_one_rank_is_refused_on_all(pools, message):
    assert_refused_by_rank_1(pools(2).run(bad_model_on_rank_1, message), message)


def bad_batch_on_rank_1():
    plan = make_plan(SEQLEN, timeout=10)
    model, batch = make_model("llama"), make_batch()
    bad = batch | {"attention_mask": torch.zeros(2, SEQLEN)} if plan.rank == 1 else batch
    reported = raised(lambda: model(**hf.shard_batch(bad, plan), plan=plan, use_cache=False))
    return reported, model(**hf.shard_batch(batch, plan), plan=plan, use_cache=False).logits.isfinite().all().item()


def test_a_bad_batch_on_one_rank_is_refused_on_all(pools):
    assert_refused_by_rank_1(pools(2).run(bad_batch_on_rank_1), "a padding mask")


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


def forgotten_position_ids():
    """Leave position ids out. For contiguous shards transformers' default is right on rank 0 and wrong on rank 1."""
    plan = make_plan(SEQLEN, timeout=10, strategy=Strategy(layout="contiguous"))
    shard = hf.shard_batch(make_batch(), plan)
    del shard["position_ids"]
    return raised(lambda: make_model("llama")(**shard, plan=plan, use_cache=False))


def test_forgotten_position_ids_are_refused_on_all(pools):
    for kind, text, seconds in pools(2).run(forgotten_position_ids):
        assert kind == "ValueError"
        assert "position_ids differ from the positions of the plan's tokens on rank 1" in text
        assert seconds < 5


def inferred():
    """Compare logits in inference mode, and return the error of rank 1's wrong positions there."""
    plan = make_plan(SEQLEN, timeout=10)
    model, batch = make_model("llama"), make_batch()
    expected = model(**hf.shard_batch(batch, plan), plan=plan, use_cache=False).logits
    with torch.inference_mode():
        shard = hf.shard_batch({"input_ids": batch["input_ids"].clone()}, plan)
        equal = torch.equal(model(**shard, plan=plan, use_cache=False).logits, expected)
        if plan.rank == 1:
            shard["position_ids"] += 1
        reported = raised(lambda: model(**shard, plan=plan, use_cache=False))
    model(**hf.shard_batch(batch, plan), plan=plan, use_cache=False).logits.sum().backward()
    return reported, equal


def test_inference_mode(pools):
    assert_refused_by_rank_1(
        pools(2).run(inferred), "position_ids differ from the positions of the plan's tokens on rank 1"
    )
