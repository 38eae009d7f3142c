"""Vision-language models over ranks: loss and gradients of every parameter equal one process's."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from burst_attention.integrations import hf
from tests.distributed.test_hf_parallel import gradients
from tests.support.vision_models import CONFIGS, make_batch, make_model

BATCHES = {
    "images": {},
    "padded": {"padded": True},
    "text alone": {"images": False},
}


def stock_loss(model, batch):
    """The stock loss in fp64; transformers would cast logits to fp32."""
    logits = model(**{name: x for name, x in batch.items() if name != "labels"}, use_cache=False).logits
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def against_stock(name, case, reduction="sum", checkpointing=None, memory=None):
    """Return relative errors of the loss and of the worst gradient, and the number of gradients."""
    batch, one, model = make_batch(name, **BATCHES[case]), make_model(name), make_model(name)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    expected = stock_loss(one, batch)
    wanted = gradients(one, expected)
    hf.parallelize(model, gradients=reduction, memory=memory, timeout=30)
    out = model(**batch)
    got = gradients(model, out.loss)
    for gradient in got.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size() if reduction == "mean" else 1
    # Some gradients are nothing but rounding: a key's bias adds a constant to a row of scores.
    floor = 1e-5 * max(w.norm().item() for w in wanted.values())
    error = max(((got[n] - w).norm() / max(w.norm().item(), floor)).item() for n, w in wanted.items())
    moved = sum(w.norm().item() > floor for n, w in wanted.items() if "visual" in n or "vision" in n)
    return abs(out.loss.item() / expected.item() - 1), error, moved


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_one_process(pools, name, case, world):
    reduction = "mean" if world == 3 else "sum"
    for loss, gradient, moved in pools(world).run(against_stock, name, case, reduction):
        assert loss <= 1e-7
        assert gradient <= 5e-6  # norms and rotary angles compute in fp32
        assert (moved > 5) == (case != "text alone")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_with_recomputation(pools, name):
    ways = {"checkpointing": True}, {"checkpointing": False}, {"memory": hf.Memory(recompute="layer", mlp_chunks=2)}
    for way in ways:
        for loss, gradient, _ in pools(2).run(functools.partial(against_stock, name, "images", **way)):
            assert loss <= 1e-7
            assert gradient <= 5e-6
