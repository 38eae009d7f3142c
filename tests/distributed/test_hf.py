"""Test Hugging Face models over ranks: results equal one device's, and all ranks refuse wrong calls together."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, LlamaForCausalLM

from burst_attention import Mask, Strategy, make_plan
from burst_attention.integrations import hf
from burst_attention.loss import next_token_loss
from tests.support.hf_models import (
    MODELS,
    SEQLEN,
    WINDOW,
    errors_against_the_model,
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


def distributed_loss(model, shard):
    out = model.model(**shard).last_hidden_state
    return out, next_token_loss(out, model.lm_head.weight, shard.labels, shard.plan)


def parallelized(name, layout="zigzag"):
    return hf.parallelize(make_model(name).train(), strategy=Strategy(layout=layout), timeout=20)


def errors_of_model(name, seqlen, cu_seqlens, options):
    """Return relative errors of logits, loss and every parameter's gradient, summed over ranks."""
    batch = make_batch(seqlen)
    expected = one_device(name, batch, cu_seqlens)
    model = parallelized(name, options.get("layout", "zigzag"))
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with hf.shards(model, batch, mask=Mask(cu_seqlens=cu_seqlens)) as shard:
        hidden, loss = distributed_loss(model, shard)
    loss.backward()
    logits = shard.plan.unshard(model.lm_head(hidden).detach(), 1)
    errors = {"logits": relative(logits, expected[0]), "loss": abs(loss.item() - expected[1]) / expected[1]}
    for key, parameter in model.named_parameters():
        gradient = parameter.grad.clone()
        dist.all_reduce(gradient)
        errors[key] = relative(gradient, expected[2][key])
    return errors


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
    for errors in pools(world).run(errors_of_model, name, 41, cu_seqlens, options):
        assert max(errors.values()) <= 2e-6, errors


class LossModel(torch.nn.Module):
    """An FSDP root whose forward returns the loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, shard):
        return distributed_loss(self.model, shard)[1]


def errors_under_fsdp(name):
    batch = make_batch(41)
    expected = one_device(name, batch, DOCUMENTS)
    root = LossModel(parallelized(name))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in root.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    for module in (*root.model.model.layers, root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    with hf.shards(root.model, batch, mask=Mask(cu_seqlens=DOCUMENTS)) as shard:
        loss = root(shard)
    loss.backward()
    errors = {"loss": abs(loss.item() - expected[1]) / expected[1]}
    for key, parameter in root.model.named_parameters():
        errors[key] = relative(parameter.grad.full_tensor(), expected[2][key])
    return errors


def test_the_body_under_fsdp(pools):
    for errors in pools(2).run(errors_under_fsdp, "gemma3"):
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


def summed(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def errors_over_ranks(name):
    return errors_against_the_model(name, make_plans(name, 41, timeout=20, layout="zigzag"), summed)


@pytest.mark.parametrize("name", ["cohere2", "gemma3 capped", "phi"])
def test_loss_and_gradients_of_a_models_own_logits(pools, name):
    for errors, from_plain in pools(3).run(errors_over_ranks, name, timeout=60.0):
        assert max(errors) <= 1
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
