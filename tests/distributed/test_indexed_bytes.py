"""Bytes of models whose indexers choose keys: those predicted are those that processes send and receive."""

from itertools import pairwise

import pytest
import torch

from burst_attention.attention import chosen_bytes
from burst_attention.integrations import hf
from burst_attention.integrations.hf.reading.models import attentions_of
from tests.support.hybrid_models import tokens
from tests.support.indexed_models import FAMILIES, HEADS, make_indexed

BATCH, DOCUMENTS = 2, {"one document": None, "packed": (0, 3, 20, 21, 61)}
EVERYDAY = ("deepseek_v32", "deepseek_v32" + HEADS, "glm_moe_dsa", "minimax_m3_vl", "dots3_note")
FAMILIES_OF_TEST = [
    pytest.param(x, marks=() if x in EVERYDAY else pytest.mark.long) for x in (*FAMILIES, "deepseek_v32" + HEADS)
]


def heads_of(module):
    """The sizes of an attention to all keys: of latents (MLA) those of its heads, else of its projections."""
    if hasattr(module, "kv_b_proj"):
        sizes = {"kv_heads": module.num_heads, "head_dim": module.qk_head_dim, "v_head_dim": module.v_head_dim}
        return sizes | {"q_heads": module.num_heads}
    heads = {"q_heads": module.q_proj, "kv_heads": module.k_proj}
    return {name: x.out_features // module.head_dim for name, x in heads.items()} | {"head_dim": module.head_dim}


def predicted(model, plans, dtype, chunks):
    """(sent, received) by the plans of all layers."""
    layers = zip(hf.attention_windows(model), hf.indexed_layers(model), attentions_of(model), strict=True)
    found = []
    for window, call, module in layers:
        how = {"batch": BATCH, "dtype": dtype, "attention_chunks": chunks}
        plan = plans[window]
        found.append(chosen_bytes(plan, call, **how) if call else plan.bytes(**heads_of(module), **how))
    return sum(x.sent for x in found), sum(x.received for x in found)


def counted(family, dtype, layout, borders, chunks=1):
    """Run on a rank: what the layers of a step send and receive, as predicted and as counted."""
    model, memory = make_indexed(family, stock=True).to(dtype), hf.Memory(attention_chunks=chunks)
    hf.parallelize(model, strategy=f"layout={layout}", memory=memory)
    ids, seqlen = tokens(61), 61
    batch = {"input_ids": ids}
    if borders is not None:
        batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in pairwise(borders)])
        batch["position_ids"] = batch["position_ids"].expand(BATCH, -1)
    plans = hf.plans_of(model, seqlen, borders)
    transport = plans[hf.attention_windows(model)[0]].transport
    before = transport.sent, transport.received
    with hf.shards(model, batch) as shard:
        model.model(**shard)[0].float().sum().backward()
    after = transport.sent, transport.received
    return predicted(model, plans, dtype, chunks), tuple(a - b for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("family", FAMILIES_OF_TEST)
@pytest.mark.parametrize(
    ("world", "layout", "dtype"),
    [
        (1, "zigzag", torch.float32),
        (2, "contiguous", torch.bfloat16),
        (3, "zigzag", torch.float32),
        (4, "zigzag", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_bytes_are_those_predicted(pools, family, world, layout, dtype, documents):
    if documents == "packed" and family == "minimax_m3_vl":
        pytest.skip("it counts blocks from the start of a row")
    found = pools(world).run(counted, family, dtype, layout, DOCUMENTS[documents])
    for ours, theirs in found:
        assert ours == theirs
    assert any(sent for (sent, _), _ in found) == (world > 1)


@pytest.mark.parametrize(
    ("family", "chunks"),
    [("deepseek_v32", 2), ("deepseek_v32" + HEADS, 4), ("minimax_m3_vl", 2), ("minimax_m3_vl", 4), ("dots3_note", 2)],
)
def test_each_chunk_of_heads_sends_its_keys(pools, family, chunks):
    for ours, theirs in pools(2).run(counted, family, torch.bfloat16, "zigzag", None, chunks):
        assert ours == theirs and ours[0] > 0


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "minimax_m3_vl"])
def test_choices_that_layers_keep_for_their_backward(family):
    """Those of "shared" layers are the same tensors."""
    model, kept = hf.parallelize(make_indexed(family, stock=True).float()), {}
    calls = [each for each in hf.indexed_layers(model) if each]

    def note(x):
        if not x.is_floating_point() and x.shape[-1] == calls[0].count:
            kept[x.untyped_storage().data_ptr()] = x.nbytes, x
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda x: x),
        hf.shards(model, {"input_ids": tokens(61)}) as shard,
    ):
        model.model(**shard)
    expected = sum(each.choice_bytes for each in calls if each.chooses)
    assert sum(size for size, _ in kept.values()) == BATCH * 61 * expected
