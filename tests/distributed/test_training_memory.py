"""The memory of a step that is foretold, against the most that a rank held, resident, while it trained."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace

import pytest
import torch
from burst_bench.harness.memory import give_back, peak_during, resident
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from burst_attention.engines import choose
from burst_attention.launch.join import join
from burst_attention.testing import WorkerPool
from burst_attention.training.footprint import PARTS, training_memory
from burst_attention.training.loop import Trainer
from burst_attention.training.memory import MemoryConfig
from tests.training import config_of

BATCH = 8  # of short sequences: memory without the attention's time
SIZES = {"vocab_size": 258, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2**20}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A few long documents."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "".join(f"{n * n % 97} times {n} is odd.\n" for n in range(12_000))
    for name in "abc":
        (folder / f"{name}.txt").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    return str(folder)


def steps(config):
    with join(device="cpu", timeout=60) as context:
        for _ in itertools.islice(Trainer(config, context).steps(), 2):
            pass


def most_resident(config):
    """Above the start: the model, and two steps. What a first step brings that is no tensor is there before."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # memory that nobody writes to is not resident
    try:
        steps(replace(config, data=replace(config.data, seq_len=97)))
        gc.collect()
        give_back()
        before = resident()
        return peak_during(lambda: steps(config))[1] - before
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filling


def foretold(model, length, world, engine="burst", **flags):
    parts = training_memory(
        AutoConfig.from_pretrained(model),
        engine=choose(engine),
        seq_len=length,
        world=world,
        batch=BATCH,
        dtype=torch.float32,
        memory=MemoryConfig(**flags),
    )
    return sum(parts.values())


def hold(corpus, model, out, length, world, engine="burst", **flags):
    """In processes of their own: what others have left in a process is resident there, too."""
    shared = {"pack": "none", "batch": BATCH, "held_out": 0.0, "model": model, "tokenizer": "bytes", "engine": engine}
    config = config_of(corpus, out, seq_len=length, **shared, **flags)
    with WorkerPool(world, timeout=120) as pool:
        most = max(pool.run(most_resident, config))
    assert foretold(model, length, world, engine, **flags) == pytest.approx(most, rel=0.1), (most, flags)


@pytest.mark.slow  # what is resident is up to the allocator, too: 103 to 122 MiB were seen for 96 foretold
@pytest.mark.parametrize(("length", "world", "flags"), [(512, 1, {"remat": "layer"})])
def test_the_peak_is_what_was_foretold(corpus, model, tmp_path, length, world, flags):
    hold(corpus, model, tmp_path, length, world, **flags)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("length", [700, 1_000, 1_500])
@pytest.mark.parametrize("flags", [{}, {"remat": "layer"}, {"remat": "keep-attention", "mlp_chunks": 4}], ids=str)
def test_the_peak_is_what_was_foretold_at_three_lengths(corpus, model, tmp_path, length, world, flags):
    hold(corpus, model, tmp_path, length * world, world, **flags)


def test_each_flag_lowers_what_is_foretold(model):
    plain, layer, pieces, keep = (
        foretold(model, 8192, 2, **flags)
        for flags in ({}, {"remat": "layer"}, {"remat": "layer", "mlp_chunks": 4}, {"remat": "keep-attention"})
    )
    assert plain > 1.5 * layer and layer > 1.1 * pieces and plain > keep > layer
    assert plain > 1.3 * foretold(model, 8192, 2, mlp_chunks=4), "pieces are recomputed, whatever the layer is"
    assert foretold(model, 16384, 4, remat="layer") == pytest.approx(layer, rel=0.05), "of a rank"


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_every_architecture_is_foretold(kind):
    config = kind(**SIZES | {"max_position_embeddings": 4096})
    if kind is MistralConfig:
        config.sliding_window = 700
    told = {
        dtype: training_memory(config, engine=choose("burst"), seq_len=4096, world=3, dtype=dtype, accumulate=n)
        for n, dtype in ((1, torch.float32), (2, torch.bfloat16))
    }
    for dtype, parts in told.items():
        assert tuple(parts) == PARTS and min(parts.values()) >= 0, dtype
    assert sum(told[torch.bfloat16].values()) < 0.75 * sum(told[torch.float32].values())
    assert told[torch.bfloat16]["gradients"] == told[torch.bfloat16]["weights"], "kept from micro-step to micro-step"
    assert training_memory(config, engine=choose("ulysses"), seq_len=4096, world=2, dtype=torch.float32) is None


def test_weights_count_once_however_many_tokens():
    few, many = (
        training_memory(LlamaConfig(**SIZES), engine=choose("ring"), seq_len=n, world=2, dtype=torch.float32)
        for n in (4096, 8192)
    )
    assert few["weights"] == many["weights"] > 0 and few["AdamW"] == 2 * few["weights"]
    assert many["activations"] == pytest.approx(2 * few["activations"], rel=0.1)


def test_whole_gradients_are_there_for_one_layer_at_a_time():
    """Of many layers and few tokens: else there would be as many whole gradients as weights."""
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 40})
    parts = training_memory(config, engine=choose("burst"), seq_len=64, world=8, dtype=torch.float32)
    assert sum(parts.values()) < 8 * parts["weights"]
