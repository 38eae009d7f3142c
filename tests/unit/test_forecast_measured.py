"""``burst plan`` of any family: sizes and work read from transformers' own model."""

import json

import pytest
import torch

from burst_train.cli import plan
from burst_train.forecast.models import model_of
from tests.tools.families import model_class, tiny_config

# Attention layers by window; multiplications per token in the four layers' states and convolutions.
FAMILIES = {
    "gemma2": ({5: 2, None: 2}, 0),
    "glm4": ({None: 4}, 0),
    "qwen3_5_text": ({None: 1}, 3 * (3 * 4 * 16 * (16 + 16) + 128 * 4)),
    "bamba": ({None: 2}, 2 * (2 * 4 * 32 * 16 + (128 + 2 * 16) * 4)),
}


def folder_of(model_type, folder):
    config = tiny_config(model_type)
    config.save_pretrained(folder)
    return config, str(folder)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sizes_are_those_of_transformers(model_type, tmp_path):
    config, folder = folder_of(model_type, tmp_path)
    found, (windows, states) = model_of(folder), FAMILIES[model_type]
    with torch.device("meta"):
        model = model_class(model_type)(config)
    assert found.size == sum(p.numel() for p in model.parameters())
    assert found.windows_by_count == windows
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    assert found.products == sum(m.weight.numel() for m in linear) + states


@pytest.mark.long
def test_a_hybrid_is_planned_and_what_is_not_predicted_is_refused(tmp_path, capsys):
    _, folder = folder_of("bamba", tmp_path / "bamba")
    asked = ["--seq-len", "1K", "--ranks", "2", "--hardware", "h100-hgx", "--json", str(tmp_path / "plan.json")]
    assert plan.main(["--model", folder, *asked]) == 0
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["model"]["parameters"] == model_of(folder).size
    found = {each["strategy"]: each for each in written["strategies"]}
    assert found["burst"]["memory"] == {} and found["burst"]["fits"] is None and found["burst"]["attention"] > 0
    assert "can't share the projections of a bamba" in found["tensor-sequence"]["refused"]
    assert "No formula gives its memory: try one step." in capsys.readouterr().out
    for model_type, why in (
        ("gpt_oss", "has a mixture of experts (GptOssExperts), whose work is not predicted"),
        ("mamba2", "has no attention layer with known heads"),
        ("gptj", "GPTJAttention"),
    ):
        _, folder = folder_of(model_type, tmp_path / model_type)
        assert plan.main(["--model", folder, *asked]) == 2
        assert why in capsys.readouterr().err.replace("\n", " ")


def test_strategies_without_a_cap_are_refused(tmp_path):
    _, folder = folder_of("gemma2", tmp_path)
    assert model_of(folder).heads.options == ("softcap",)
    assert model_of("llama-3-8b").heads.options == ()
