"""Generate over ranks with recurrent layers: other strategies, reset, and what is refused."""

import copy
import functools

import pytest
import torch
from transformers import DynamicCache

from burst_attention.inference import ShardedCache
from burst_attention.integrations.hf.reading import Kind, read
from tests.distributed.test_generate import padded
from tests.support.conditioning import greatest
from tests.support.generating import alone, check_equal, generate, ids_of, model_of, over_ranks

NEW = 12


def test_another_strategy_fills_the_states():
    ids = ids_of(150)
    use = lambda *both: generate(*both, ids, max_new_tokens=NEW)  # noqa: E731
    check_equal(over_ranks("qwen3_5", 2, use, strategy="ulysses"), alone("qwen3_5", ids, max_new_tokens=NEW))


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


@functools.cache
def slow_model(name, implementation):
    """Return a model whose time steps are below the limit that transformers' prefill puts on them."""
    model = copy.deepcopy(model_of(name, implementation))
    for mixer in (part.module for part in read(model).of(Kind.MIXER)):
        mixer.dt_bias.data.fill_(-9.0)
        mixer.time_step_limit = (0.05, float("inf"))
    return model


@pytest.mark.parametrize("name", ["nemotron_h", "bamba", "granitemoehybrid"])
def test_the_last_tokens_of_a_prompt_have_the_limits_of_a_prefill(name):
    """transformers limits the time steps of several new tokens, but not that of one."""
    counts, keeps = (67, 65, 1, 2, 129), (1, 64, 1, 1, 1)
    ids, places = (x.split(counts, 1) for x in (ids_of(sum(counts)), torch.arange(sum(counts))[None]))

    def use(model, cache):
        return [
            model(input_ids=x, position_ids=at, past_key_values=cache, logits_to_keep=keep).logits
            for x, at, keep in zip(ids, places, keeps, strict=True)
        ]

    stock = slow_model(name, "eager")
    with torch.no_grad():
        expected = use(stock, DynamicCache(config=stock.config))
    for world in (1, 2):
        for found in over_ranks(name, world, use, make=slow_model):
            assert greatest((a - b).abs().max() for a, b in zip(found, expected, strict=True)) <= 1e-5
