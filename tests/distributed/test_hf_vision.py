"""Vision-language models over ranks: loss and gradients of every parameter equal one process's."""

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING

from burst_attention import Strategy
from burst_attention.integrations import hf
from burst_attention.integrations.hf.call import vision
from burst_attention.integrations.hf.reading import known
from tests.distributed.test_hf_parallel import refusal
from tests.support.equal import check, equal
from tests.support.hf_models import WHOLE_HEADS
from tests.support.vision_models import build, images_and_text, packed, text, videos_and_text

# Rotary positions in time and space; rows added in deep layers; images that see both ways; chunks and a head inside of
# the language model; other towers; recurrent layers.
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", "internvl", "idefics3", "qwen3_5", "paligemma")
# transformers 5.24 raises in each call of Llama 4 with images, in one process too (findings/).
LLAMA_4 = ("llama4",) if known.CACHE == "past_key_values" else ()
# Layers share latents, and an indexer chooses their keys (transformers 5.24).
MISTRAL_LARGE_4 = ("mistral_large4",) if "mistral_large4" in CONFIG_MAPPING else ()
FAMILIES += MISTRAL_LARGE_4
# Whose language model pools keys; of transformers 5.24.
POOLED = ("glm5_next",) if "glm5_next" in CONFIG_MAPPING else ()
BATCHES = {"images": images_and_text, "text alone": text, "videos": videos_and_text, "packed": packed}


def against_stock(name, case="images", layout=None, checkpointing=None, memory=None):
    """Compare with the stock model; return also the number of gradients in the tower."""
    alone = build(name)
    if checkpointing is not None:
        alone.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    strategy = WHOLE_HEADS if layout is None else Strategy(layout=layout)
    gradients = "mean" if dist.get_world_size() == 3 else "sum"
    how = {"strategy": strategy, "gradients": gradients, "memory": memory, "timeout": 60}
    found = equal(alone, BATCHES[case](alone), **how)
    tower = [x.grad for name, x in alone.named_parameters() if ("visi" in name or "visual" in name)]
    return found, sum(x is not None and bool(x.any()) for x in tower)


def judge(reported, case="images"):
    for found, moved in reported:
        check(found)
        assert (moved > 5) == (case != "text alone")


SAVING, KEEPING = hf.Memory(recompute="layer", mlp_chunks=2), hf.Memory(recompute="keep-attention")


@pytest.mark.parametrize(
    "name", [n if n == "qwen3_vl" else pytest.param(n, marks=pytest.mark.long) for n in (*FAMILIES, *LLAMA_4, *POOLED)]
)
def test_equal_to_one_process(pools, name):
    judge(pools(3).run(against_stock, name))


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "name", "case", "layout", "checkpointing", "memory"),
    [
        (2, "gemma3", "text alone", None, None, None),
        (2, "qwen3_vl", "text alone", "contiguous", None, None),
        (2, "qwen2_5_vl", "videos", None, None, None),
        (2, "gemma3", "images", "contiguous", None, None),
        (4, "gemma3", "images", "striped", None, None),
        (4, "qwen3_vl", "images", "balanced", None, None),
        (2, "gemma3", "images", "zigzag", True, None),
        (2, "qwen3_vl", "images", None, False, None),
        (2, "qwen3_vl", "images", None, None, SAVING),
        (3, "mistral3", "packed", None, None, None),
        *((2, name, "images", "contiguous", None, SAVING) for name in MISTRAL_LARGE_4),
        *((3, name, "packed", "balanced", None, SAVING) for name in MISTRAL_LARGE_4),
        *((4, name, "text alone", "zigzag", None, KEEPING) for name in MISTRAL_LARGE_4),
    ],
)
def test_layouts_and_recomputation(pools, world, name, case, layout, checkpointing, memory):
    judge(pools(world).run(against_stock, name, case, layout, checkpointing, memory), case)


def generated(name):
    """Return tokens that a model generates before, while and after it is parallelized."""
    model = build(name).eval()
    batch = {n: x for n, x in images_and_text(model).items() if n not in ("labels", "attention_mask")}
    options = {"max_new_tokens": 3, "do_sample": False}
    found, kind = [model.generate(**batch, **options).tolist()], type(vision.language_model_of(model))
    hf.parallelize(model, timeout=60)
    model(**images_and_text(model))
    found.append(model.generate(**batch, **options).tolist())
    hf.unparallelize(model)
    assert type(vision.language_model_of(model)) is kind
    return [*found, model.generate(**batch, **options).tolist()]


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2_5_vl", *LLAMA_4, *MISTRAL_LARGE_4])
def test_generating_alone_and_restoring(pools, name):
    for before, while_parallel, after in pools(2).run(generated, name):
        assert before == while_parallel == after


def refused_positions(name):
    model = build(name)
    batch = packed(model)
    hf.parallelize(model, strategy=WHOLE_HEADS, timeout=60)
    return refusal(model, **batch)


def refused(what):
    """Return the error of a call with a changed batch or model."""
    model = build("qwen2_5_vl")
    batch = images_and_text(model)
    if what.startswith("position_ids"):
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    elif what.startswith("packed"):
        batch["seq_idx"] = (torch.arange(batch["input_ids"].shape[1])[None] > 20).int().expand(2, -1)
        del batch["attention_mask"]
    elif what.startswith("padding"):
        batch["attention_mask"] = batch["attention_mask"].flip(1)
        batch["labels"][-1, :6] = -100
    elif what.startswith("pixels="):
        batch["pixels"] = torch.ones(1)
    elif what == "pixel_values":  # one rank has other images
        batch["pixel_values"][0] += dist.get_rank()
    elif what.endswith("random values"):
        model.model.visual.blocks[0].add_module("more", torch.nn.Dropout(0.1))
    elif what.startswith("inputs_embeds"):
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
    elif what.startswith("output_hidden_states"):
        batch["output_hidden_states"] = True
    hf.parallelize(model, strategy=WHOLE_HEADS, timeout=60)
    if what.startswith("extra="):
        extra = hf.token_wise(lambda _, args, kwargs: (args, kwargs | {"extra": torch.ones(1)}))
        vision.language_model_of(model).register_forward_pre_hook(extra, with_kwargs=True)
    return refusal(model, **batch)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma3", "makes masks from the images of a row"),
        ("qwen3_5", "computes its own"),
        ("lfm2_vl", "recurrent"),
    ],
)
def test_other_positions_are_refused(pools, name, words):
    for each in pools(2).run(refused_positions, name):
        assert "position_ids are refused: " in each and words in each


@pytest.mark.parametrize(
    "message",
    [
        "position_ids are refused: Qwen2_5_VLForConditionalGeneration computes its own",
        "packed documents: not supported for vision-language models; pass position_ids",
        "padding in front of the tokens: not supported",
        "pixels=Tensor [1] is refused: did you mean pixel_values?",
        "extra=Tensor [1] of the language model: how to cut it is unknown",
        "more (Dropout) has p=0.1, so it draws random values",
        "pixel_values",
        "inputs_embeds are refused: a vision-language model merges images",
        "output_hidden_states is refused: the shards of Qwen2_5_VLForConditionalGeneration",
    ],
)
def test_what_cannot_be_cut_is_refused(pools, message):
    assert all(message in each for each in pools(2).run(refused, message))
