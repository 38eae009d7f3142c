"""``burst plan`` of families without a formula: sizes, work and memory read from transformers' own model."""

from __future__ import annotations

import json

import pytest
import torch
from burst_train.cli import plan
from burst_train.engines import choose
from burst_train.forecast.footprint import training_memory
from burst_train.forecast.models import MODELS
from burst_train.forecast.named import model_of
from burst_train.memory import MemoryConfig

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
    assert found.layers_products == sum(m.weight.numel() for m in linear) + states


@pytest.mark.parametrize("model_type", ["gemma2", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_memory_is_that_of_a_run_without_data(model_type, tmp_path):
    config, folder = folder_of(model_type, tmp_path)
    model, options = model_of(folder), MemoryConfig(remat="layer")
    for tokens in (256, 1024):  # the second scaled from the first
        expected = training_memory(
            config, engine=choose("burst"), seq_len=2 * tokens, world=2, dtype=torch.float32, memory=options
        )
        call = {"batch": 1, "world": 2, "dtype": torch.float32, "buffers": expected["attention"]}
        found = model.memory(tokens=tokens, usual=256, options=options, **call)
        assert found.keys() == expected.keys()
        assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=0.1)


@pytest.mark.long
def test_a_hybrid_is_planned_and_what_is_not_predicted_is_refused(tmp_path, capsys):
    _, folder = folder_of("bamba", tmp_path / "bamba")
    asked = ["--seq-len", "1K", "--ranks", "2", "--hardware", "h100-hgx", "--json", str(tmp_path / "plan.json")]
    assert plan.main(["--model", folder, *asked]) == 0
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["model"]["parameters"] == model_of(folder).size
    engines = {each["engine"]: each for each in written["engines"]}
    assert engines["burst"]["memory"]["layer"]["weights"] > 0
    assert "can't share the projections of a bamba" in engines["tensor-sequence"]["refused"]
    capsys.readouterr()
    for model_type, flags, why in (
        ("gpt_oss", [], "has a mixture of experts (GptOssExperts), whose work is not predicted"),
        ("mamba2", [], "has no attention layer with known heads"),
        ("gptj", [], "GPTJAttention"),
        ("bamba", ["--mlp-chunks", "2"], "--mlp-chunks 2 is predicted for llama, mistral, qwen2, qwen3 only"),
    ):
        _, folder = folder_of(model_type, tmp_path / model_type)
        assert plan.main(["--model", folder, *asked, *flags]) == 2
        assert why in capsys.readouterr().err.replace("\n", " ")


def test_engines_without_a_cap_are_refused(tmp_path):
    _, folder = folder_of("gemma2", tmp_path)
    assert model_of(folder).options == ("softcap",)
    assert MODELS["llama-3-8b"].options == ()
