"""Test the error messages of the Hugging Face integration on one rank."""

import itertools
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, Llama4ForCausalLM, Llama4TextConfig, LlamaForCausalLM

from burst_attention import Mask, Strategy, burst_attention, make_plan
from burst_attention.integrations import hf
from burst_attention.integrations.hf import settings, snapshots
from burst_attention.integrations.hf.layers.checks import MaskRequest
from burst_attention.integrations.hf.reading import known, read
from tests.support.hf_models import (
    DOCUMENTS,
    SEQLEN,
    SMALL,
    WINDOW,
    make_batch,
    make_model,
    make_plans,
)


@pytest.fixture(scope="module")
def llama():
    return make_model("llama")


def call(model, plan, /, **changes):
    return model(**{**hf.shard_batch(make_batch(), plan), "plan": plan, "use_cache": False} | changes)


def test_calls_that_the_refused_ones_depart_from(llama):
    for given in ({}, {"softcap": None, "output_attentions": False, "cu_seq_lens_q": None}):
        assert call(llama, make_plan(SEQLEN), **given).logits.isfinite().all()


def test_only_what_is_false_by_default_passes_as_false():
    class FlaggedForCausalLM(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, *, stretched=False, doubled=True, **kwargs):
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    llama = hf.parallelize(make_model("llama"))
    flagged = hf.parallelize(FlaggedForCausalLM(make_model("llama").config).double())
    ids = make_batch()["input_ids"]
    for model, wrong in ((llama, "is_causal"), (flagged, "doubled"), (flagged, "is_causal")):
        with pytest.raises(ValueError, match=f"{wrong}=False is refused"):
            model(input_ids=ids, labels=ids, **{wrong: False})
    for model, right in (
        (llama, {"is_causal": True, "output_attentions": False, "output_hidden_states": False, "use_cache": False}),
        (flagged, {"stretched": False, "output_attentions": False}),
    ):
        plain = model(input_ids=ids, labels=ids).loss
        assert torch.equal(model(input_ids=ids, labels=ids, **right).loss, plain)


def test_an_attention_without_soft_caps_is_refused(llama):
    def plain(q, k, v, plan, *, scale=None):
        return burst_attention(q, k, v, plan, scale=scale)

    assert call(llama, make_plan(SEQLEN), attend=plain).logits.isfinite().all()
    for name, key, value in (("softcap", "softcap", 3.0), ("sinks", "s_aux", torch.zeros(4))):
        with pytest.raises(ValueError, match=f"{name}=.* of the layer: the attention 'plain' does not take it"):
            call(llama, make_plan(SEQLEN), attend=plain, **{key: value})


def test_position_ids_are_compared_again(llama):
    """After they changed in place, and for another plan."""
    plan = make_plan(SEQLEN, mask=Mask(cu_seqlens=DOCUMENTS))
    shard = hf.shard_batch(make_batch(), plan)
    call(llama, plan, **shard)
    with pytest.raises(ValueError, match="position_ids differ from"):
        call(llama, make_plan(SEQLEN), **shard)
    call(llama, plan, **shard)
    shard["position_ids"][1, 4] += 1
    with pytest.raises(ValueError, match="position_ids differ from"):
        call(llama, plan, **shard)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize(
    ("name", "rope", "kind"),
    [
        ("llama", ROPES["longrope"], "longrope"),
        (
            "gemma3",
            {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": ROPES["dynamic"]},
            "dynamic",
        ),
    ],
)
def test_rope_that_reads_the_longest_position(name, rope, kind):
    plan = make_plans(name)
    with pytest.raises(ValueError, match=f"rope type '{kind}'"):
        call(make_model(name, rope_parameters=rope), plan)


FULL, WINDOWED, WIDER = (Mask(window=w) for w in (None, WINDOW, WINDOW + 1))


@pytest.mark.parametrize(
    ("name", "masks", "message"),
    [
        ("mistral", FULL, "sliding_window=7 of the layer is not the window=None"),
        ("mistral", WIDER, "sliding_window=7 of the layer is not the window=8"),
        ("mistral", {None: FULL}, r"sliding_window=7 of the layer is not among the plans' windows \[None\]"),
        ("mistral", {7: WIDER}, "sliding_window=7 of the layer is not the window=8"),
        ("qwen3", WINDOWED, "sliding_window=None of the layer is not the window=7"),
        ("qwen3", FULL, "sliding_window=7 of the layer is not the window=None"),
        ("qwen3", {None: FULL, 8: WIDER}, "sliding_window=7 of the layer is not among the plans"),
        ("llama", {7: WINDOWED}, "sliding_window=None of the layer is not among the plans"),
        ("llama", Mask(causal=False), "is_causal=True of the layer"),
    ],
)
def test_windows_that_the_plan_does_not_hold(name, masks, message):
    first = make_plan(SEQLEN)
    several = isinstance(masks, dict)
    plan = {key: first.with_mask(mask) for key, mask in masks.items()} if several else first.with_mask(masks)
    with pytest.raises(ValueError, match=message):
        call(make_model(name), plan)


@pytest.mark.parametrize("cu_seqlens", [None, DOCUMENTS])
def test_the_smallest_window_without_effect(cu_seqlens):
    """A window one token shorter than the longest document hides one pair of tokens, so it counts."""
    longest = SEQLEN if cu_seqlens is None else max(b - a for a, b in itertools.pairwise(cu_seqlens))
    plan = make_plan(SEQLEN, mask=Mask(cu_seqlens=cu_seqlens))
    shard = hf.shard_batch(make_batch(), plan)
    make_model("mistral", sliding_window=longest)(**shard, plan=plan, use_cache=False)
    with pytest.raises(ValueError, match=f"sliding_window={longest - 1} of the layer is not the window=None"):
        make_model("mistral", sliding_window=longest - 1)(**shard, plan=plan, use_cache=False)


def test_plans_and_batches_that_do_not_fit(llama):
    plan = {None: make_plan(SEQLEN), 7: make_plan(SEQLEN, mask=Mask(window=7), strategy=Strategy(layout="striped"))}
    with pytest.raises(ValueError, match="different"):
        call(llama, plan)
    with pytest.raises(ValueError, match="input_ids has 40 tokens, the plan gives this rank 20 of 20"):
        llama(**make_batch(), position_ids=torch.arange(SEQLEN)[None], plan=make_plan(20), use_cache=False)
    both = make_model("gemma3", use_bidirectional_attention=True)  # halves its window of 7
    with pytest.raises(ValueError, match=r"sliding_window=4 of the layer is not among the plans' windows \[7, None\]"):
        call(both, make_plans("gemma3"))
    first = make_plan(SEQLEN)
    with pytest.raises(ValueError, match="is_causal=False of the layer is not the causal=True"):
        call(both, {window: first.with_mask(Mask(window=window)) for window in (None, 4)})
    plans = {window: first.with_mask(Mask(causal=False, window=window)) for window in (None, 4)}
    assert call(both, plans).logits.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_ids": None}, "position_ids=None did not reach the attention"),
        ({"position_ids": torch.arange(SEQLEN)}, "position_ids has shape [40]"),
        ({"position_ids": torch.arange(SEQLEN).repeat(3, 1)}, "position_ids has shape [3, 40]"),
        ({"position_ids": torch.arange(SEQLEN - 1)[None]}, "position_ids differ from"),
        ({"attention_mask": torch.zeros(2, SEQLEN)}, "attention_mask: a padding mask"),
        ({"attention_mask": object()}, "attention_mask: a mask <object"),
        (
            {"sliding_window": 3, "attention_mask": MaskRequest(True, 4, ())},
            "sliding_window=3 of the layer is not the window 4",
        ),
        ({"attention_mask": MaskRequest(True, 4, ())}, "sliding_window=4 of the layer is not the window=None"),
        ({"attention_mask": MaskRequest(False, None, ())}, "is_causal=False"),
        ({"is_causal": False}, "is_causal=False"),
        ({"scaling": float("nan")}, "scale=nan"),
    ],
)
def test_refused_by_the_attention_itself(changes, message):
    """Call the attention directly, because models pass on different arguments."""
    hf.register()
    plan = make_plan(SEQLEN)
    q, k, v = (torch.randn(2, heads, SEQLEN, 8, dtype=torch.float64) for heads in (4, 2, 2))
    right = {"attention_mask": None, "plan": plan, "position_ids": plan.positions[None], "scaling": 0.5, "dropout": 0.0}
    attend = partial(AttentionInterface._global_mapping["burst"], torch.nn.Module(), q, k, v)
    out, weights = attend(**right)
    assert out.shape == (2, SEQLEN, 4, 8)
    assert out.is_contiguous()
    assert weights is None
    with pytest.raises(ValueError) as caught:
        attend(**right | changes)
    assert message in str(caught.value)


def test_chunked_attention():
    """Layers with chunks need a plan for that chunk size; a single plan is refused."""
    hf.register()
    config = Llama4TextConfig(
        **SMALL | {"intermediate_size_mlp": 48, "num_local_experts": 2},
        attention_chunk_size=8,
        attn_implementation="burst",
        pad_token_id=0,
    )
    with pytest.raises(ValueError, match="attention_chunk_size=8 of the layer has no plan among the call"):
        call(Llama4ForCausalLM(config), make_plan(SEQLEN))


def test_a_cache_is_refused_where_queries_are_scaled_by_their_places():
    """Llama 4 counts places from the length of the cache, on each rank from its shard's start."""
    hf.register()
    layers = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}
    config = Llama4TextConfig(**SMALL | layers | {"intermediate_size_mlp": 48, "num_local_experts": 2}, pad_token_id=0)
    config._attn_implementation = "burst"
    model = hf.parallelize(Llama4ForCausalLM(config).eval())
    with pytest.raises(ValueError, match=f"^{known.CACHE}: a cache with earlier tokens is not"):
        call(model.model, make_plan(SEQLEN), use_cache=True)


def test_whatever_the_checks_of_parts_depend_on_changes_their_state():
    """The checks run again only if the state of the parts changed."""
    model = make_model("llama").train()
    layer = model.model.layers[0]
    for change in (
        lambda: setattr(layer.self_attn, "attention_dropout", 0.1),
        lambda: layer.mlp.register_forward_hook(lambda *_: None),
        lambda: setattr(layer.mlp, "forward", lambda x: x),
        lambda: layer.input_layernorm.eval(),
        lambda: setattr(layer, "hidden_dropout", 0.1),
        lambda: setattr(layer, "hidden_dropout", 0.0),
        lambda: setattr(layer, "mlp", torch.compile(layer.mlp)),
        lambda: model.gradient_checkpointing_enable(),
    ):
        watched = snapshots.Watched(read(model))
        assert watched.unchanged()
        change()
        assert not watched.unchanged()


def test_digests_of_settings_follow_each_change():
    """Ranks compare them in each call; they are made again only if something changed."""
    model = make_model("llama")
    layer = model.model.layers[0]
    norm, layer.gradient_checkpointing = layer.input_layernorm, False  # a new attribute needs new settings
    made = settings.Settings(read(model))
    seen = [made.fields()]
    for change in (
        lambda: norm.weight.requires_grad_(False),
        lambda: setattr(norm, "weight", torch.nn.Parameter(norm.weight.detach().clone())),
        lambda: layer.mlp.up_proj.requires_grad_(False),
        lambda: norm.register_parameter("shift", torch.nn.Parameter(torch.zeros(1))),
        lambda: norm.to(torch.float32),
        lambda: setattr(layer.self_attn, "scaling", 0.5),
        lambda: setattr(norm, "variance_epsilon", 1e-3),
        lambda: setattr(layer, "gradient_checkpointing", True),
        lambda: model.config.update({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        lambda: model.config.rope_parameters.update(rope_theta=6.0),
    ):
        change()
        seen.append(made.fields())
        assert made.fields() == seen[-1]
    assert seen[0] == seen[2] and len({*map(str, seen)}) == len(seen) - 1


def test_what_no_code_of_a_part_reads_is_no_setting():
    """Ranks may differ in it, as in a map of devices."""
    model, before = make_model("llama"), settings.Settings(read(make_model("llama"))).fields()
    model.hf_device_map, model.config.of_this_rank, model.model.rank = {"": 3}, 3, 3
    model.config.use_cache = not model.config.use_cache
    assert settings.Settings(read(model)).fields() == before


def test_settings_of_adapters():
    found = []
    for change in (
        lambda model: None,
        lambda model: model.disable_adapter_layers(),
        lambda model: model.set_adapter("other"),
        lambda model: model.base_model.model.model.layers[0].self_attn.q_proj.scaling.update(default=7.0),
        lambda model: model.merge_adapter(),
    ):
        model = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"], lora_dropout=0.0))
        model.add_adapter("other", LoraConfig(target_modules=["q_proj"], lora_dropout=0.0))
        change(model)
        found.append(settings.Settings(read(model.base_model.model)).fields()[settings._PARTS])
    assert len({*found}) == len(found)


def test_a_hook_on_the_head_is_refused_whenever_it_comes():
    model, ids = hf.parallelize(make_model("llama")), torch.ones(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids)
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="model's lm_head has a hook"):
        model(input_ids=ids, labels=ids)
    handle.remove()
    assert model(input_ids=ids, labels=ids).loss > 0
