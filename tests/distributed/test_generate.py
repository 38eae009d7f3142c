"""Generate over ranks: the tokens and logits of one process with transformers' own cache."""

import copy
import functools
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, Gemma4ForCausalLM
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList

from burst_attention import Strategy
from burst_attention.attention.dealt import dealt_bytes
from burst_attention.comm.local import LocalTransport
from burst_attention.inference import ShardedCache, shard_weights
from burst_attention.integrations import hf
from burst_attention.integrations.hf.reading.parts import text_of
from tests.support.generating import (
    GREEDY,
    SHARED,
    alone,
    available,
    check_equal,
    check_that_rank_1_is_named,
    error_of_killing_rank_1,
    generate,
    ids_of,
    labels_sent,
    model_of,
    over_ranks,
)
from tests.support.vision_models import IMAGE

MODELS = ("llama", "qwen3", "mistral", "gemma3", "gpt_oss")
HYBRIDS = ("qwen3_5", "bamba", "kimi_linear", "lfm2")  # one of each recurrent mechanism that a cache holds
VISION = ("qwen3_vl-vision", "gemma3-vision")  # with images, which no cache over ranks takes; text alone works
# tests/tools/vision_families.py compares all types. Here: layers that get positions in time and space, a forward that
# takes no number of logits, recurrent layers, blocks of keys.
OWN_VISION = available("glm4v_moe-vision", "minicpm_ocr-vision")
OTHER_VISION = available("idefics3-vision", "qwen3_5-vision", "minimax_m3_vl-vision")
LONG_VISION = available("gemma3-vision", "hy_v4_vl-vision", "mistral_large4-vision", "glm5_next-vision")
SHARING = (f"gemma4_text{SHARED}", f"gemma3n_text{SHARED}")
OTHERS = ("qwen3_next", "olmo_hybrid", "granitemoehybrid", "nemotron_h", "lfm2_moe", "lfm3")
NEW = 12

STRIPED = "layout=striped,circulate=key-value,ulysses_degree=1"


def at_all_worlds(name, ids, worlds=(1, 2, 3), expected=None, **options):
    """Compare generated tokens and logits of these numbers of ranks with those of one process."""
    expected = alone(name, ids, **options) if expected is None else expected
    bound = 2e-6 if name.endswith((SHARED, "-vision")) else 1e-5  # in fp64
    for world in worlds:
        check_equal(over_ranks(name, world, lambda *both: generate(*both, ids, **options)), expected, bound=bound)


def long(*case):
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("name", "count", "rows", "worlds"),
    [
        ("llama", 1, 1, (2,)),
        ("llama", 7, 1, (1, 3)),
        ("llama", 1_000, 1, (3,)),
        ("mistral", 1_000, 1, (2,)),
        ("gemma3", 7, 1, (3,)),
        ("gpt_oss", 1_000, 1, (2,)),
        ("deepseek_v3", 7, 1, (3,)),  # the cache holds the keys and values that are projected from latent vectors
        ("gemma4_text", 150, 1, (3,)),
        ("ministral3", 150, 1, (3,)),
        ("qwen3_5", 1_000, 1, (3,)),
        ("qwen3_5", 7, 1, (2,)),
        ("bamba", 1, 1, (2,)),
        ("kimi_linear", 7, 1, (2,)),
        ("lfm2", 1_000, 1, (2,)),
        long("qwen3", 1_000, 1, (1, 3)),
        long("deepseek_v2", 1_000, 1, (3,)),
        long("bamba", 1_000, 1, (1, 4)),
        long("kimi_linear", 1_000, 1, (3,)),
        *(long(name, 131, 3, (1, 3)) for name in ("bamba", "lfm2")),
        (SHARING[0], 150, 2, (1, 2, 3)),
        (SHARING[1], 150, 1, (3,)),
        *((name, 7, 1, (2,)) for name in SHARING),
        *(long(name, 1_000, 2, (1, 3)) for name in (*SHARING, f"gemma4_unified_text{SHARED}")),
        *(long(name, 150, 2, (3,)) for name in OTHERS),
        *((name, 150, 1, (1, 2)) for name in VISION),
        *(long(name, 150, 2, (3,)) for name in VISION),
        *((name, 80, 1, (2,)) for name in OWN_VISION),
        *(long(name, 150, 2, (1, 2, 3)) for name in (*OWN_VISION, *OTHER_VISION)),
    ],
)
def test_tokens_and_logits_equal_one_process(name, count, rows, worlds):
    at_all_worlds(name, ids_of(count, rows), worlds, max_new_tokens=NEW)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "mistral", *SHARING])
def test_two_hundred_tokens(name):
    """Pages of several ranks are full then, and windows have dropped all of the prompt."""
    at_all_worlds(name, ids_of(100), (3,), max_new_tokens=200)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "qwen3_5", "bamba"])
@pytest.mark.parametrize("count", [1, 1_000, 4_000])
def test_two_hundred_tokens_over_any_number_of_ranks(name, count):
    at_all_worlds(name, ids_of(count), (1, 2, 3, 4), max_new_tokens=200)


def padded(lengths):
    """Return ids and a mask of rows with these many tokens, padded in front."""
    ids = ids_of(max(lengths), len(lengths))
    mask = torch.stack([(torch.arange(max(lengths)) >= max(lengths) - n).long() for n in lengths])
    return ids * mask, mask


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *(("llama", (200, 131, 1)), ("gemma3", (9, 3, 1)), ("gpt_oss", (200, 131, 1)), ("ministral3", (150, 80))),
        *((SHARING[0], (150, 91, 1)), long(SHARING[1], (150, 91, 1))),
    ],
)
def test_a_batch_of_different_lengths(name, lengths):
    ids, mask = padded(lengths)
    expected = rows_alone(name, ids, lengths) if name in SHARING else None
    at_all_worlds(name, ids, (1, 3), expected, attention_mask=mask, max_new_tokens=NEW)


def rows_alone(name, ids, lengths):
    """Generate after each row alone: with padding, eager attention gives NaN where weights are in fp64."""
    outs = [alone(name, row[None, -n:], max_new_tokens=NEW) for row, n in zip(ids, lengths, strict=True)]
    said = torch.cat([ids, torch.cat([out.sequences[:, -NEW:] for out in outs])], 1)
    return SimpleNamespace(
        sequences=said, logits=[torch.cat(each) for each in zip(*(x.logits for x in outs), strict=True)]
    )


@pytest.mark.parametrize("strategy", ["ulysses", STRIPED])
def test_any_strategy_fills_the_cache_and_takes_a_long_turn(strategy):
    """Over a striped cache, all ranks compute a later turn."""
    first, longer = ids_of(150), torch.cat([ids_of(150), ids_of(141)], 1)

    def use(model, cache):
        before = generate(model, cache, first, max_new_tokens=1)
        return before, *tokens_at_once(model, lambda: generate(model, cache, longer, max_new_tokens=NEW))

    outs = over_ranks("gemma3", 2, use, strategy=strategy)
    check_equal([out for out, *_ in outs], alone("gemma3", first, max_new_tokens=1))
    check_equal([out for _, out, _ in outs], alone("gemma3", longer, max_new_tokens=NEW))
    assert all(counts[0] == (64 if strategy == STRIPED else 70) for *_, counts in outs)


SAMPLED = {"do_sample": True, "top_k": 5, "temperature": 1.3, "max_new_tokens": NEW}


def sampled_here(name, seed_of_others=3):
    """Return the sampled tokens of this process's rank, or the text of its error."""
    model = hf.parallelize(copy.deepcopy(model_of(name)), timeout=20)
    torch.manual_seed(3 if dist.get_rank() == 0 else seed_of_others)
    try:
        return generate(model, ShardedCache(model.config, timeout=20), ids_of(80), **SAMPLED).sequences
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", ["llama", "glm_moe_dsa", VISION[0], SHARING[0], *map(long, LONG_VISION)])
def test_a_seed_gives_one_text_over_ranks(pools, name):
    greedy = alone(name, ids_of(80), max_new_tokens=NEW).sequences
    torch.manual_seed(3)
    expected = alone(name, ids_of(80), **SAMPLED).sequences
    assert not torch.equal(expected, greedy)
    assert all(torch.equal(each, expected) for each in pools(2).run(sampled_here, name))


def test_other_seeds_are_refused(pools):
    for text in pools(2).run(sampled_here, "llama", 4):
        assert text.startswith("DisagreementError") and "torch.manual_seed(seed)" in text


def continued(ids):
    """Generate after these ids. The mask says that a pad token among them is a token."""
    return {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}


@pytest.mark.parametrize(
    "name",
    [*("gemma3", VISION[0], SHARING[0]), *map(long, ("qwen3_5", "kimi_linear", SHARING[1], *LONG_VISION))],
)
def test_turns_continue_the_cache(name):
    """The second turn is short, so every rank computes it. The third is long, so it runs on shards."""
    first, second, third = ids_of(90, 2), ids_of(5, 2), ids_of(150, 2)

    def turns(run):
        said = run(first).sequences
        said = run(torch.cat([said, second], 1)).sequences
        return run(torch.cat([said, third], 1))

    expected = turns(lambda ids: alone(name, **continued(ids)))  # without a cache between turns
    check_equal(over_ranks(name, 3, lambda *both: turns(lambda ids: generate(*both, **continued(ids)))), expected)


def tokens_at_once(model, use):
    """Return what ``use()`` returns, and how many tokens the first layer got in each call with more than one."""
    counts, dim = [], 1 + hasattr(text_of(model).config, "altup_num_inputs")  # Gemma 3n's copies are in front
    hook = hf.token_wise(lambda module, args, out: counts.append(args[0].shape[dim]))
    handle = text_of(model).layers[0].register_forward_hook(hook)
    out = use()
    handle.remove()
    return out, [n for n in counts if n > 1]


@pytest.mark.parametrize("name", ["llama", "mistral", SHARING[0], long("gpt_oss"), *map(long, (SHARING[1], *HYBRIDS))])
def test_a_prompt_in_chunks_gives_the_same_tokens(name):
    """500 tokens in 4 equal pieces; a window is shorter than a piece. Mixers get the last 2 tokens together."""
    last = 2 if name in HYBRIDS else 1
    ids = ids_of(500 + last)
    expected = alone(name, ids, max_new_tokens=NEW)

    def use(model, cache):
        cache = ShardedCache(model.config, cache.group, prefill_chunk=130)
        out, counts = tokens_at_once(model, lambda: generate(model, cache, ids, max_new_tokens=NEW))
        return out, counts, [each.tensors() for each in cache.states.values()]

    for world in (3,) if name in HYBRIDS else (1, 3):
        outs, pieces = over_ranks(name, world, use), [125] * 4 + [last * world] * (last > 1)
        check_equal([out for out, *_ in outs], expected)
        assert [sum(counts) for counts in zip(*(counts for _, counts, _ in outs), strict=True)] == pieces
        assert all(max(counts) <= -(-125 // world) for _, counts, _ in outs)
        for _, _, states in outs:
            for mine, first in zip(states, outs[0][2], strict=True):
                assert all(torch.equal(mine[each], x) for each, x in first.items()), "states differ between ranks"


@pytest.mark.parametrize(("first", "count", "keep"), [(0, 100, 40), (0, 70, 64), (90, 130, 10), (90, 20, 0)])
def test_as_many_logits_as_asked_for(first, count, keep):
    """Whether or not the tokens before them run on shards."""
    ids = ids_of(first + count)
    with torch.no_grad():
        expected = model_of("llama", "eager")(ids).logits[:, -(keep or count) :]

    def use(model, cache):
        with torch.no_grad():
            if first:
                model(ids[:, :first], past_key_values=cache, logits_to_keep=1)
            return model(ids[:, first:], past_key_values=cache, logits_to_keep=keep).logits

    for found in over_ranks("llama", 2, use):
        assert found.shape == expected.shape and (found - expected).abs().max() <= 1e-5


def test_a_long_turn_is_sharded_and_sends_the_smaller_side():
    """70 new tokens after 1,500: their queries move, and not the keys of the cache."""
    first, longer = ids_of(1_500), torch.cat([ids_of(1_500), ids_of(71)], 1)

    def use(model, cache):
        generate(model, cache, first, max_new_tokens=1)
        held, before = cache.nbytes(), cache.prefill_sent
        out, counts = tokens_at_once(model, lambda: generate(model, cache, longer, max_new_tokens=NEW))
        return out, counts, held, cache.prefill_sent - before

    outs = over_ranks("llama", 2, use, strategy=Strategy(ulysses_degree=1))  # else the time decides, not the bytes
    check_equal([out for out, *_ in outs], alone("llama", longer, max_new_tokens=NEW))
    for _, counts, held, sent in outs:
        assert counts in ([35], [36]), "71 tokens, the last of which every rank computes"
        assert 0 < sent < held / 4


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.long)])
def test_chunks_of_a_padded_batch(name):
    """A later turn has padding between tokens, so all ranks compute it."""
    ids, mask = padded((300, 131, 1))
    expected = alone(name, ids, attention_mask=mask, max_new_tokens=NEW)
    longer = torch.cat([expected.sequences, ids_of(100, 3)], 1)
    ones = torch.ones(3, longer.shape[1] - mask.shape[1], dtype=mask.dtype)
    right = {"attention_mask": torch.cat([mask, ones], 1), "max_new_tokens": NEW}

    def use(model, cache):
        cache = ShardedCache(model.config, cache.group, prefill_chunk=100)
        out, counts = tokens_at_once(
            model, lambda: generate(model, cache, ids, attention_mask=mask, max_new_tokens=NEW)
        )
        assert len(counts) == 3 and max(counts) <= 50
        return out, generate(model, cache, longer, **right)

    outs = over_ranks(name, 2, use)
    check_equal([out for out, _ in outs], expected)
    check_equal([out for _, out in outs], alone(name, longer, **right))


def test_every_rank_refuses_chunks_that_it_cannot_use():
    def use(model, cache):
        for chunk, text in (
            (63, "prefill_chunk=63 must be at least 64"),
            ("many", "prefill_chunk='many' must be an int"),
            (True, "prefill_chunk=True must be an int"),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                ShardedCache(model.config, cache.group, prefill_chunk=chunk)
        rank = cache.transport.rank
        for chunk, text in (
            (64, "prefill_chunk=64 can't be combined with layout='striped'"),
            (64 + rank, "prefill_chunk: rank 0 has 64, rank 1 has 65"),
            (64 - rank, "prefill_chunk=63 must be at least 64"),  # rank 0 raises it in its next call
        ):
            with pytest.raises(ValueError, match=text):
                own = ShardedCache(model.config, cache.group, prefill_chunk=chunk)
                generate(model, own, ids_of(5))

    over_ranks("llama", 2, use, strategy=STRIPED)


@pytest.mark.long
def test_each_rank_holds_its_share():
    ids = ids_of(1_000)

    def use(model, cache):
        generate(model, cache, ids, max_new_tokens=150)
        return [len(layer.held) for layer in cache.sharded.values()], cache.nbytes(), cache.transport.sent

    (wide, bytes_of, sent), *others = over_ranks("gemma3", 3, use)
    counts = [wide[1], *(held[1] for held, *_ in others)]
    assert sum(counts) == 1_149 and max(counts) - min(counts) <= 65
    assert sum([wide[0], *(held[0] for held, *_ in others)]) <= 6 + 3 * 64 + 64, "a window keeps old tokens"
    of_layer = dealt_bytes(world=3, batch=1, queries=1, q_heads=4, v_head_dim=8, dtype=torch.float32)
    assert {sent, *(each for *_, each in others)} == {2 * 150 * of_layer}, "layers, tokens"
    assert bytes_of > 0


@pytest.mark.parametrize(
    ("name", "holders", "indexes"), [(SHARING[0], {0, 1, 2}, set()), ("mistral_large4-vision", {0, 1, 4}, {0, 1, 3, 5})]
)
def test_layers_that_share_hold_no_copy(name, holders, indexes):
    """One with an indexer holds the indexer's keys alone."""

    def use(model, cache):
        generate(model, cache, ids_of(200), max_new_tokens=1)
        layers = dict(enumerate(cache.layers))
        assert {n for n, layer in layers.items() if layer.keys is not None} == holders
        assert {n for n, layer in layers.items() if getattr(layer, "index", None) is not None} == indexes
        held = [getattr(layers[n], part) for n in holders for part in ("keys", "values")]
        held += [layers[n].index for n in indexes]
        assert cache.nbytes() == cache.figures()[cache.transport.rank]["cache_bytes"] == sum(x.nbytes for x in held)
        counts = [len(layers[n].held) for n in sorted(holders)]
        cache.reset()
        assert cache.nbytes() == 0 and not any(len(layer.held) for layer in cache.sharded.values())
        return counts[-1], generate(model, cache, ids_of(70), max_new_tokens=NEW)

    outs = over_ranks(name, 3, use)
    assert sum(count for count, _ in outs) == 200
    check_equal([out for _, out in outs], alone(name, ids_of(70), max_new_tokens=NEW))


@pytest.mark.parametrize(("name", "number"), [(SHARING[0], 1), (SHARING[1], 4), ("mistral_large4-vision", 2)])
def test_layers_that_share_otherwise_than_the_configuration_says_are_refused(name, number):
    def use(model, cache):
        attention = text_of(model).layers[number].self_attn
        attention.is_kv_shared_layer = not attention.is_kv_shared_layer
        said = said_of(lambda: generate(model, cache, ids_of(80), max_new_tokens=2))
        return said, cache.length, cache.transport.sent, cache.prefill_sent

    for said, *moved in over_ranks(name, 2, use):
        assert f"layers.{number}.self_attn" in said and "not what its configuration says" in said and moved == [0, 0, 0]


def test_a_layer_that_gets_other_keys_than_its_sources_is_refused():
    """A hook hands it copies."""

    def hand_copies(module, args, kwargs):
        shared = kwargs["shared_kv_states"]
        shared["sliding_attention"] = tuple(x.clone() for x in shared["sliding_attention"])

    def use(model, cache):
        text_of(model).layers[3].register_forward_pre_hook(hf.token_wise(hand_copies), with_kwargs=True)
        return said_of(lambda: generate(model, cache, ids_of(9), max_new_tokens=2))

    for said in over_ranks(SHARING[0], 2, use):
        assert said.startswith("layer 3 attends to other keys than those of layer 1")


@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
def test_the_cache_has_both_of_its_names(keyword):
    """In calls of ``generate`` and of the model, with any transformers. Errors name the one that the caller used."""
    ids, other = ids_of(100), {"cache": "past_key_values", "past_key_values": "cache"}[keyword]

    def use(model, cache):
        out = model.generate(ids, **{keyword: cache}, **GREEDY, max_new_tokens=NEW)
        with torch.no_grad():
            model(ids_of(1), **{keyword: cache}, logits_to_keep=1)
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=f"^{keyword} holds 1 rows"):
                call(ids_of(113, 2), **{keyword: cache})
        with pytest.raises(ValueError, match="cache and past_key_values are both"):
            model.generate(ids, **{keyword: cache, other: cache})
        with pytest.raises(ValueError, match=f"^{other}=.* is refused"):
            model(ids, **{keyword: cache, other: DynamicCache()})
        cache.failure = "it"
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=f"^{keyword} failed before"):
                call(ids_of(113), **{keyword: cache})
        return out

    check_equal(over_ranks("llama", 2, use), alone("llama", ids, max_new_tokens=NEW))


REFUSED = {
    "num_beams=3": {"num_beams": 3},
    "assistant_model=LlamaForCausalLM": {"assistant_model": "itself"},
    "prompt_lookup_num_tokens=2": {"prompt_lookup_num_tokens": 2},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "ShardedCache(model.config, prefill_chunk=4)": {"prefill_chunk_size": 4},
    "more than the model's max_position_embeddings=32768": {"inputs": torch.ones(1, 32_769, dtype=torch.int64)},
    "max_new_tokens=32765, after a prompt of 5 tokens, needs more": {"max_new_tokens": 32_765},
    "max_length=40000, after a prompt of 5 tokens, needs more": {"max_new_tokens": None, "max_length": 40_000},
    "max_time=0.5 is refused": {"max_time": 0.5},
    "max_time=0.7 is refused": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(0.7)])},
    "the prompt is empty": {"inputs": torch.ones(1, 0, dtype=torch.int64)},
    "outside of the model's vocabulary": {"inputs": torch.full((1, 3), 64)},
    "zeros behind or between tokens": {"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 5, 32)},
}


def test_every_rank_refuses():
    def use(model, cache):
        said = {}
        for text, asked in REFUSED.items():
            asked = {"max_new_tokens": 2, "inputs": ids_of(5)} | asked
            asked |= {"assistant_model": model} if "assistant_model" in asked else {}
            with pytest.raises(ValueError) as caught:
                generate(model, ShardedCache(model.config, cache.group), **asked)
            said[text] = str(caught.value)
        return said, generate(model, cache, ids_of(5), max_new_tokens=2)

    outs = over_ranks("llama", 2, use)
    for said, _ in outs:
        assert [text for text in REFUSED if text not in said[text]] == []
    check_equal([out for _, out in outs], alone("llama", ids_of(5), max_new_tokens=2))

    def in_chunks(model, cache):
        with pytest.raises(ValueError, match="attention_chunks=2"):
            generate(model, cache, ids_of(5), max_new_tokens=2)

    over_ranks("llama", 2, in_chunks, memory=hf.Memory(attention_chunks=2))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ("prompt", "the digest of input_ids: rank 0 has"),
        ("model", "the cache of another model"),
        ("weights", "the cache of another model"),
        ("batch", "continues the rows"),
    ],
)
def test_another_prompt_or_the_cache_of_another_model_is_refused(other, text):
    def use(model, cache):
        ids = ids_of(9, 2 if other == "batch" else 1)
        if other == "model":
            cache = ShardedCache(model_of("qwen3").config, cache.group)
        elif other == "prompt":
            ids = ids_of(70 + cache.transport.rank)
        else:
            generate(model, cache, ids_of(5), max_new_tokens=2)
        if other == "weights":
            model = copy.deepcopy(model)
            model.lm_head.weight.data += 1
        with pytest.raises(ValueError) as caught:
            generate(model, cache, ids, max_new_tokens=2)
        return str(caught.value)

    assert all(text in said for said in over_ranks("llama", 2, use))


def test_a_cache_that_was_reset_belongs_to_the_weights_that_fill_it_again(tmp_path):
    def use(model, cache):
        other = copy.deepcopy(model)
        generate(other, cache, ids_of(70), max_new_tokens=2)
        other.lm_head.weight.data += 1
        cache.reset()
        generate(other, cache, ids_of(70), max_new_tokens=2)
        cache.save(tmp_path / "cache")
        loaded = [ShardedCache.load(tmp_path / "cache", model.config, cache.group) for _ in range(2)]
        generate(other, loaded[0], ids_of(80), max_new_tokens=2)
        with pytest.raises(ValueError, match="the cache of another model: its weights differ"):
            generate(model, loaded[1], ids_of(80), max_new_tokens=2)
        with pytest.raises(TypeError, match="use save and load"):
            copy.deepcopy(cache)

    over_ranks("llama", 2, use)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *(("gemma3", (150, 90)), (SHARING[0], (150, 150)), long(SHARING[1], (150, 150))),
        *(long(name, (150, 150)) for name in ("bamba", "kimi_linear", "lfm2")),
    ],
)
def test_a_saved_cache_serves_any_number_of_ranks(tmp_path, name, lengths):
    ids, mask = padded(lengths)
    first = alone(name, ids, attention_mask=mask, max_new_tokens=70).sequences
    longer = torch.cat([first, ids_of(100, 2)], 1)
    ones = torch.ones(2, longer.shape[1] - mask.shape[1], dtype=mask.dtype)
    right = {"attention_mask": torch.cat([mask, ones], 1), "max_new_tokens": NEW}
    expected = alone(name, longer, **right)

    def save(model, cache):
        cache = ShardedCache(model.config, cache.group, prefill_chunk=100)
        generate(model, cache, ids, attention_mask=mask, max_new_tokens=70)
        cache.save(tmp_path / "cache")
        generate(model, cache, longer, **right)  # what the cache holds later is not loaded

    def load(model, cache):
        loaded = ShardedCache.load(tmp_path / "cache", model.config, cache.group)
        return generate(model, loaded, longer, **right)

    over_ranks(name, 3, save)
    for world in (1, 4):
        check_equal(over_ranks(name, world, load), expected)


ALTERED = {
    "no cache.json": lambda folder: (folder / "cache.json").unlink(),
    "cache.json was altered": lambda folder: replace(folder / "cache.json", b'"length": 6', b'"length": 5'),
    "cache.json was altered or is cut off": lambda folder: cut(folder / "cache.json"),
    "rank-00001.safetensors has": lambda folder: cut(folder / "rank-00001.safetensors"),
    "rank-00001.safetensors was altered": lambda folder: flip(folder / "rank-00001.safetensors"),
    "rank-00000.safetensors was altered": lambda folder: flip(folder / "rank-00000.safetensors"),
    "rank-00000.safetensors is missing": lambda folder: (folder / "rank-00000.safetensors").unlink(),
}


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def replace(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_altered_folder_is_refused(tmp_path, name):
    folder, saved = tmp_path / "cache", tmp_path / "saved"

    def save(model, cache):
        generate(model, cache, ids_of(66), max_new_tokens=2)
        cache.save(saved)
        with pytest.raises(ValueError, match="not empty"):
            cache.save(saved)

    def load(model, cache):
        with pytest.raises(ValueError) as caught:
            ShardedCache.load(folder, model.config, cache.group)
        return str(caught.value)

    over_ranks(name, 2, save)
    for text, alter in ALTERED.items():
        if name == "llama" or "00000" in text:  # a folder with states
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(saved, folder)
            alter(folder)
            assert all(text in said for said in over_ranks(name, 2, load)), text
    shutil.rmtree(folder)
    shutil.copytree(saved, folder)
    assert all("cache of another model" in said for said in over_ranks("mistral", 2, load))


def dies_while_decoding():
    """Rank 1 ends after 3 tokens; return the other ranks' error and its seconds."""
    model = hf.parallelize(copy.deepcopy(model_of("llama")), timeout=5)
    return error_of_killing_rank_1(model, ShardedCache(model.config, timeout=5))


@pytest.mark.long
def test_a_rank_that_is_killed_is_named_in_time():
    check_that_rank_1_is_named(dies_while_decoding)


def with_sharded_weights(name, by_user, folder):
    """Generate 12 tokens from 100 with sharded weights, save the cache; return the tokens and the shares held."""
    model = hf.parallelize(copy.deepcopy(model_of(name)), timeout=20)
    whole = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if by_user:
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    else:
        shard_weights(model, mesh)
    own = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    cache = ShardedCache(model.config, timeout=20)
    out = generate(model, cache, ids_of(100), max_new_tokens=NEW)
    cache.save(folder)
    layers = [p for p in model.model.layers.parameters() if p.dim() > 1]
    out = SimpleNamespace(sequences=out.sequences, logits=out.logits)  # the cache can't be sent
    return out, own / whole, all(isinstance(p, DTensor) for p in layers)


@pytest.mark.parametrize(("name", "world", "by_user"), [("llama", 2, True), ("gemma3", 2, False)])
def test_sharded_weights_give_the_same_tokens(pools, tmp_path, name, world, by_user):
    """Whole weights then continue the cache."""
    done = pools(world).run(with_sharded_weights, name, by_user, tmp_path / "cache")
    expected = alone(name, ids_of(100), max_new_tokens=NEW)
    check_equal([out for out, *_ in done], expected)
    assert all(share < 1.1 / world and sharded for _, share, sharded in done)

    def load(model, cache):
        loaded = ShardedCache.load(tmp_path / "cache", model.config, cache.group)
        return generate(model, loaded, expected.sequences, max_new_tokens=NEW)

    check_equal(over_ranks(name, 2, load), alone(name, expected.sequences, max_new_tokens=NEW))

    def load_in_another(model, cache):
        model.model.embed_tokens.weight.data += 1
        with pytest.raises(ValueError, match="its weights differ"):
            load(model, cache)

    over_ranks(name, 2, load_in_another)


def test_layers_that_share_weights_are_not_sharded_and_a_model_needs_ranks():
    cache = ShardedCache(model_of("llama").config)
    with pytest.raises(ValueError, match="not parallelized"):
        model_of("llama", "eager").generate(ids_of(3), past_key_values=cache, max_new_tokens=2)
    model = copy.deepcopy(model_of("llama"))
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"layers of LlamaForCausalLM share model\.layers\.1\.mlp\.up_proj"):
        shard_weights(model, None)
    with pytest.raises(ValueError, match="has no decoder layers"):
        shard_weights(torch.nn.Linear(1, 1), None)


class _Costs:
    """A streamer that counts operators and Python calls, from one token to a later one."""

    def __init__(self, first=3, last=8):
        self.first, self.last, self.tokens = first, last, 0
        self.operators = self.calls = 0
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def put(self, value):
        self.tokens += 1
        if self.tokens == self.first:
            self.profiler.start()
            sys.setprofile(self.count)
        elif self.tokens == self.last:
            sys.setprofile(None)
            self.profiler.stop()
            self.operators = sum(each.name.startswith("aten::") for each in self.profiler.events())

    def count(self, frame, event, argument):
        self.calls += event == "call"

    def end(self):
        pass


def test_a_decoding_step_costs_little_more_than_transformers():
    stock, ours = _Costs(), _Costs()
    alone("llama", ids_of(80), "sdpa", max_new_tokens=NEW, streamer=stock)
    over_ranks("llama", 1, lambda *both: generate(*both, ids_of(80), max_new_tokens=NEW, streamer=ours))
    assert 0 < ours.operators <= 1.1 * stock.operators, (ours.operators, stock.operators)
    assert 0 < ours.calls <= 1.35 * stock.calls, (ours.calls, stock.calls)


def test_a_decoding_step_sends_one_message_a_layer_and_one_to_agree(monkeypatch):
    """To each peer, over two ranks."""
    labels = labels_sent(monkeypatch, LocalTransport)

    def use(model, cache):
        generate(model, cache, ids_of(80), max_new_tokens=2)
        return cache.transport.rank

    over_ranks("llama", 2, use)
    for rank in range(2):
        last = [label for of, label in labels if of == rank][-3:]
        assert last == ["the agreement on the model with a cache", *(f"decoding, token 80, layer {n}" for n in (0, 1))]


def said_of(use):
    with pytest.raises(ValueError) as caught:
        use()
    return str(caught.value)


def test_images_are_refused_before_anything_moves():
    """A processor's types of tokens, all of text, are not."""
    name, ids = VISION[0], ids_of(80)
    with_image, types, new = torch.cat([ids, torch.tensor([[IMAGE]])], 1), torch.zeros_like(ids), {"max_new_tokens": 2}
    pixels, images = torch.zeros(1, 3), torch.ones_like(ids)

    def use(model, cache):
        with torch.no_grad():
            said = [
                said_of(lambda: generate(model, cache, ids, pixel_values=pixels, **new)),
                said_of(lambda: model(ids, past_key_values=cache, pixel_values=pixels)),
                said_of(lambda: generate(model, cache, ids, mm_token_type_ids=images, **new)),
                said_of(lambda: generate(model, cache, with_image, **new)),
                said_of(lambda: model(with_image, past_key_values=cache)),
            ]
            padding = (torch.arange(80) > 2).long()[None]
            assert "padding in front" in said_of(lambda: generate(model, cache, ids, attention_mask=padding, **new))
            assert "can't be sharded" in said_of(lambda: shard_weights(model, None))
        assert not cache.length and not cache.transport.sent and not cache.prefill_sent
        return said, generate(model, cache, ids, mm_token_type_ids=types, **new)

    outs = over_ranks(name, 2, use)
    named = ("pixel_values=", "pixel_values=", "mm_token_type_ids=", f"input_ids holds {IMAGE}", f"holds {IMAGE}, the")
    for said, _ in outs:
        assert all(what in each for what, each in zip(named, said, strict=True)), said
        assert all("images in the prompt have no cache over ranks" in each for each in said)
    check_equal([out for _, out in outs], alone(name, ids, **new))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4-vision", "with text alone it changes embeddings"),
        ("paligemma-vision", "with text alone it raises ValueError: attention_mask: groups of tokens"),
        long("llama4-vision", "has a custom attention or counts positions"),
    ],
)
def test_models_that_do_more_with_text_than_to_embed_it_are_refused(name, text):
    def use(model, cache):
        said = said_of(lambda: generate(model, cache, ids_of(80), max_new_tokens=2))
        return said, cache.length, cache.prefill_sent

    for said, *moved in over_ranks(name, 2, use):
        assert text in said and "no cache over ranks" in said and moved == [0, 0]


def test_the_language_model_of_a_gemma_4_checkpoint_takes_a_cache(tmp_path):
    """As docs/how-to/generate.md loads it. Against the whole model in one process."""
    ids, names = ids_of(150), {r"^model\.language_model\.": "model."}
    model_of("gemma4-vision").save_pretrained(tmp_path)

    def load(name, implementation):
        options = {"dtype": torch.float64, "attn_implementation": implementation}
        model, info = Gemma4ForCausalLM.from_pretrained(
            tmp_path, key_mapping=names, output_loading_info=True, **options
        )
        assert not info["missing_keys"] and all("vision" in key for key in info["unexpected_keys"])
        return model.eval()

    outs = over_ranks("gemma4", 2, lambda *both: generate(*both, ids, max_new_tokens=NEW), make=load)
    check_equal(outs, alone("gemma4-vision", ids, max_new_tokens=NEW), bound=2e-6)


def test_other_conversations_with_one_model_change_no_positions():
    """transformers adds to a turn's positions what the call before left in the model: another batch's, or images'."""
    first, second = ids_of(80, 2), ids_of(90, 3)

    def use(model, cache):
        out = generate(model, cache, first, max_new_tokens=2).sequences
        generate(model, ShardedCache(model.config, cache.group), second, max_new_tokens=2)
        said = torch.cat([out, ids_of(5, 2)], 1)
        model.model.rope_deltas = left = torch.full((3, 1), -7)  # as images do
        whole = generate(model, cache, **continued(said))
        assert model.model.rope_deltas is left
        return said, whole

    for said, whole in over_ranks(VISION[0], 2, use):
        check_equal([whole], alone(VISION[0], **continued(said)))


def with_adapter_of_embeddings(name, implementation="burst"):
    model = copy.deepcopy(model_of(name, implementation))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False), model)
    for own, x in model.named_parameters():
        if "lora" in own:
            torch.nn.init.normal_(x, std=0.3, generator=torch.Generator().manual_seed(len(own)))
    return model.double().eval()


def test_an_adapter_of_a_vision_language_models_embeddings():
    expected = with_adapter_of_embeddings(VISION[0], "eager").generate(ids_of(80), **GREEDY | {"max_new_tokens": NEW})
    outs = over_ranks(
        VISION[0],
        2,
        lambda model, cache: generate(model, cache, ids_of(80), max_new_tokens=NEW),
        make=with_adapter_of_embeddings,
    )
    check_equal(outs, expected)
    assert not torch.equal(expected.sequences, alone(VISION[0], ids_of(80), max_new_tokens=NEW).sequences)


def of_the_middle(model, attached):
    """Attach something to the module around a language model."""
    around, hook = model.model, hf.token_wise(lambda *_: None)
    if attached == "forward":
        around.forward = functools.partial(type(around).forward, around)
        return functools.partial(delattr, around, "forward")
    before = attached == "hook before"
    return (around.register_forward_pre_hook if before else around.register_forward_hook)(hook).remove


@pytest.mark.parametrize("attached", ["forward", "hook", "hook before"])
def test_what_is_attached_around_a_language_model_is_refused(attached):
    """The cache would leave it out."""

    def use(model, cache):
        remove = of_the_middle(model, attached)
        said = said_of(lambda: generate(model, cache, ids_of(80), max_new_tokens=2))
        remove()
        assert not cache.length and not cache.prefill_sent
        return said, generate(model, cache, ids_of(80), max_new_tokens=2)

    outs = over_ranks(VISION[0], 2, use)
    assert all("model (" in said and "a cache over ranks would leave out; remove it" in said for said, _ in outs)
    check_equal([out for _, out in outs], alone(VISION[0], ids_of(80), max_new_tokens=2))


CHANGES = {
    "in place": lambda weight: weight.mul_(1.5),
    "by .data": lambda weight: weight.data.mul_(1.5),
    "one value": lambda weight: weight[3, 3].add_(1),
}


@pytest.mark.parametrize("how", CHANGES)
def test_weights_changed_between_turns_are_refused(how):
    """On every rank, though one rank alone changes them."""

    def use(model, cache):
        generate(model, cache, ids_of(80), max_new_tokens=2)
        if cache.transport.rank == 1:
            with torch.no_grad():
                CHANGES[how](model.model.layers[0].mlp.up_proj.weight)
        longer = torch.cat([ids_of(80), ids_of(5)], 1)
        with pytest.raises(ValueError, match="up_proj"):
            generate(model, cache, longer, max_new_tokens=2)
        cache.reset()
        if cache.transport.rank == 0:
            with torch.no_grad():
                CHANGES[how](model.model.layers[0].mlp.up_proj.weight)
        return generate(model, cache, longer, max_new_tokens=2).sequences

    first, second = over_ranks("llama", 2, use)
    assert torch.equal(first, second)
