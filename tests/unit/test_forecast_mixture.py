"""Mixtures of experts in predictions: weights and work of the real modules, what FSDP2 sends, memory, refusals."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MixtralConfig

from burst_attention.planner.presets import preset
from burst_train.cli.plan import notes
from burst_train.forecast.forecast import forecast_of, savings
from burst_train.forecast.memory import StepMemory
from burst_train.forecast.models import Model, model_of
from burst_train.forecast.request import Cluster, Device, ForecastRequest
from burst_train.forecast.serving import served
from burst_train.memory import Saving
from tests.support.vision_models import tiny_config as tiny_vision
from tests.tools.families import tiny_config

TOKENS = 64
# How many layers of four are mixtures in the tiny configuration.
FAMILIES = {
    "mixtral": 4,
    "qwen3_moe": 4,
    "qwen2_moe": 4,
    "gpt_oss": 4,
    "deepseek_v3": 1,
    "deepseek_v32": 1,
    "glm_moe_dsa": 1,
    "axk2": 3,
    "hy_v4": 3,
    "minimax_m3_vl_text": 4,
}


def experts(count):
    """The configuration's entry, under all the names that families have for it."""
    return dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count)


def read(family, **changes):
    return Model.read(tiny_config(family, **changes), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_products_are_those_of_the_model(family):
    """torch counts the products of an eager forward; attention's are batched, and not among these."""
    config = tiny_config(family)
    found = Model.read(config, family)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    assert found.size == sum(x.numel() for x in model.parameters())
    assert len(found.mixtures) == FAMILIES[family]
    with torch.no_grad(), FlopCounterMode(display=False) as counter, warnings.catch_warnings(action="ignore"):
        model.eval()(torch.arange(TOKENS)[None], use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    counted = sum(count for name, count in counts.items() if str(name) in ("aten.mm", "aten.addmm"))
    products = found.products + found.index_products + found.head_products
    assert counted == 2 * TOKENS * products


def test_each_expert_that_a_token_uses_counts():
    config = experts(8) | {"moe_intermediate_size": 32, "n_shared_experts": 3}
    one, two = (read("glm_moe_dsa", **config, num_experts_per_tok=n) for n in (1, 2))
    assert two.products - one.products == 3 * 64 * 32 and two.size == one.size
    (mixture,) = two.mixtures
    assert (mixture.experts, mixture.per_token, mixture.shared, mixture.columns) == (8, 2, 3 * 32, 5 * 32)
    assert two.intermediate == (3 * 96 + 5 * 32) // 4, "three layers are dense"


@pytest.mark.parametrize(
    ("family", "changes", "count"),
    [
        ("glm_moe_dsa", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, 2),
        ("deepseek_v3", {"first_k_dense_replace": 2}, 2),
        ("qwen3_moe", {"decoder_sparse_step": 2}, 2),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, 1),
    ],
)
def test_dense_layers_are_no_mixtures(family, changes, count):
    assert len(read(family, **changes).mixtures) == count


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("llama4_text", {}, r"Llama4TextExperts\), whose work is not predicted: its weights are not stacked"),
        ("inkling_text", {}, "InklingSharedExperts"),
        ("doge", {"is_moe": True}, "DogeCDMoE"),
        ("zaya", {}, "its router does not choose the best of its 4 experts alone"),  # a token may skip them
        ("gemma4_text", {"enable_moe_block": True}, "Gemma4TextDecoderLayer does not run on hidden states alone"),
        ("inkling2_text", {}, "has weights .scale of Inkling2ScaledL2Clip. whose work is not predicted"),
        ("dory", {}, r"runs layers several times \(n_recurrent_loops=2\)"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, "has quantised experts .quantization_config"),
    ],
)
def test_what_is_not_counted_is_refused_by_name(family, changes, why):
    with pytest.raises(ValueError, match=why):
        read(family, **changes)


def request(model, *, ranks=4, **changes):
    cluster = Cluster(ranks=ranks, per_node=4, rates=preset("cpu"), device=Device())
    sizes = {"seq_len": 4096, "cluster": cluster, "model": model, "dtype": torch.bfloat16, "remat": "none"}
    return ForecastRequest(**sizes | changes)


@pytest.mark.parametrize("family", ["mixtral", "glm_moe_dsa", "minimax_m3_vl_text"])
def test_a_step_is_predicted(family):
    model = read(family)
    asked = request(model)
    found = forecast_of("burst", asked)
    assert "seconds of experts were compared in one small case alone" in " ".join(notes(asked, [found]))
    assert found.attention > 0 and found.bytes == (sum(found.memory["none"].values()) if found.memory else None)
    few = replace(model, products=model.products - sum(each.products for each in model.mixtures))
    less = request(few)
    products = 2 * 4096 * sum(each.products for each in model.mixtures)
    assert asked.flops - less.flops == 3 * products
    rate = asked.cluster.rates.speed(2).forward
    assert found.rest - forecast_of("burst", less).rest == pytest.approx(3 * products / 4 / rate)


def test_fewer_experts_than_ranks_are_sent_as_one_for_each_rank():
    model = read("mixtral", **experts(3))
    found = sum(forecast_of("burst", request(model)).sent["parameters"])
    layers = model.layers_size + sum(each.expert + 64 for each in model.mixtures)  # a fourth, and its router's row
    root = model.root_size + 2 * 3 * 64  # embedding and head have 97 rows, which are sent as 100
    assert found == pytest.approx(3 / 4 * (2 * (2 * layers + root) + 4 * (layers + root)))


def test_rows_of_experts_move_bytes():
    model = read("mixtral")
    asked = request(model)
    asked = replace(asked, cluster=replace(asked.cluster, device=Device(bandwidth=1e12)))
    without = replace(asked, model=replace(model, mixtures=()))
    moved = 3 * 1024 * 4 * (3 * 2 + 16) * 2 * 64  # three passes, two rows a token in each of four layers
    assert asked.rest_seconds("none") - without.rest_seconds("none") == pytest.approx(moved / (0.8 * 1e12))


def test_memory_is_that_of_layers_which_are_alike():
    whole, mixed = read("qwen3_moe"), read("qwen3_moe", mlp_only_layers=[0])
    assert forecast_of("burst", request(whole)).memory and not forecast_of("burst", request(mixed)).memory
    assert not forecast_of("burst", request(whole, saving=Saving(mlp_chunks=2))).memory
    small = request(whole)
    small = replace(small, cluster=replace(small.cluster, device=Device(memory=1e6)))
    assert not [flags for flags, _ in savings(small) if "chunks" in flags]


def test_more_experts_need_more_memory_for_weights_and_more_used_ones_for_activations():
    sizes = [(4, 2), (8, 2), (8, 4)]
    few, many, used = (
        forecast_of("burst", request(read("mixtral", **experts(n), num_experts_per_tok=k))).memory["none"]
        for n, k in sizes
    )
    assert many["weights"] > 1.8 * few["weights"] and many["weights"] == used["weights"]
    assert used["activations"] > 1.4 * many["activations"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_what_experts_keep_is_what_their_forward_saves(family, dtype):
    config = tiny_config(family)
    found = StepMemory(q=request(Model.read(config, family), dtype=dtype), buffers=0)._fed_kept()
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    known = {x.untyped_storage().data_ptr() for x in model.parameters()}

    def saved(tokens):
        x, kept = torch.randn(1, tokens, 64, dtype=dtype, requires_grad=True), []
        with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
            out = model.model.layers[0].mlp(x)
        assert out.requires_grad
        storages = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in kept}
        return sum(size for at, size in storages.items() if at not in known | {x.untyped_storage().data_ptr()})

    assert found == pytest.approx((saved(400) - saved(200)) / 200, rel=0.02)


def test_tensor_parallelism_and_generation_are_refused():
    asked = request(read("mixtral"))
    with pytest.raises(ValueError, match=r"tensor-parallel is predicted for .*, not for mixtral"):
        asked.cut(2)
    with pytest.raises(ValueError, match="has a mixture of experts, which --generate does not predict"):
        served(asked)


@pytest.mark.parametrize(("family", "images"), [("qwen2_vl", True), ("minimax_m3_vl", True), ("glm5_next_text", False)])
def test_a_model_without_a_causal_one_is_refused_in_one_line(family, images, tmp_path):
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no causal language model in transformers") as error:
        model_of(str(tmp_path))
    text = str(error.value)
    assert text.startswith(f"--model {str(tmp_path)!r}: model_type={family!r} of the configuration")
    assert "\n" not in text and len(text) < 300 and ("a vision-language model" in text) == images
    assert text.endswith("train it by hf.parallelize and a trainer")


def test_a_causal_model_with_an_image_encoder_is_refused_for_that(tmp_path):
    tiny_vision("gemma3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Gemma3ForConditionalGeneration has an image encoder, and --data holds text"):
        model_of(str(tmp_path))


def test_a_mixture_of_a_folder_is_read(tmp_path):
    config = tiny_config("mixtral")
    assert isinstance(config, MixtralConfig)
    config.save_pretrained(tmp_path)
    assert model_of(str(tmp_path)).size == Model.read(config, "tiny").size


def test_products_of_conv1d_count():
    """GPT-2's linear layers are of a class of transformers."""
    found = read("gpt2")
    assert found.products == sum(rows * columns for rows, columns in found.inside if columns > 1)
