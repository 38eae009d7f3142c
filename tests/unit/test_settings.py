"""Settings of configurations, moved: the tool finds a wrong one, and the tricky ones stay equal or refused.

``python tests/tools/settings.py`` judges every setting of every model type; here is a small part of them.
"""

from unittest import mock

import pytest
from transformers import CONFIG_MAPPING

from burst_attention import burst_attention
from burst_attention.integrations.hf.layers.attention import Attention
from tests.tools import families, releases, settings
from tests.tools.moves import settings_of

SHARED = {"num_kv_shared_layers": 2}
MIXED = ["sliding_attention", "full_attention"] * 2
TURNED = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
# (model type, what is set, the start of the refusal; None: equal)
TRICKY = [
    ("gemma2", {"attn_logit_softcapping": 2.0}, None),
    ("gemma3n_text", SHARED, None),
    ("minimax_m3_vl_text", {"index_topk_blocks": 1}, None),
    ("llama", {"rope_parameters": {"rope_type": "dynamic"} | TURNED, "max_position_embeddings": 16}, "rope_parameters"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"} | TURNED}, None),
    ("gpt_oss", {"sliding_window": 0}, "sliding_window=0 of the configuration is below 1"),
    ("falcon", {"alibi": True}, "h.0.self_attention (FalconAttention) adds biases by distance"),
]


@pytest.mark.long
@pytest.mark.parametrize(("model_type", "own", "refusal"), TRICKY, ids=lambda x: x if isinstance(x, str) else None)
def test_tricky_settings(model_type, own, refusal):
    outcome = settings.judge(model_type, own)
    assert outcome.kind == ("equal" if refusal is None else "refused"), outcome
    assert outcome.text.startswith(refusal or ""), outcome


def test_a_setting_that_the_ranks_ignore_is_different():
    def deaf(*args, softcap=None, **options):
        return burst_attention(*args, **options)

    with mock.patch.dict(Attention.__call__.__kwdefaults__, attend=deaf):
        outcome = settings.judge("gemma2", {"attn_logit_softcapping": 2.0})
    assert outcome.kind == "different" and outcome.text.startswith("loss by"), outcome


def test_a_setting_that_changes_nothing_is_not_run_over_ranks():
    with mock.patch.object(settings, "over_ranks", side_effect=AssertionError):
        assert settings.judge("llama", {"attention_dropout": 0.5}).kind == "unchanged"
        assert settings.judge("llama", {"num_attention_heads": 5}).kind == "fails"


def test_a_setting_is_run_once_for_types_that_read_it_by_the_same_code():
    seen = {}
    assert [each.kind for each in settings.sweep("qwen2", {"hidden_act"}, seen)] == ["equal"]
    (alike,) = settings.sweep("mistral", {"hidden_act"}, seen)
    assert (alike.kind, alike.text) == ("alike", "qwen2")
    assert [each.kind for each in settings.sweep("glm4", {"hidden_act"}, seen)] == ["equal"], "its MLP is another"
    seen = {}
    with mock.patch.object(settings, "over_ranks", return_value=("different", "loss by 1")):
        outcomes = [*settings.sweep("qwen2", {"hidden_act"}, seen)]
    assert [each.kind for each in outcomes] == ["different"] and not seen, "a wrong one runs in each type"


def test_values_come_from_the_class_and_from_its_modeling_file():
    config = families.tiny_config("gemma3n_text")
    moves = settings_of(config, families.model_class("gemma3n_text"))
    assert {"altup_correct_scale": False} in moves["altup_correct_scale"]
    assert {"layer_types": ["full_attention"] * 4} in moves["layer_types"]
    assert {"num_kv_shared_layers": 2} in moves["num_kv_shared_layers"]
    assert {"is_causal": False} in moves["is_causal"]  # which the code of masks reads
    deeper = {"num_hidden_layers": 8, "layer_types": MIXED * 2, "activation_sparsity_pattern": [0.0] * 8}
    assert moves["num_hidden_layers"][0] == deeper | {"intermediate_size": [96] * 8}
    turned = [each["rope_parameters"] for each in moves["rope_parameters"]]
    kinds = {each["full_attention"]["rope_type"] for each in turned if each is not None}
    assert {"dynamic", "longrope", "yarn", "llama3"} <= kinds
    assert {"q_lora_rank": None} in settings_of(CONFIG_MAPPING["deepseek_v3"](), families.model_class("deepseek_v3"))[
        "q_lora_rank"
    ]


def test_the_page_groups_settings_by_reason():
    why = "a.0 (Own) mixes tokens, and each rank would see only its shard; run it on one rank, where it sees the whole "
    why += "sequence"
    made = [
        settings.Outcome("one", "a", {"a": True}, "equal"),
        settings.Outcome("one", "b", {"b": ["x", "x"]}, "refused", why),
        settings.Outcome("two", "a", {"a": True}, "equal"),
        settings.Outcome("two", "b", {"b": ["x", "y"]}, "refused", why),
        settings.Outcome("two", "c", {"c": 2}, "different", "loss by 1e-2"),
        settings.Outcome("three", "b", {"b": ["x"]}, "refused", why),  # as its default is
    ]
    page = settings.page(made, "2026-01-01")
    assert "| `b=x`, `b=x/y` | one, two | mixes tokens |" in page
    assert "- `c=2` (two): loss by 1e-2" in page


def test_code_of_two_releases_is_the_same_but_for_the_caches_names():
    old = "class A:\n  'Old.'\n  plan = 1\n  def f(self, past_key_values_length):\n    return past_key_values_length\n"
    new = "class A:\n  plan = 1\n  @renamed('past')\n  def f(self, cache_length):\n    return cache_length\n"
    assert releases.code_of(old) == releases.code_of("import b\nclass AOutput(ModelOutput):\n  x: int\n" + new)
    assert releases.code_of(old) != releases.code_of(new.replace("return ", "return 2 * "))
    assert releases.code_of(old) != releases.code_of(new + "A.f = None\n")
