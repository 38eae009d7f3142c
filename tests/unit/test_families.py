"""Families of models over three ranks: each is equal to one process or refused by name, and none is plausibly wrong."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tools import families

# By the configuration's layers, by a layer's own attention, by the parts of the model, by the loss, by the call.
REFUSED = {
    "recurrent_gemma": "block_types of the configuration has 'recurrent'",
    "bloom": "BloomAttention) computes its attention itself",
    "bart": "BartDecoder) counts positions itself",
    "musicgen": "MusicgenDecoder) counts positions itself",
    "gptj": "GPTJAttention) computes its attention itself",
}


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "gpt_neox",
        "gemma3_text",
        "cohere2",
        "mixtral",
        "deepseek_v3",
        "lfm2",
        "mamba",
        "nemotron",
        "gpt_bigcode",
    ],
)
def test_equal(model_type):
    verdict = families.judge(model_type)
    assert verdict.kind == "equal", verdict
    windows = {
        "gemma3_text": {None, families.WINDOW},
        "cohere2": {None, families.WINDOW},
        "mamba": set(),
        "nemotron": set(),
    }
    assert verdict.windows == windows.get(model_type, {None})
    mechanisms = {"lfm2": {"convolution"}, "mamba": {"Mamba 1"}}
    assert verdict.mechanisms == mechanisms.get(model_type, set())
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
    assert sum(verdict.kind == "equal" for verdict in verdicts) >= 100
