"""The cache over ranks: its layers, and what it refuses."""

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from burst_attention.inference import ShardedCache
from burst_attention.inference.layer import Filling, IndexedLayer, ShardedLayer, StateLayer
from burst_attention.inference.slots import Held
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
