"""What a step computes, counted one by one, and MFU from it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from burst_attention.plan.indexed import Indexed
from burst_attention.plan.mask import Mask
from burst_train.data.sequences import TokenSequence
from burst_train.health.flops import ModelFlops, peak_of, seen_pairs
from burst_train.strategies import Heads
from tests.support.indexed_models import make_indexed

CPU = torch.device("cpu")
BORDERS = (0, 5, 6, 40, 64)


def llama(tied):
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tied", [False, True])
def test_they_are_those_that_torch_counts_but_for_what_the_mask_hides(tied):
    model = llama(tied)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    flops = ModelFlops.of(model, Heads.of(model.config), [None] * 3)
    hidden = 64 * 64 - 64 * 65 // 2  # pairs that eager attention computes and the mask hides
    # The gradient of the first layer's input is torch's too: the embedding wants it.
    assert flops.of_step([TokenSequence(np.zeros(64), None)]) == counter.get_total_flops() - 12 * 32 * 3 * hidden


def test_experts_that_compute_a_token_count():
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2}
    config = MixtralConfig(**sizes, attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(64)[None], labels=torch.arange(64)[None]).loss.backward()
    flops = ModelFlops.of(model, Heads.of(config), [None] * 2, config)
    hidden, routers = 64 * 64 - 64 * 65 // 2, 2 * 6 * 32 * 5 * 64
    expected = counter.get_total_flops() - 12 * 32 * 2 * hidden - routers
    assert flops.of_step([TokenSequence(np.zeros(64), None)]) == expected
    assert ModelFlops.of(model, Heads.of(config), [None] * 2).of_step([]) is None  # how many compute is not known


def test_values_narrower_than_keys_count_by_their_width():
    heads = Heads(q_heads=2, kv_heads=2, head_dim=6, hidden=0, intermediate=0, v_head_dim=4)
    assert ModelFlops(0, heads, (None,)).of_step([TokenSequence(np.zeros(3), None)]) == 6 * 2 * (6 + 4) * 6


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("borders", [None, BORDERS])
def test_pairs_are_those_of_the_mask(window, borders):
    assert seen_pairs(64, window, borders) == Mask(window=window, cu_seqlens=borders).dense(64).sum()


def test_layers_count_by_their_own_windows():
    sequences = [TokenSequence(np.zeros(64), None), TokenSequence(np.zeros(64), BORDERS)]
    heads = Heads(q_heads=3, kv_heads=1, head_dim=5, hidden=0, intermediate=0)
    pairs = sum(2 * seen_pairs(64, 7, each.cu_seqlens) + seen_pairs(64, None, each.cu_seqlens) for each in sequences)
    assert ModelFlops(6 * 11, heads, (7, None, 7)).of_step(sequences) == 6 * 11 * 128 + 12 * 15 * pairs


def test_a_peak_is_given_or_that_of_a_known_gpu(monkeypatch):
    assert peak_of(CPU, torch.float32, None) is None
    assert peak_of(CPU, torch.float32, 0.5) == 0.5e12
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12, "T4": None}
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_of(torch.device("cuda"), torch.bfloat16, None) == peak
        assert peak_of(torch.device("cuda"), torch.float32, None) is None


def test_of_chosen_keys_only_those_count_and_an_indexer_has_no_backward():
    heads = Heads(q_heads=4, kv_heads=4, head_dim=6, v_head_dim=4, hidden=8, intermediate=8)
    call = Indexed(q_heads=4, kv_heads=1, head_dim=9, v_head_dim=8, inside=True, count=3, index_heads=2, index_dim=5)
    sequence = TokenSequence(np.zeros(9), (0, 2, 9))
    chosen, seen = 1 + 2 + (1 + 2 + 5 * 3), 3 + 7 * 8 // 2
    full, shared = 6 * 4 * 10 * chosen + 2 * 2 * 5 * seen, 6 * 4 * 10 * chosen
    for indexed, expected in ((call, full), (replace(call, index_heads=0), shared), (None, 6 * 4 * 10 * seen)):
        assert ModelFlops(0, heads, (None,), [indexed]).of_step([sequence]) == expected


def test_weights_of_an_indexer_get_no_gradient():
    model = make_indexed("deepseek_v32", stock=True, mlp_layer_types=["dense"] * 3)
    model.requires_grad_(True)
    linear = [(name, x.weight.numel()) for name, x in model.named_modules() if isinstance(x, torch.nn.Linear)]
    expected = sum(size * (2 if "indexer" in name else 6) for name, size in linear)
    found = ModelFlops.of(model, Heads.of(model.config), [None] * 3, model.config)
    assert found.per_token == expected and any("indexer" in name for name, _ in linear)
