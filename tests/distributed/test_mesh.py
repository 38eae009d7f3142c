"""Test tensor parallelism beside context parallelism and FSDP2: loss, gradients and tokens are one process's."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING

from burst_attention.integrations import hf
from tests.distributed.test_hf_parallel import packed, plain
from tests.support.hf_models import MIXED, SMALL, VOCABULARY
from tests.tools.families import model_class

NAMES = ("dp", "cp", "tp")
RECURRENT = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("llama", {"vocab_size": VOCABULARY + 3}),  # not divisible by the ranks
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("qwen2", {}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mixtral": ("mixtral", EXPERTS),
    "phi3": ("phi3", {"bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", MIXED | {"final_logit_softcapping": 2.0}),
    "gpt_oss": ("gpt_oss", MIXED | EXPERTS),
    "qwen3_5": ("qwen3_5_text", RECURRENT),
}


def model_of(name, dtype=torch.float64, **changes):
    """The same random weights on every rank."""
    kind, own = MODELS[name]
    config = CONFIG_MAPPING[kind](**SMALL | own | changes, attn_implementation="eager", pad_token_id=0)
    torch.manual_seed(0)
    model = model_class(kind)(config).to(dtype)
    for parameter in model.parameters():  # so large that sinks, norms and biases matter
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def mesh_of(dp, cp, tp):
    return init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=NAMES)


def meshed(name, sizes, dtype=torch.float64, *, shards=False, group="cp", memory=None, **changes):
    """Return a model over a mesh, and the mesh; ``shards``: by FSDP2 over the axes of data and context."""
    mesh = mesh_of(*sizes)
    model = model_of(name, dtype, **changes)
    hf.tensor_parallel(model, mesh["tp"])
    hf.parallelize(model, mesh[group], timeout=30, memory=memory)
    if shards:
        over = mesh["dp", "cp"]._flatten("fsdp")
        for layer in model.model.layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
    return model, mesh


def whole_gradients(model, mesh, *, shards):
    """Return the gradients of whole weights, a mean over data and context."""
    found = {}
    for name, x in model.named_parameters():
        grad = x.grad
        if not shards:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            for axis in ("dp", "cp"):
                dist.all_reduce(local, group=mesh[axis].get_group())
            local /= mesh["dp"].size() * mesh["cp"].size()
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def worst(found, wanted):
    """Return the greatest relative error of a gradient's norm."""
    assert found.keys() == wanted.keys()
    return max(((found[name] - x).norm() / x.norm().clamp(min=1e-12)).item() for name, x in wanted.items())


def batch_of(case, step):
    batch = {"plain": plain, "packed": functools.partial(packed, (11, 20, 6), (37,))}[case]()
    generator = torch.Generator().manual_seed(step)
    fresh = torch.randint(1, VOCABULARY, batch["input_ids"].shape, generator=generator)
    batch["labels"] = fresh.masked_fill(batch["labels"] == -100, -100)
    return batch | {"input_ids": fresh}


def stock_loss(model, batch):
    return model(**batch, use_cache=False).loss


def trained(name, sizes, case, shards, steps=2, accumulate=1, memory=None):
    """Return the greatest relative errors of losses and of gradients, over some steps."""
    one = model_of(name)
    model, mesh = meshed(name, sizes, shards=shards, memory=memory)
    first = torch.optim.SGD(one.parameters(), 0.05)
    second = torch.optim.SGD(model.parameters(), 0.05)
    off, wrong, groups, mine = 0.0, 0.0, sizes[0], mesh["dp"].get_local_rank()
    for step in range(steps):
        for part in range(accumulate):
            rows = [batch_of(case, step * 64 + part * 8 + group) for group in range(groups)]
            expected = sum(stock_loss(one, batch) for batch in rows) / groups
            expected.backward()
            loss = model(**rows[mine]).loss
            loss.backward()
            off = max(off, abs(loss.item() / stock_loss(one, rows[mine]).item() - 1))
        got = whole_gradients(model, mesh, shards=shards)
        wrong = max(wrong, worst(got, {n: x.grad for n, x in one.named_parameters()}))
        if not shards:
            for n, x in model.named_parameters():  # averaged in place by whole_gradients
                assert x.grad is not None, n
        first.step(), second.step()
        first.zero_grad(), second.zero_grad()
    return off, wrong


@pytest.mark.parametrize(
    ("name", "sizes", "case", "shards"),
    [
        ("llama", (1, 2, 2), "packed", False),
        ("llama", (2, 1, 2), "plain", True),
        ("llama", (1, 1, 2), "packed", False),
        ("tied", (1, 2, 2), "packed", True),
        ("biased", (1, 2, 2), "packed", False),
        ("mistral", (1, 2, 2), "plain", True),
        ("mixtral", (1, 2, 2), "packed", True),
        ("phi3", (1, 2, 2), "packed", False),
        ("qwen3", (1, 2, 2), "packed", True),
        ("gemma3", (1, 2, 2), "packed", False),
        ("gpt_oss", (1, 2, 2), "plain", True),
        ("qwen3_5", (1, 2, 2), "plain", False),
    ],
)
def test_steps_over_a_mesh_are_one_process(pools, name, sizes, case, shards):
    world = sizes[0] * sizes[1] * sizes[2]
    for loss, gradient in pools(world).run(trained, name, sizes, case, shards):
        assert loss <= 1e-8
        assert gradient <= 1e-8
