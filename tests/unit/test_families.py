"""Families of models over three ranks: each is equal to one process or refused by name, and none is plausibly wrong."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tools import families

# By the configuration's layers, by a layer's own attention, by the parts of the model, by the loss, by the call.
REFUSED = {
    "lfm2": "layer_types of the configuration has 'conv'",
    "falcon_h1": "layer_types of the configuration has 'hybrid'",
    "bloom": "BloomAttention) computes its attention itself",
    "bart": "BartDecoder) counts positions itself",
    "mamba": "no attention has used the plan for this batch",
    "stablelm": "plan is missing",
}


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "gemma3_text", "cohere2", "mixtral", "deepseek_v3"])
def test_equal(model_type):
    verdict = families.judge(model_type)
    assert verdict.kind == "equal", verdict
    assert verdict.windows == ({None, families.WINDOW} if model_type in ("gemma3_text", "cohere2") else {None})
    assert bool(verdict.logits) == (model_type == "cohere2")


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type):
    verdict = families.judge(model_type)
    assert verdict.kind == "refused", verdict
    assert REFUSED[model_type] in verdict.text


@pytest.mark.slow
def test_every_family_is_equal_or_refused():
    verdicts = [families.judge(model_type) for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert [verdict for verdict in verdicts if verdict.kind in ("different", "error")] == []
    assert sum(verdict.kind == "equal" for verdict in verdicts) >= 75
