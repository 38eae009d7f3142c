"""Scaled rotary embeddings: kept in the exported configuration, and equal on shards."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from burst_attention.integrations import hf
from burst_attention.testing import local_world
from burst_train.data.tokenizer import open_tokenizer
from burst_train.step.export import _load, _write
from burst_train.step.model import load_config, model_config
from burst_train.structure import build_empty

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}
SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.mark.parametrize("name", ROPES)
def test_scaled_positions_are_kept_and_are_those_of_one_process(name, tmp_path):
    rope = ROPES[name] | {"rope_theta": 10_000.0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, rope_parameters=rope), dtype=torch.float64)
    model.save_pretrained(tmp_path / "source")
    source = str(tmp_path / "source")
    config = model_config(source, open_tokenizer("bytes", source), 61, loaded=load_config(source), max_positions=128)
    empty = build_empty(config)
    _load(empty, dict(model.state_dict()), source)
    _write(empty, tmp_path / "exported", None)
    exported = load_config(str(tmp_path / "exported"))
    assert exported.rope_parameters == model.config.rope_parameters
    assert exported.max_position_embeddings == 128
    ids = torch.randint(300, (1, 61))
    # Loaded once: loading sets torch's default dtype, which threads share.
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)

    def rank(group):
        ours = hf.parallelize(copy.deepcopy(loaded), group)
        return ours(input_ids=ids, logits="gather").logits

    expected = model(ids).logits
    with torch.no_grad(), local_world(3) as ranks:
        for found in ranks.run(rank):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    assert (plain(ids).logits - expected).abs().max() > 1e-3, "the scaling shows"
