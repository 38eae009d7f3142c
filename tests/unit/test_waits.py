"""How often a model's call makes its host wait for a GPU, on a device that counts it."""

import copy
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from burst_attention.integrations import hf
from burst_attention.kernels.triton.blocks import BlockTables
from burst_attention.plan.tile import Tiles
from burst_attention.testing import local_world
from tests.support.fake_device import DEVICE, Waits, move, to_device, without_autocast
from tests.tools import families

SEQLEN, STEPS = 64, 3
# Reading the batch, and over ranks the sum of the loss. transformers looks for packed documents by itself.
ALLOWED = {1: 1, 2: 2}


def batches(packed):
    """Batches [1, S] on the CPU; with documents, each has others."""
    for step in range(STEPS):
        ids = torch.randint(3, 97, (1, SEQLEN), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": ids, "labels": ids.clone()}
        if packed:
            cut = 20 + step
            batch["position_ids"] = torch.cat([torch.arange(cut), torch.arange(SEQLEN - cut)])[None]
        yield batch


def steps(model, packed, asked, counts=None):
    """Losses and gradients of a step for each batch; ``counts`` gets the waits of each forward and backward."""
    results = []
    for batch in batches(packed):
        given = batch if counts is None else {name: to_device(x) for name, x in batch.items()}
        model.zero_grad()
        before = Counter(counts)
        out = model(**given, use_cache=False, **asked)
        loss = out.loss if not asked else -(out.log_probs * torch.arange(SEQLEN - 1, device=out.loss.device)).sum()
        middle = Counter(counts)
        loss.backward()
        grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        results.append(({"forward": middle - before, "backward": Counter(counts) - middle}, loss.detach(), grads))
    return results


@pytest.mark.parametrize(
    ("model_type", "world", "packed", "asked"),
    [
        ("llama", 1, False, {}),
        ("llama", 2, True, {}),
        ("llama", 2, True, {"fused_lm_head": True}),
        ("opt", 2, True, {}),  # an embedding of positions
        ("llama4_text", 2, True, {}),  # an attention that scales queries by their places
        ("gemma3_text", 1, True, {}),  # windows
        ("qwen3_next", 2, True, {}),  # a convolution and a recurrence
        ("bamba", 2, True, {}),
    ],
)
def test_a_step_waits_for_its_batch_and_its_loss_alone(model_type, world, packed, asked):
    config, _ = families.built(model_type)
    stock = families.model_of(model_type, config, "sdpa")

    def rank(group, fake):
        model = hf.parallelize(copy.deepcopy(stock), group=group, gradients="sum")
        if not fake:
            return steps(model, packed, asked)
        with Waits() as waits:
            return steps(move(model), packed, asked, waits.counts)

    with local_world(world) as ranks, without_autocast():
        plain, counted = ranks.run(rank, False), ranks.run(rank, True)
    for step, (right, found) in itertools.product(range(STEPS), zip(plain, counted, strict=True)):
        waits, loss, grads = found[step]
        for phase, most in (("forward", ALLOWED[world]), ("backward", 0)) if step else ():  # the first checks the model
            ours = {where: n for where, n in waits[phase].items() if where.startswith("burst_attention")}
            assert sum(ours.values()) <= most, (phase, ours)
        torch.testing.assert_close(loss.values, right[step][1])
        for (name, x), (_, y) in zip(grads, right[step][2], strict=True):
            torch.testing.assert_close(x.values, y, msg=lambda text, name=name: f"{name}: {text}")


def test_tables_of_tiles_are_uploaded_without_a_wait():
    tiles = Tiles(np.array([[0, 40, 0, 40, -40, 0]]))
    with Waits() as waits:
        table = BlockTables().get(tiles, keys=False, size=16, length=40, device=DEVICE)
    assert table.ids.device == DEVICE and not waits.counts


def test_the_device_counts_what_waits():
    with Waits() as waits:
        x = to_device(torch.arange(4.0))
        assert not waits.counts
        for wait in (x.cpu, lambda: torch.ones(4).to(DEVICE), x.sum().item, lambda: bool((x > 0).any()), x.tolist):
            before = waits.counts.total()
            wait()
            assert waits.counts.total() == before + 1
