"""What the cache over ranks relies on in transformers. If an upgrade changes it, these tests name it."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from burst_attention.inference import ShardedCache
from burst_attention.inference.layer import ShardedLayer, StateLayer
from burst_attention.inference.slots import Held
from tests.support.generating import ids_of, model_of
from tests.support.hf_models import make_model


def test_slots_with_a_stride_are_stretches_too():
    """A page's last slot and the next page's first one make a range with a stride."""
    held = Held([range(64), range(64, 66), range(127, 193, 65), range(193, 200)])
    assert held.stretches() == [(0, 66), (127, 128), (192, 193), (193, 200)]


class Recorder(Cache):
    """Notes the calls of ``update``; keeps everything, as transformers' own cache does."""

    def __init__(self, layers):
        super().__init__(layers=[_Layer() for _ in range(layers)])
        self.updates, self.asked = [], []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.updates.append((layer_idx, key_states.shape[2]))
        return super().update(key_states, value_states, layer_idx)

    def get_mask_sizes(self, query_length, layer_idx):
        self.asked.append("get_mask_sizes")
        return super().get_mask_sizes(query_length, layer_idx)

    def get_query_offset(self, layer_idx=0):
        self.asked.append("get_query_offset")
        return super().get_query_offset(layer_idx)


class _Layer(CacheLayerMixin):
    is_sliding = False

    def lazy_initialization(self, key_states, value_states):
        self.keys, self.values, self.is_initialized = key_states, value_states, True

    def update(self, key_states, value_states, *args, **kwargs):
        if self.is_initialized:
            key_states, value_states = (torch.cat(x, 2) for x in ((self.keys, key_states), (self.values, value_states)))
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length):
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self):
        return self.keys.shape[2] if self.is_initialized else 0

    def get_max_length(self):
        return -1


def recorded(model, cache, ids, count):
    """Return the arguments of each forward of ``generate``."""
    calls, own = [], model.forward

    def forward(*args, **kwargs):
        assert not args
        calls.append({name: x for name, x in kwargs.items() if x is not None})
        return own(**kwargs)

    forward.__signature__ = inspect.signature(own)
    model.forward = forward
    out = model.generate(ids, past_key_values=cache, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return calls, out


def test_generate_passes_a_cache_and_only_the_tokens_behind_it():
    model = make_model("llama", "sdpa", torch.float32).eval()
    cache, ids = Recorder(2), torch.arange(1, 6)[None]
    calls, out = recorded(model, cache, ids, 3)
    assert [call["input_ids"].shape[1] for call in calls] == [5, 1, 1]
    assert all(call["past_key_values"] is cache and call["logits_to_keep"] == 1 for call in calls)
    assert cache.updates == [(0, 5), (1, 5), (0, 1), (1, 1), (0, 1), (1, 1)]
    assert {"get_mask_sizes", "get_query_offset"} <= {*cache.asked}
    assert torch.equal(out, make_model("llama", "sdpa", torch.float32).eval().generate(ids, max_new_tokens=3))
    again, _ = recorded(model, cache, torch.cat([out, ids], 1), 1)
    assert again[0]["input_ids"].shape[1] == 6, "the last token of the turn before, and 5 new ones"
    assert again[0]["position_ids"].tolist() == [[*range(7, 13)]]


def test_an_attention_gets_what_update_returned():
    class Doubled(Recorder):
        def update(self, *args):
            key, value = super().update(*args)
            return key, value * 2

    ids = torch.arange(1, 6)[None]
    model = make_model("llama", "sdpa", torch.float32).eval()
    plain, doubled = (model(ids, past_key_values=cache).logits for cache in (Recorder(2), Doubled(2)))
    assert not torch.allclose(plain, doubled)


def test_the_methods_that_we_override_exist():
    for ours, theirs in ((ShardedCache, Cache), (ShardedLayer, CacheLayerMixin)):
        for name in ("update", "reset", "reorder_cache", "get_seq_length", "get_mask_sizes"):
            assert hasattr(theirs, name) and hasattr(ours, name), (theirs, name)
    assert not inspect.isabstract(ShardedLayer)
    for name in ("get_mask_sizes", "get_seq_length", "get_max_length", "lazy_initialization", "update"):
        assert getattr(ShardedLayer, name) is not getattr(CacheLayerMixin, name)
    for name in ("_prepare_generation_config", "_sample", "_prefill"):
        assert hasattr(GenerationMixin, name), name
    source = inspect.getsource(GenerationMixin._prefill)
    assert "get_seq_length()" in source and "outputs.logits[:, -1]" in inspect.getsource(GenerationMixin._sample)


class Noting(DynamicCache):
    """transformers' own cache, which notes how recurrent layers use it."""

    def __init__(self, config):
        super().__init__(config=config)
        self.noted = []

    def get_conv_state(self, layer_idx, state_idx=0):
        self.noted.append("get_conv_state")
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx, state_idx=0):
        self.noted.append("get_recurrent_state")
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, **kwargs):
        self.noted.append(("update_conv_state", conv_states.shape[2], *kwargs.values()))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):
        self.noted.append("update_recurrent_state")
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2"])
def test_a_recurrent_layer_uses_these_methods_of_its_cache(name):
    model, cache = model_of(name, "sdpa"), Noting(model_of(name).config)
    width = 3 if name == "lfm2" else 4
    states = {"get_recurrent_state", "update_recurrent_state"} if name != "lfm2" else set()

    def noted(ids):
        cache.noted = []
        model(ids, past_key_values=cache)
        return {*cache.noted}

    with torch.no_grad():
        assert noted(ids_of(5)) == {"get_conv_state", ("update_conv_state", 5, width), *states}
        before = cache.get_conv_state(0).clone()
        assert noted(ids_of(1)) - states == {"get_conv_state"}, "one later token: written to in place"
        assert torch.equal(cache.get_conv_state(0)[..., :-1], before[..., 1:])
        assert noted(ids_of(7)) == {"get_conv_state", ("update_conv_state", 7, width), *states}
        ids, again = torch.cat([ids_of(5), ids_of(1), ids_of(7)], 1), Noting(model.config)
        whole, places = model(ids).logits, torch.arange(13)[None].split((5, 1, 7), 1)
        parts = [model(ids[:, at[0]], position_ids=at, past_key_values=again).logits for at in places]
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-5, "several later tokens continue the state"


def test_mamba_1_forgets_its_state_before_several_later_tokens():
    """So no cache over ranks takes it. If this fails, the refusal can go."""
    model, cache, ids = model_of("jamba", "sdpa"), Noting(model_of("jamba").config), ids_of(12)
    with torch.no_grad():
        parts = [model(ids[:, part], past_key_values=cache).logits for part in (slice(5), slice(5, 12))]
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
