"""A step of each model type that tensor parallelism takes, over a mesh, is one process's."""

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, LlavaForConditionalGeneration

from burst_attention.integrations import hf
from burst_attention.integrations.hf.reading.parts import text_of
from burst_attention.integrations.hf.tensor.axis import COMPARED, SEEING, plan_of
from tests.distributed.test_mesh import apart, mesh_of
from tests.support.conditioning import certain, margin_of_choices
from tests.support.equal import check
from tests.support.vision_models import build, images_and_text
from tests.tools.families import VOCABULARY, built, model_class

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def model_of(kind, own):
    """A tiny model, with the same random weights on every rank."""
    config = copy.deepcopy(built(kind)[0])
    for name, value in own.items():
        setattr(config, name, value)
    config._attn_implementation = config._experts_implementation = "eager"
    config.residual_dropout = 0.0
    torch.manual_seed(0)
    model = model_class(kind)(config).double()
    for parameter in model.parameters():  # so large that sinks, norms and biases matter
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def step_over_a_mesh(kind, **own):
    """Return how far a step is from one process's; ``own``: settings of the model."""
    alone, model, mesh = model_of(kind, own).train(), model_of(kind, own).train(), mesh_of(1, 2, 2)
    by_context = bool(model.ep_plan)
    hf.tensor_parallel(model, mesh["tp"], experts=mesh["cp", "tp"]._flatten("ep") if by_context else None)
    hf.parallelize(model, mesh["cp"], timeout=30)
    draws = (torch.randint(1, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(n)) for n in range(1, 9))
    ids = certain(draws, lambda ids: margin_of_choices(alone, lambda moved: moved(ids, use_cache=False)))
    return apart(alone, model, mesh, {"input_ids": ids, "labels": ids})


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(COMPARED - SEEING))
def test_a_step_of_each_model_type(pools, kind):
    check(*pools(4).run(step_over_a_mesh, kind))


def step_with_images(kind, shards=False):
    alone, model, mesh = build(kind).train(), build(kind).train(), mesh_of(1, 2, 2)
    hf.tensor_parallel(model, mesh["tp"], experts=mesh["cp", "tp"]._flatten("ep") if model.ep_plan else None)
    hf.parallelize(model, mesh["cp"], timeout=60)
    for module in (*text_of(model).layers, model) if shards else ():
        fully_shard(module, mesh=mesh["dp", "cp"]._flatten("fsdp"))
    return apart(alone, model, mesh, images_and_text(alone), shards=shards)


# Choices of keys and blocks; latents that layers share; windows; positions in space; recurrent layers; other towers.
OFTEN = {"hy_v4_vl", "mistral_large4", "minimax_m3_vl", "gemma3", "qwen2_5_vl", "qwen3_5_moe", "idefics3", "aria"}


@pytest.mark.long
@pytest.mark.parametrize("kind", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.slow) for x in sorted(SEEING)])
def test_a_step_with_images_of_each_vision_language_type(pools, kind):
    check(*pools(4).run(step_with_images, kind))


@pytest.mark.long
def test_a_step_with_images_on_shards_of_weights(pools):
    check(*pools(4).run(step_with_images, "mistral3", True))


def test_a_vision_language_model_around_another_language_model_is_refused():
    """The type says nothing of what is inside."""
    config = CONFIG_MAPPING["llava"](text_config=CONFIG_MAPPING["qwen2"]())
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
        plan_of(model, 2)
        config.text_config.model_type = "bloom"
        with pytest.raises(ValueError, match=r"\(model_type 'llava', around 'bloom'\) was not compared"):
            plan_of(model, 2)


def test_norms_of_heads_that_the_plan_leaves_out(pools):
    """GLM-4.5's weights of ``q_norm`` serve the heads of all ranks, and transformers' plan does not name them."""
    check(*pools(4).run(functools.partial(step_over_a_mesh, "glm4_moe", use_qk_norm=True)))


def test_a_weight_for_each_head_that_the_plan_leaves_out_is_refused():
    config = copy.deepcopy(built("cohere")[0])
    config.use_qk_norm = True  # Command R+
    with torch.device("meta"):
        model = model_class("cohere")(config)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_norm.weight is used by heads .* leaves it out"):
        plan_of(model, 2)


def test_a_weight_of_the_heads_of_a_latent_that_the_plan_leaves_out_is_refused():
    with torch.device("meta"):
        model = model_class("deepseek_v32")(built("deepseek_v32")[0])
        attention = model.model.layers[1].self_attn
        attention.q_norm = torch.nn.LayerNorm(24)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_norm.weight is used by heads .* leaves it out"):
        plan_of(model, 2)
    attention.q_norm, attention.num_heads = None, 3
    with pytest.raises(ValueError, match="num_attention_heads=3 of the model is not a multiple of the 2 ranks"):
        plan_of(model, 2)


def test_a_threshold_over_all_columns_is_refused():
    """Gemma 3n's published models have one in their first ten layers."""
    config = copy.deepcopy(built("gemma3n_text")[0])
    config.activation_sparsity_pattern = [0.0, 0.95, 0.0, 0.0]
    with torch.device("meta"):
        model = model_class("gemma3n_text")(config)
    with pytest.raises(ValueError, match=r"layers.1.mlp keeps .* \(activation_sparsity=0.95\)"):
        plan_of(model, 2)
    plan_of(model, 1)


def test_the_page_of_models_lists_them():
    section = PAGE.read_text("utf-8").split("## Tensor parallelism")[1].split("\n## ")[0]
    of_text, of_images = (set(re.findall(r"[a-z0-9_]+", part)) for part in section.split("\n\n")[2:4])
    assert of_images == SEEING and of_text == COMPARED - SEEING
