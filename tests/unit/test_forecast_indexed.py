"""Predictions for models whose indexers choose keys: bytes of the plan, seconds that grow as work does, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from burst_attention import Mask, Strategy
from burst_attention.attention.hardware import shape_of
from burst_attention.integrations import hf
from burst_attention.integrations.hf import parallel
from burst_attention.plan.indexed import Indexed
from burst_attention.plan.layout import Layout
from burst_attention.plan.strategy import for_chosen_keys
from burst_attention.planner.indexed import ChosenPass, indexed_passes
from burst_attention.planner.planner import Planner
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import ChosenKernels, Rates
from burst_attention.planner.timing import Wire
from burst_attention.planner.traffic import TrafficModel
from burst_train.cli import plan
from burst_train.forecast.attention import AttentionStrategy, Workload, chosen, predict_call
from burst_train.forecast.forecast import forecasts, predicted_step
from burst_train.forecast.models import Model
from burst_train.forecast.request import Cluster, Device, ForecastRequest
from burst_train.memory import Saving
from tests.support.indexed_models import make_indexed

CPU = preset("cpu")
SHAPE = shape_of(torch.bfloat16, batch=2, q_heads=8, kv_heads=8, head_dim=24, v_head_dim=16)
LATENTS = Indexed(q_heads=8, kv_heads=1, head_dim=20, v_head_dim=16, inside=True, count=32, index_heads=4, index_dim=8)
HEADS = replace(LATENTS, kv_heads=8, head_dim=24, inside=False)
CALLS = {
    "latents": LATENTS,
    "heads": HEADS,
    "shared": replace(LATENTS, index_heads=0),
    "wide keys": replace(LATENTS, wide=True),
    "blocks": replace(HEADS, kv_heads=2, block=8),
}
WAYS = {
    "zigzag": AttentionStrategy(layout="zigzag", circulate="key-value"),
    "contiguous": AttentionStrategy(layout="contiguous", circulate="key-value"),
    "ring": AttentionStrategy(layout="zigzag", circulate="key-value", route="ring-attention"),
    "nodes": AttentionStrategy(layout="zigzag", circulate="key-value", route="nodes"),
}
MASKS = {"causal": Mask(), "packed": Mask(cu_seqlens=(0, 300, 517, 1000))}


def setting(call, mask=MASKS["causal"], *, tokens=1000, world=4, **changes):
    sizes = {"seq_len": tokens, "mask": mask, "world": world, "per_node": 2, "shape": SHAPE, "rates": CPU}
    return Workload(**sizes | {"indexed": call} | changes)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_bytes_are_those_of_the_plan(call, way, mask):
    asked = setting(call, mask)
    found = predict_call(way, asked)
    traffic = [asked.schedule(way.strategy, rank).indexed_traffic(call, SHAPE) for rank in range(4)]
    for one, name in ((found.forward, "forward_sent"), (found.backward, "backward_sent")):
        assert one.mean_inside + one.mean_across == sum(getattr(each, name) for each in traffic) / 4 > 0


def seconds(call, **changes):
    found = predict_call(WAYS["zigzag"], setting(call, rates=without_overhead(), **changes))
    return found.forward.computing, found.backward.computing


def without_overhead():
    """The preset without what does not grow with a call."""
    none = {"launch_forward": 0.0, "launch_backward": 0.0, "visit": 0.0, "call": 0.0, "fold": 1e30}
    return replace(CPU, overhead=replace(CPU.overhead, **none))


def test_the_choice_grows_with_the_square_of_the_tokens_and_attention_with_tokens_and_chosen_keys():
    tokens = 1 << 15
    shared = replace(LATENTS, index_heads=0, count=512)
    one, twice = (seconds(shared, tokens=n) for n in (tokens, 2 * tokens))
    assert [b / a for a, b in zip(one, twice, strict=True)] == pytest.approx([2, 2], rel=0.05)
    more = seconds(replace(shared, count=1024), tokens=2 * tokens)
    assert [b / a for a, b in zip(twice, more, strict=True)] == pytest.approx([2, 2], rel=0.05)
    few = replace(LATENTS, count=8), replace(shared, count=8)
    choice = [seconds(few[0], tokens=n)[0] - seconds(few[1], tokens=n)[0] for n in (tokens, 2 * tokens)]
    assert choice[1] / choice[0] == pytest.approx(4, rel=0.05)
    heads = seconds(replace(LATENTS, count=512, index_heads=64, index_dim=128), tokens=tokens)[0]
    assert heads > 5 * seconds(replace(LATENTS, count=512), tokens=tokens)[0]


def test_a_visit_is_as_wide_as_its_fullest_query_needs():
    layout = Layout("contiguous", 400, 4)
    traffic = TrafficModel(layout, Mask().regions(400))
    call = replace(LATENTS, count=40)
    (forward,) = [
        each
        for each in indexed_passes(traffic, call, SHAPE, Wire(CPU, np.zeros(4, np.int64)))
        if isinstance(each, ChosenPass) and each.direction.value == "forward"
    ]
    widths = {(i, j): w for i, j, w in zip(traffic.pairs.i, traffic.pairs.j, forward._width, strict=True)}
    assert widths[0, 0] == widths[1, 0] == 40  # query 100 sees one key of its own rank
    half = 20 + 3 * (40 * 0.5 * 0.5) ** 0.5
    assert widths[1, 1] == pytest.approx(half)  # of the last query, which sees as many keys elsewhere
    assert 10 < widths[3, 0] < widths[2, 0] < 40


def test_widths_cover_choices_that_are_spread_evenly():
    """The fullest of all queries has about as many as three standard deviations say."""
    tokens, count = 512, 32
    traffic = TrafficModel(Layout("zigzag", tokens, 2), Mask().regions(tokens))
    *_, forward, _ = indexed_passes(traffic, replace(LATENTS, count=count), SHAPE, Wire(CPU, np.zeros(2, np.int64)))
    draws, owner = np.random.default_rng(0), np.zeros(tokens, np.int64)
    for rank in range(2):
        owner[traffic.layout.positions(rank)] = rank
    most = np.zeros((2, 2))
    for t in range(tokens):
        keys = draws.permutation(t + 1)[:count]
        here = np.bincount(owner[keys], minlength=2)
        most[owner[t]] = np.maximum(most[owner[t]], here)
    for i, j, width in zip(traffic.pairs.i, traffic.pairs.j, forward._width, strict=True):
        assert width == pytest.approx(most[i, j], rel=0.2)


def test_rates_without_these_kernels_are_refused():
    with pytest.raises(ValueError, match="don't say how fast chosen keys are found"):
        predict_call(WAYS["zigzag"], setting(LATENTS, rates=preset("h100-hgx")))


def test_rates_of_earlier_versions_have_none_and_others_are_kept():
    values = CPU.as_dict()
    assert Rates.from_dict(values) == CPU and isinstance(CPU.chosen, ChosenKernels)
    del values["chosen"]
    assert Rates.from_dict(values).chosen is None
    with pytest.raises(ValueError, match="look is missing"):
        Rates.from_dict(values | {"chosen": {k: v for k, v in vars(CPU.chosen).items() if k != "look"}})


DENSE = {"mlp_layer_types": ["dense"] * 3}


def request(family="glm_moe_dsa", **changes):
    model = Model.read(make_indexed(family, stock=True, **DENSE).config, "tiny")
    cluster = Cluster(ranks=4, per_node=4, rates=CPU, device=Device())
    return ForecastRequest(**{"seq_len": 4096, "cluster": cluster, "model": model, "dtype": torch.float32} | changes)


def test_strategies_that_split_heads_are_refused_and_others_predicted():
    found = {each.strategy: each for each in forecasts(request())}
    assert "all heads of a layer share a choice" in found["ulysses"].refused
    assert "can't share the projections" in found["tensor-sequence"].refused
    for name in ("auto", "burst", "zigzag-ring"):
        assert not found[name].refused and found[name].attention > 0 and "key-value" in found[name].way
    assert found["auto"].sent["attention"] == found["burst"].sent["attention"]
    with pytest.raises(ValueError, match="not for glm_moe_dsa"):
        request().cut(2)
    with pytest.raises(ValueError, match="attention-chunks is not predicted for heads that share a choice"):
        forecasts(request(saving=Saving(attention_chunks=2)))


def test_an_unknown_indexer_is_refused(monkeypatch):
    monkeypatch.setattr(hf, "indexed_layers", lambda model: [None] * 3)
    with pytest.raises(ValueError, match=r"indexer that chooses keys .GlmMoeDsaIndexer., whose work is not predicted"):
        request()


def test_layers_with_and_without_an_indexer_are_counted():
    asked = request()
    assert [each.chooses for each in asked.model.indexed] == [True, False, True]
    assert [*asked.kinds.values()] == [2, 1]
    step = predicted_step("auto", asked)
    assert [count for count, _ in step.calls] == [2, 1]
    with_choice, without = (call for _, call in step.calls)
    assert with_choice.forward.mean_inside > without.forward.mean_inside
    assert with_choice.backward.mean_inside == without.backward.mean_inside


def test_a_layout_is_chosen_for_what_runs():
    asked = request()
    (way, *_) = predicted_step("auto", asked).ways
    assert way.layout == "zigzag" and way.circulate == "key-value"
    assert chosen(asked.setting(*next(iter(asked.kinds))), way.strategy) == way


def test_a_split_of_heads_does_not_decide_the_layout():
    """With heads split, a contiguous layout is as fast as a balanced one; indexed attention never splits them."""
    planner = Planner(CPU, None, shape_of(torch.float32, batch=1, q_heads=8, kv_heads=8, head_dim=96))

    def layout(strategy):
        return planner.choose(1 << 16, mask=Mask(), strategy=strategy, rank=0, world=2).layout.name

    assert layout(Strategy()) == "contiguous" and layout(for_chosen_keys(Strategy())) == "zigzag"
    for fixed in (Strategy(ulysses_degree=2), Strategy(circulate="query")):
        assert for_chosen_keys(fixed) == fixed
    model = make_indexed("deepseek_v32", stock=True, **DENSE)
    assert parallel._hints(model, hf.Memory(), None, None)["strategy"] == for_chosen_keys(Strategy())
    assert "strategy" not in parallel._hints(model, hf.Memory(), None, "burst")


def test_operations_count_chosen_pairs_once_and_an_indexer_forwards_alone():
    asked, tokens = request(), 4096
    model = asked.model
    counted = sum(min(t + 1, model.indexed[0].count) for t in range(tokens))
    attention = 2 * model.q_heads * (model.head_dim + model.v_head_dim) * counted * 3
    scores = 2 * 2 * 16 * 8 * tokens * (tokens + 1) / 2
    products = 2 * tokens * (model.products + model.head_products)
    assert asked.flops == 3 * (attention + products) + scores + 2 * tokens * model.index_products
    assert model.index_products > 0


def test_choices_that_are_kept_until_the_backward():
    asked = request()
    tokens, choice = 1024, asked.model.indexed[0].count * 4
    assert asked.choices("none") == asked.choices("keep-attention") == 2 * tokens * choice
    assert asked.choices("layer") == tokens * choice  # of the layer that a "shared" one follows
    assert "until the backward" in " ".join(plan.notes(asked, forecasts(asked)))


def test_choices_of_blocks_are_of_each_key_head():
    call = CALLS["blocks"]
    assert call.choice_bytes == 32 * 2 * 8
