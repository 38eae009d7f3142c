"""The cache over ranks: its layers, what it refuses, and what transformers' ``generate`` must keep."""

import copy
import functools

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import CONFIG_MAPPING, DynamicCache, GenerationConfig, PreTrainedTokenizerFast
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from burst_attention.inference import ShardedCache, greedy
from burst_attention.inference.greedy import takes_argmax
from burst_attention.inference.layer import Filling, IndexedLayer, ShardedLayer, StateLayer
from burst_attention.inference.slots import Held
from burst_attention.integrations import hf
from burst_attention.integrations.hf.call.generate import named, settings_of
from burst_attention.integrations.hf.reading import known
from tests.support.generating import ids_of, model_of


def test_slots_with_a_stride_are_stretches_too():
    """A page's last slot and the next page's first one make a range with a stride."""
    held = Held([range(64), range(64, 66), range(127, 193, 65), range(193, 200)])
    assert held.stretches() == [(0, 66), (127, 128), (192, 193), (193, 200)]


def test_mamba_1_forgets_its_state_before_several_later_tokens():
    """So no cache over ranks takes it. If this fails, the refusal can go."""
    model, cache, ids = model_of("jamba", "sdpa"), DynamicCache(config=model_of("jamba").config), ids_of(12)
    with torch.no_grad():
        parts = [model(ids[:, part], **{known.CACHE: cache}).logits for part in (slice(5), slice(5, 12))]
        assert (torch.cat(parts, 1) - model(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [LinearAttentionLayer, StateLayer])
def test_a_layer_keeps_the_last_inputs_and_the_state(kind):
    layer, x = kind(), torch.arange(1.0, 7.0)[None, None]
    assert torch.equal(layer.update_conv_state(x[..., :2], conv_kernel_size=4), torch.tensor([[[0.0, 0, 1, 2]]]))
    assert layer.has_previous_state[0]
    assert torch.equal(layer.update_conv_state(x[..., 2:4], conv_kernel_size=4), torch.tensor([[[0.0, 0, 1, 2, 3, 4]]]))
    assert torch.equal(layer.conv_states[0], x[..., :4])
    state = torch.ones(1, 2, 3)
    layer.update_recurrent_state(state)
    state += 1
    assert torch.equal(layer.recurrent_states[0], torch.ones(1, 2, 3)), "a copy"


TYPES = ["sliding_attention", "full_attention"] * 2
LATENTS = {"num_hidden_layers": 4, "kv_source_layers": [0, 0, 2, 2], "no_rope_layers": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("kind", "settings", "refused"),
    [
        ("gemma3n_text", {"num_hidden_layers": 4, "layer_types": TYPES, "num_kv_shared_layers": 2}, None),
        (
            "gemma4_text",
            {"num_hidden_layers": 4, "layer_types": TYPES, "num_kv_shared_layers": 3},
            "layer 1 .* stores any",
        ),
        (
            "gemma4_text",
            {"num_hidden_layers": 4, "layer_types": TYPES, "num_kv_shared_layers": 4},
            "layer 0 .* stores any",
        ),
        ("gemma3_text", {"num_kv_shared_layers": 2}, "where those of 'gemma3_text' get them is unknown"),
        ("llama", {"kv_sharing_modes": ["store", "reuse"]}, "where those of 'llama' get them is unknown"),
        ("mistral_large4_text", LATENTS, None),
        (
            "mistral_large4_text",
            LATENTS | {"kv_source_layers": [0, 1, 0, 1]},
            "layer 2 .* of layer 0, .* those of layer 1",
        ),
        ("mistral_large4_text", LATENTS | {"no_rope_layers": [1, 0, 1, 1]}, "layer 1 .* stores any"),
    ],
)
def test_where_layers_get_the_keys_of_others(kind, settings, refused):
    if kind not in CONFIG_MAPPING:
        pytest.skip("of a later transformers")
    config = CONFIG_MAPPING[kind](**settings)
    if refused is None:
        cache, sources = ShardedCache(config), {2: 0, 3: 1} if kind == "gemma3n_text" else {1: 0, 3: 2}
        assert cache.sources == sources
        assert all(cache.model["layers see"][n] == f"the keys of layer {source}" for n, source in sources.items())
        return
    with pytest.raises(ValueError, match=refused):
        ShardedCache(config)


def test_a_hybrid_cache_asks_its_attention_for_the_length():
    cache = ShardedCache(model_of("qwen3_5").config)
    assert cache.is_linear == [True, False, True] and cache.is_sliding == [False] * 3
    assert not cache.is_compileable and cache.is_initialized is False
    cache.sharded[1].length = 9
    assert cache.get_seq_length() == 9 and cache.get_mask_sizes(2, 0) == (11, 0)
    assert cache.get_conv_state(0) is None and cache.get_recurrent_state(2) is None


@pytest.mark.parametrize("model", ["llama", "qwen3_5"])
@pytest.mark.parametrize(("name", "refused"), [("reorder_cache", "num_beams"), ("crop", "rolled back")])
def test_what_other_modes_call_raises(name, refused, model):
    cache = ShardedCache(model_of(model).config)
    with pytest.raises(ValueError, match=refused):
        getattr(cache, name)(torch.zeros(1, dtype=torch.int64) if name == "reorder_cache" else -1)


def test_an_indexed_layer_holds_the_indexers_keys_of_its_tokens():
    layer, index = IndexedLayer(), torch.arange(70.0).view(1, 70, 1)
    with pytest.raises(ValueError, match="not parallelized"):
        layer.update_indexer(index)
    for first, stop, own in ((0, 3, [range(3)]), (3, 66, [range(3, 64)]), (66, 70, [])):  # slots of the first page
        new = torch.ones(1, 2, stop - first, 4)
        layer.filling = Filling(None, own, first, stop)
        layer.append(new, new, own, first)
        assert torch.equal(layer.update_indexer(index[:, first:stop]), index[:, : min(stop, 64)])
    assert layer.nbytes() == sum(x.nbytes for x in (layer.keys, layer.values, layer.index))
    layer.move(torch.device("meta"))
    assert layer.index.device.type == layer.keys.device.type == "meta"
    layer.reset()
    assert layer.nbytes() == 0 and layer.index is None and layer.filling is None


def test_layers_move_to_the_models_device() -> None:
    """Files are read to the CPU, whatever the model is on; the device "meta" stands for a GPU."""
    keys, state = ShardedLayer(), StateLayer()
    for layer in (keys, state):
        layer.move(torch.device("cpu"))  # without tokens
    keys.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), [range(3)], 0)
    state.update_conv_state(torch.ones(1, 5, 4), conv_kernel_size=4)
    state.update_recurrent_state(torch.ones(1, 2, 3))
    for layer, found in ((keys, keys.tokens), (state, lambda: state.tensors().values())):
        layer.move(torch.device("meta"))
        assert layer.device.type == "meta" and {x.device.type for x in found()} == {"meta"}


def takes(model, *args, **options):
    """Return whether greedy search needs no logits, as ``generate`` of a parallelized model asks."""
    values = named((ids_of(3), *args), options)
    return takes_argmax(model, settings_of(model, values)[0], values)


@pytest.fixture
def parallel():
    return hf.parallelize(copy.deepcopy(model_of("llama")))


UNUSUAL = {
    "max_length": 50,
    "max_new_tokens": 5,
    "eos_token_id": [3, 4],
    "pad_token_id": 5,
    "bos_token_id": 6,
    "stop_strings": "x",
    "temperature": 0.3,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.2,
    "top_h": 0.4,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "return_dict_in_generate": True,
}


def tokenizer():
    """Return a tokenizer whose tokens are bytes; stop strings need one."""
    tokens = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    tokens.pre_tokenizer, tokens.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens)


def test_harmless_settings_make_nothing_that_gets_logits(parallel):
    """If this fails on a new release, greedy search needs logits in one more case."""
    assert UNUSUAL.keys() | {"transformers_version"} == greedy.HARMLESS
    assert takes(parallel)
    for name, value in UNUSUAL.items():
        assert takes(parallel, **{name: value}), name
        settings = settings_of(parallel, {name: value})[0]
        parallel._prepare_special_tokens(settings, False, device=torch.device("cpu"))
        assert not parallel._get_logits_processor(settings, input_ids_seq_length=3, device="cpu"), name
        stops = parallel._get_stopping_criteria(settings, StoppingCriteriaList(), tokenizer=tokenizer())
        assert {type(each) for each in stops} <= {MaxLengthCriteria, EosTokenCriteria, StopStringCriteria}, name


def test_any_other_setting_needs_logits(parallel):
    """A setting of a later release, too."""
    others = [name for name in vars(GenerationConfig()) if name[0] != "_" and name not in greedy.HARMLESS]
    assert len(others) > 30 and greedy.NEUTRAL.keys() <= {*others}
    for name in [*others, "of a later release"]:
        settings = settings_of(parallel, {})[0]
        assert takes_argmax(parallel, settings, {})
        setattr(settings, name, 7)
        assert not takes_argmax(parallel, settings, {}), name


def test_who_gets_logits_by_an_argument_or_a_hook(parallel, monkeypatch):
    stop = MaxLengthCriteria(9)
    for options in ({"logits_processor": [lambda ids, scores: scores]}, {"stopping_criteria": [stop]}, {"other": 1}):
        assert not takes(parallel, **options)
    assert not takes(parallel, None, [lambda ids, scores: scores]), "by position"
    assert takes(parallel, logits_processor=[], stopping_criteria=None, cache=7, attention_mask=ids_of(3), streamer=7)
    assert not takes(parallel, logits_to_keep=1), "the caller may want them"
    hook = parallel.register_forward_hook(lambda *_: None)
    assert not takes(parallel)
    hook.remove()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not takes(parallel)
    hook.remove()
    parallel.forward = parallel.forward
    assert not takes(parallel)
    del parallel.forward
    parallel._sample = parallel._sample
    assert not takes(parallel)
    del parallel._sample
    monkeypatch.setattr(parallel.stock_class, "_sample", lambda *_, **__: None, raising=False)
    assert not takes(parallel), "of a class"
    monkeypatch.undo()
    assert takes(parallel)


def test_a_search_takes_the_token_that_alone_is_possible(monkeypatch):
    """``generate`` in one process, from logits that are -inf but at the argmax."""
    model, ids = copy.deepcopy(model_of("llama", "eager")), ids_of(9, 2)
    options = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "eos_token_id": None}
    expected, stock = model.generate(ids, **options).sequences, type(model).forward
    seen = []

    def forward(self, *args, **kwargs):
        out = stock(self, *args, **kwargs)
        seen.append(type(kwargs["logits_to_keep"]))
        out.logits = greedy.only(out.logits.argmax(-1), out.logits.shape[-1], out.logits.dtype)
        assert out.logits.exp().sum(-1).eq(1).all()
        return out

    monkeypatch.setattr(type(model), "forward", functools.wraps(stock)(forward))
    found = model.generate(ids, logits_to_keep=greedy.NextToken(1), **options).sequences
    assert torch.equal(found, expected) and seen == 6 * [greedy.NextToken]
