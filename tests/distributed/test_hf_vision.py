"""Vision-language models over ranks: loss and gradients of every parameter equal one process's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from burst_attention import Strategy
from burst_attention.integrations import hf
from tests.distributed.test_hf_parallel import gradients
from tests.support.vision_models import build, images_and_text, stock_loss, text, videos_and_text

# Rotary positions in time and space; rows added in deep layers; images that see both ways; chunks and a head inside of
# the language model; other towers; recurrent layers.
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llama4", "mistral3", "internvl", "idefics3", "qwen3_5", "paligemma")
BATCHES = {"images": images_and_text, "text alone": text, "videos": videos_and_text}


def errors(got, wanted):
    """Return the worst relative error of a gradient."""
    # Some gradients are nothing but rounding: a key's bias adds a constant to a row of scores.
    floor = 1e-5 * max(w.norm().item() for w in wanted.values())
    return max(((got[n] - w).norm() / max(w.norm().item(), floor)).item() for n, w in wanted.items())


def against_stock(name, case="images", layout=None, checkpointing=None, memory=None):
    """Return relative errors of the loss and of the worst gradient, and the number of gradients in the tower."""
    one = build(name)
    batch, model = BATCHES[case](one), copy.deepcopy(one)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    expected = stock_loss(one, batch)
    wanted = gradients(one, expected)
    mean, world = dist.get_world_size() == 3, dist.get_world_size()
    strategy = None if layout is None else Strategy(layout=layout)
    hf.parallelize(model, strategy=strategy, gradients="mean" if mean else "sum", memory=memory, timeout=60)
    out = model(**batch)
    got = gradients(model, out.loss)
    for gradient in got.values():
        dist.all_reduce(gradient)
        gradient /= world if mean else 1
    moved = sum("visi" in n or "visual" in n for n, w in wanted.items() if w.norm() > 0)
    return abs(out.loss.item() / expected.item() - 1), errors(got, wanted), moved


def check(reported, case="images"):
    for loss, gradient, moved in reported:
        assert loss <= 1e-7
        assert gradient <= 1e-4  # norms, rotary angles and some softmaxes compute in fp32
        assert (moved > 5) == (case != "text alone")


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_one_process(pools, name):
    check(pools(3).run(against_stock, name))


@pytest.mark.parametrize(
    ("name", "case"), [("gemma3", "text alone"), ("qwen3_vl", "text alone"), ("qwen2_5_vl", "videos")]
)
def test_of_text_alone_and_of_videos(pools, name, case):
    check(pools(2).run(against_stock, name, case), case)


@pytest.mark.parametrize(("world", "layout"), [(2, "contiguous"), (2, "zigzag"), (4, "striped"), (4, "balanced")])
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_images_across_the_borders_of_shards(pools, name, world, layout):
    check(pools(world).run(against_stock, name, "images", layout))


@pytest.mark.parametrize(
    "way", [{"checkpointing": True}, {"checkpointing": False}, {"memory": hf.Memory(recompute="layer", mlp_chunks=2)}]
)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_with_recomputation(pools, name, way):
    way = {"checkpointing": None, "memory": None} | way
    check(pools(2).run(against_stock, name, "images", None, way["checkpointing"], way["memory"]))


def wrapped(name, wrapper):
    """Return the worst gradient's error under DDP or FSDP2, in fp32 the norm of all parameters after a step."""
    one = build(name, torch.float32)
    batch, model = images_and_text(one), copy.deepcopy(one)
    wanted = gradients(one, stock_loss(one, batch))
    hf.parallelize(model, timeout=60)
    if wrapper == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)  # the head of a SigLIP tower
    else:
        inner = hf.vision.language_model_of(model)
        for layer in inner.layers:
            fully_shard(layer)
        fully_shard(model)
    model(**batch).loss.backward()
    names = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    got = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in names.items()}
    return errors({n: got.get(n, torch.zeros_like(w)).double() for n, w in wanted.items()}, doubles(wanted))


def doubles(wanted):
    return {n: w.double() for n, w in wanted.items()}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_wrapped(pools, name, wrapper):
    assert all(error <= 1e-3 for error in pools(2).run(wrapped, name, wrapper))


def adapted(name):
    """Return the worst error of an adapter's gradients, on the language model's projections."""
    from peft import LoraConfig, get_peft_model

    def make():
        torch.manual_seed(0)
        lora = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj|up_proj)", init_lora_weights=False)
        return get_peft_model(build(name), lora).double()

    one, model = make(), make()
    batch = images_and_text(one.get_base_model())
    wanted = gradients(one, stock_loss(one, batch))
    hf.parallelize(model, gradients="sum", timeout=60)
    got = gradients(model, model(**batch).loss)
    for gradient in got.values():
        dist.all_reduce(gradient)
    wanted = {n: w for n, w in wanted.items() if "lora" in n}
    return errors(got, wanted), len(wanted)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_adapters_of_the_language_model(pools, name):
    for error, count in pools(2).run(adapted, name):
        assert error <= 1e-4
        assert count >= 12


def generated(name):
    """Return tokens that a model generates before, while and after it is parallelized."""
    model = build(name).eval()
    batch = {n: x for n, x in images_and_text(model).items() if n not in ("labels", "attention_mask")}
    options = {"max_new_tokens": 3, "do_sample": False}
    found = [model.generate(**batch, **options).tolist()]
    hf.parallelize(model, timeout=60)
    model(**images_and_text(model))
    found.append(model.generate(**batch, **options).tolist())
    kind = type(hf.vision.language_model_of(model))
    hf.unparallelize(model)
    assert type(hf.vision.language_model_of(model)) is kind.stock_class
    return [*found, model.generate(**batch, **options).tolist()]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llama4"])
def test_generating_alone_and_restoring(pools, name):
    for before, while_parallel, after in pools(2).run(generated, name):
        assert before == while_parallel == after


def refused(name, changes):
    """Return the error of a call with a changed batch."""
    model = build(name)
    batch = images_and_text(model)
    for key in ("attention_mask", "position_ids"):
        if changes.get(key) == "odd":
            changes = {**changes, key: torch.arange(batch["input_ids"].shape[1])[None] % 9}
        if changes.get(key) == "front":
            changes = {**changes, key: batch["attention_mask"].flip(1)}
            batch["labels"][-1, :6] = -100
    hf.parallelize(model, timeout=60)
    if "extra" in changes:
        inner = hf.vision.language_model_of(model)
        inner.register_forward_pre_hook(
            hf.token_wise(lambda _, args, kwargs: (args, kwargs | {"extra": torch.ones(1)})), with_kwargs=True
        )
        changes = {}
    try:
        model(**batch | changes)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"position_ids": "odd"}, "position_ids"),
        ({"attention_mask": "front"}, "padding in front of the tokens"),
        ({"pixels": torch.ones(1)}, "pixels=Tensor [1] is refused"),
        ({"extra": torch.ones(1)}, "extra=Tensor [1] of the language model: how to cut it is unknown"),
    ],
)
def test_what_cannot_be_cut_is_refused(pools, changes, reported):
    assert all(reported in each for each in pools(2).run(refused, "qwen2_5_vl", changes))


def with_dropout(rate):
    model = build("qwen2_5_vl")
    model.model.visual.blocks[0].add_module("more", torch.nn.Dropout(rate))
    try:
        hf.parallelize(model, timeout=60)
    except ValueError as error:
        return str(error)
    return ""


def test_dropout_of_the_tower_is_refused(pools):
    assert all("dropout outside of the language model" in each for each in pools(2).run(with_dropout, 0.1))


def of_other_images(name):
    """Return the error if one rank has other images."""
    model = build(name)
    batch = images_and_text(model)
    batch["pixel_values"][0] += dist.get_rank()
    hf.parallelize(model, timeout=60)
    try:
        model(**batch)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_need_the_same_images(pools):
    assert all("pixel_values" in each for each in pools(2).run(of_other_images, "qwen2_5_vl"))
