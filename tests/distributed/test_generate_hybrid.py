"""Generate over ranks with recurrent layers: the tokens and logits of one process with transformers' own cache."""

from __future__ import annotations

import copy

import pytest
import torch

from burst_attention.inference import ShardedCache
from tests.distributed.test_generate import at_all_worlds, padded, tokens_at_once
from tests.support.generating import alone, check_equal, generate, ids_of, model_of, over_ranks

NEW = 12
KINDS = ("qwen3_5", "bamba", "kimi_linear", "lfm2")  # one of each mechanism that a cache holds
OTHERS = ("qwen3_next", "olmo_hybrid", "granitemoehybrid", "nemotron_h", "lfm2_moe", "lfm3")


@pytest.mark.parametrize(
    ("name", "count", "worlds"),
    [
        ("qwen3_5", 1_000, (3,)),
        ("qwen3_5", 7, (2,)),
        ("bamba", 1, (2,)),
        ("kimi_linear", 7, (2,)),
        ("lfm2", 1_000, (2,)),
        pytest.param("bamba", 1_000, (1, 4), marks=pytest.mark.long),
        pytest.param("kimi_linear", 1_000, (3,), marks=pytest.mark.long),
    ],
)
def test_tokens_and_logits_equal_one_process(name, count, worlds):
    at_all_worlds(name, ids_of(count), worlds, max_new_tokens=NEW)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name):
    at_all_worlds(name, ids_of(150, 2), (3,), max_new_tokens=NEW)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bamba", "lfm2"])
def test_a_batch_of_equal_lengths(name):
    at_all_worlds(name, ids_of(131, 3), (1, 3), max_new_tokens=NEW)


def continued(ids):
    """Generate after these ids. The mask says that a pad token among them is a token."""
    return {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_turns_continue_the_states(name):
    """The second turn is short, so every rank computes it. The third is long, so it runs on shards."""
    first, second, third = ids_of(90, 2), ids_of(5, 2), ids_of(150, 2)

    def turns(run):
        said = run(first).sequences
        said = run(torch.cat([said, second], 1)).sequences
        return run(torch.cat([said, third], 1))

    expected = turns(lambda ids: alone(name, **continued(ids)))  # without a cache between turns
    check_equal(over_ranks(name, 3, lambda *both: turns(lambda ids: generate(*both, **continued(ids)))), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_in_chunks_gives_the_same_tokens(name):
    ids = ids_of(501)
    expected = alone(name, ids, max_new_tokens=NEW)

    def use(model, cache):
        cache = ShardedCache(model.config, cache.group, prefill_chunk=130)
        out, counts = tokens_at_once(model, lambda: generate(model, cache, ids, max_new_tokens=NEW))
        return out, counts, [each.tensors() for each in cache.states.values()]

    for world in (3,):
        outs = over_ranks(name, world, use)
        check_equal([out for out, *_ in outs], expected)
        assert all(len(counts) == 4 and max(counts) <= -(-125 // world) for _, counts, _ in outs)
        for _, _, states in outs:
            for mine, first in zip(states, outs[0][2], strict=True):
                assert all(torch.equal(mine[name], x) for name, x in first.items()), "states differ between ranks"


def test_another_strategy_fills_the_states():
    ids = ids_of(150)
    use = lambda *both: generate(*both, ids, max_new_tokens=NEW)  # noqa: E731
    check_equal(over_ranks("qwen3_5", 2, use, strategy="ulysses"), alone("qwen3_5", ids, max_new_tokens=NEW))


@pytest.mark.long
@pytest.mark.parametrize("name", ["bamba", "kimi_linear", "lfm2"])
def test_a_saved_cache_serves_any_number_of_ranks(tmp_path, name):
    ids = ids_of(150, 2)
    first = alone(name, ids, max_new_tokens=70).sequences
    longer = torch.cat([first, ids_of(100, 2)], 1)
    expected = alone(name, **continued(longer))

    def save(model, cache):
        generate(model, cache, ids, max_new_tokens=70)
        cache.save(tmp_path / "cache")
        generate(model, cache, **continued(longer))  # what the cache holds later is not loaded

    def load(model, cache):
        loaded = ShardedCache.load(tmp_path / "cache", model.config, cache.group)
        return generate(model, loaded, **continued(longer))

    over_ranks(name, 3, save)
    for world in (1, 4):
        check_equal(over_ranks(name, world, load), expected)


def test_reset_forgets_the_states():
    """Another batch size follows."""
    expected = alone("qwen3_5", ids_of(80, 2), max_new_tokens=NEW)

    def use(model, cache):
        generate(model, cache, ids_of(70), max_new_tokens=3)
        cache.reset()
        assert cache.nbytes() == 0 and cache.get_seq_length() == 0
        return generate(model, cache, ids_of(80, 2), max_new_tokens=NEW)

    check_equal(over_ranks("qwen3_5", 2, use), expected)


def test_every_rank_refuses_padding_before_a_state_and_beams():
    ids, mask = padded((9, 3))

    def use(model, cache):
        with pytest.raises(ValueError, match="num_beams=3"):
            generate(model, cache, ids_of(5), max_new_tokens=2, num_beams=3)
        with pytest.raises(ValueError) as caught:
            generate(model, cache, ids, attention_mask=mask, max_new_tokens=2)
        return str(caught.value), generate(model, cache, ids[:1], max_new_tokens=2)

    outs = over_ranks("qwen3_5", 2, use)
    assert all("layer 0 of the model is recurrent, and its state can't skip" in said for said, _ in outs)
    check_equal([out for _, out in outs], alone("qwen3_5", ids[:1], max_new_tokens=2))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mamba2", "layer_types of the configuration has no attention"),
        ("falcon_h1", "layer_types of the configuration has 'hybrid'"),
        ("jamba", "layers_block_type of the configuration has 'mamba'"),
    ],
)
def test_configurations_are_refused(name, text):
    with pytest.raises(ValueError, match=text):
        ShardedCache(model_of(name).config)


def test_several_states_in_a_layer_are_refused():
    config = copy.deepcopy(model_of("qwen3_5").config)
    config.number_of_conv_states = 2
    with pytest.raises(ValueError, match="number_of_conv_states=2"):
        ShardedCache(config)


def test_every_rank_refuses_a_mechanism_without_a_cache():
    def use(model, cache):
        with pytest.raises(ValueError) as caught:
            generate(model, cache, ids_of(80), max_new_tokens=2)
        return str(caught.value)

    said = over_ranks("minimax", 2, use)
    assert all("(MiniMaxLightningAttention, lightning) has a state that no cache over ranks holds" in x for x in said)
