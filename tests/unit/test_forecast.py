"""Predictions of calls and steps, compared with the plan's bytes and times, larger worlds, and a model's memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from burst_attention import CallShape, Hardware, Mask, Strategy, make_plan
from burst_attention.attention import peak_bytes
from burst_attention.attention.batch import Plans
from burst_attention.attention.hardware import shape_of
from burst_attention.plan.balance import most_tokens
from burst_attention.plan.groups import Groups
from burst_attention.plan.rows import Direction
from burst_attention.planner.choice import Candidate
from burst_attention.planner.presets import preset
from burst_attention.testing import local_world
from burst_train.figures import bytes_text, scaled, seconds_text, tokens_text
from burst_train.forecast import footprint
from burst_train.forecast.attention import (
    AttentionStrategy,
    Transfer,
    Workload,
    chosen,
    gather,
    predict_call,
    tensor,
)
from burst_train.forecast.footprint import buffers, token_bytes
from burst_train.forecast.forecast import GRAIN, forecast_of, forecasts, predicted_step, recommended
from burst_train.forecast.memory import StepMemory
from burst_train.forecast.models import model_of
from burst_train.forecast.request import Cluster, Device, ForecastRequest
from burst_train.memory import Saving
from burst_train.presets import PRESETS
from burst_train.strategies import Heads, choose

H100 = preset("h100-hgx")
SHAPE = shape_of(torch.bfloat16, batch=2, q_heads=8, kv_heads=4, head_dim=16)
WAYS = [
    AttentionStrategy(layout="zigzag", circulate="query"),
    AttentionStrategy(layout="zigzag", circulate="key-value", route="ring-attention"),
    AttentionStrategy(layout="zigzag", circulate="query", route="nodes"),
    AttentionStrategy(layout="contiguous", circulate="nearest"),
    AttentionStrategy(layout="zigzag", circulate="blocks"),
    AttentionStrategy(layout="zigzag", circulate="key-value", groups=Groups(2, 2, keep=True)),
    AttentionStrategy(layout="contiguous", circulate="query", groups=Groups(4, 4)),
    AttentionStrategy(layout="zigzag", circulate="key-value", groups=Groups(4, 4, keep=True, chunks=2)),
    AttentionStrategy(
        layout="zigzag-by-halves", circulate="key-value", groups=Groups(4, 4, keep=True, chunks=4, results=True)
    ),
]
MASKS = [Mask(), Mask(window=100), Mask(cu_seqlens=(0, 300, 517, 1000))]


def setting(world, tokens=250, *, mask=None, shape=SHAPE, per_node=2):
    given = Mask() if mask is None else mask
    return Workload(seq_len=world * tokens, mask=given, world=world, per_node=per_node, shape=shape, rates=H100)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_bytes_and_seconds_are_those_of_the_plan(way: AttentionStrategy, mask: Mask) -> None:
    asked = setting(4, mask=mask)
    call, schedules = predict_call(way, asked), [asked.schedule(way.strategy, rank) for rank in range(4)]
    traffic = [each.traffic(SHAPE, way.circulate, way.groups) for each in schedules]
    for one, name in ((call.forward, "forward_sent"), (call.backward, "backward_sent")):
        assert (one.mean_inside + one.mean_across) * 4 == pytest.approx(
            sum(getattr(each, name) for each in traffic), rel=1e-12
        )
    timed = asked.planner.timed(schedules[0], SHAPE, way.circulate, way.groups)
    assert [call.forward.seconds, call.backward.seconds] == [each.seconds for each in timed]
    assert [call.forward.exposed, call.backward.exposed] == [each.exposed for each in timed]
    assert call.standing is None


def test_what_is_chosen_and_its_time_are_what_plan_explain_tells() -> None:
    sizes = {"q_heads": 8, "kv_heads": 4, "head_dim": 16, "dtype": torch.bfloat16}
    asked = setting(4, 4096, shape=shape_of(torch.bfloat16, batch=1, q_heads=8, kv_heads=4, head_dim=16))

    def reported(group: Any) -> str:
        from burst_attention import make_plan

        hardware = Hardware(rates=H100, nodes=[0, 0, 1, 1])
        plan = make_plan(asked.seq_len, group=group, hardware=hardware, call=CallShape(**sizes))
        return plan.explain(batch=1, **sizes)

    way = chosen(asked, Strategy())
    call = predict_call(way, asked)
    with local_world(4) as world:
        text = world.run(reported)[0]
    assert f"layout {way.layout}, route {way.route}" in text
    assert f"chosen: {Candidate(way.groups, way.circulate).strategy(way.layout, way.route)}" in text
    assert f"predicted: {call.forward.seconds + call.backward.seconds:.3g} s" in text


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_many_ranks_are_extrapolated_from_fewer(way: AttentionStrategy) -> None:
    """The test extrapolates from 32 to 128 ranks, as the library does from 256 to more."""
    most, world = (16, 32) if way.route != "direct" else (100, 256) if way.circulate == "blocks" else (32, 128)
    asked = setting(world, 4096, shape=replace(SHAPE, q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128), per_node=4)
    few, all_of_them = predict_call(way, asked, most=most), predict_call(way, asked)
    assert few.standing is not None and few.standing[1] <= most and all_of_them.standing is None
    close = 0.15 if way.circulate == "blocks" else 0.02
    for a, b in ((few.forward, all_of_them.forward), (few.backward, all_of_them.backward)):
        assert a.computing == pytest.approx(b.computing, rel=close)
        assert a.seconds == pytest.approx(b.seconds, rel=close)
        assert a.mean_inside + a.mean_across == pytest.approx(b.mean_inside + b.mean_across, rel=close)


def test_documents_and_windows_that_few_ranks_can_not_stand_for_are_refused() -> None:
    way = WAYS[0]
    with pytest.raises(ValueError, match="the window 3000 is more than half"):
        predict_call(way, setting(64, 100, mask=Mask(window=3000)), most=16)
    with pytest.raises(ValueError, match="documents of 3,200 tokens are longer"):
        predict_call(way, setting(64, 100, mask=Mask(cu_seqlens=(0, 3200, 6400))), most=16)
    with pytest.raises(ValueError, match="two nodes at least"):
        predict_call(way, setting(64, per_node=16), most=16)
    asked = setting(64, 100, mask=Mask(window=50))
    near, whole = (predict_call(way, asked, most=most).backward.seconds for most in (16, None))
    assert near == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("way", [w for w in WAYS if w.route != "nodes"], ids=str)
def test_buffers_of_many_ranks_are_those_of_a_few(way: AttentionStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, dtype = setting(32, 64), torch.bfloat16
    monkeypatch.setattr(footprint, "ENOUGH", 16)
    whole = [
        peak_bytes(
            asked.schedule(way.strategy, rank), SHAPE, dtype, Candidate(way.groups, way.circulate), Direction.BACKWARD
        )
        - 64 * token_bytes(SHAPE)
        for rank in (0, 10, 20, 31)
    ]
    close = 0.2 if way.circulate == "blocks" else 0.07
    assert buffers(way, asked, dtype) == pytest.approx(max(whole), rel=close)


def test_models_by_name_are_as_large_as_they_were_published() -> None:
    billions = {
        "llama-3-8b": 8.03,
        "llama-3-70b": 70.55,
        "llama-2-7b": 6.74,
        "llama-2-13b": 13.02,
        "llama-2-70b": 68.98,
    }
    billions |= {"mistral-7b": 7.25, "qwen-2.5-7b": 7.62, "qwen-2.5-72b": 72.71, "qwen-3-8b": 8.19}
    assert {name: round(model_of(name).size / 1e9, 2) for name in PRESETS if name != "tiny"} == billions


def test_tensor_parallelism_sends_what_it_counts() -> None:
    asked, cut = setting(4, 64, shape=SHAPE), choose("tensor-sequence")
    heads = Heads(q_heads=8, kv_heads=4, head_dim=16, hidden=128, intermediate=512)

    def sent(group: Any) -> tuple[int, int]:
        return cut.sent([cut.plan(asked.seq_len, group=group)], heads, batch=2, dtype=torch.bfloat16)

    with local_world(4) as world:
        counted = np.mean(world.run(sent), axis=0)
    call = tensor(asked, 128)
    for one, count in zip((call.forward, call.backward), counted, strict=True):
        assert one.mean_inside + one.mean_across == pytest.approx(count, rel=1e-12)
        assert one.exposed > 0 and one.mean_inside * 3 >= one.mean_across


def on_two_nodes(rate: float | None) -> ForecastRequest:
    """A step of a small model over 2 nodes of 2 ranks, whose ports carry ``rate`` bits per second."""
    rates = preset("cpu")
    if rate is not None:
        rates = replace(rates, across=replace(rates.across, bytes_per_second=rate / 8, shared=True))
    cluster = Cluster(ranks=4, per_node=2, rates=rates, device=Device())
    return ForecastRequest(
        seq_len=2048, cluster=cluster, model=model_of("tiny"), dtype=torch.float32, remat="none", compares_meshes=True
    )


@pytest.mark.parametrize("rate", [200e6, 50e6])
def test_slow_links_between_nodes_ask_for_tensor_parallelism_inside_of_them(rate: float) -> None:
    """The emulated cluster of docs/how-to/choosing-a-mesh.md measured 0.86 and 0.84 of the time."""
    without, cut = (forecast_of(name, on_two_nodes(rate)) for name in ("auto", "auto/tp:2"))
    assert 0.6 < cut.seconds / without.seconds < 0.95
    assert cut.tensor > 0 == without.tensor
    assert cut.sent["parameters"][1] < without.sent["parameters"][1]


def test_each_sum_over_a_tensor_axis_waits_for_its_messages() -> None:
    request = on_two_nodes(None)
    fast, slow = (
        replace(
            request, cluster=replace(request.cluster, rates=replace(rates, inside=replace(rates.inside, latency=t)))
        )
        for rates in [request.cluster.rates]
        for t in (0.0, 1e-3)
    )
    quick, late = (each.cut(2).tensor_sums("none").seconds for each in (fast, slow))
    assert late - quick == pytest.approx(2 * (4 * request.model.layers + 2) * 1e-3)


def test_meshes_are_compared_where_a_node_holds_them() -> None:
    names = [each.strategy for each in forecasts(on_two_nodes(None))]
    assert names[:3] == ["auto", "auto/tp:2", "burst"]
    assert "--tensor-parallel 2" in forecast_of("auto/tp:2", on_two_nodes(None)).flags
    assert not any("/tp:" in each.strategy for each in forecasts(replace(on_two_nodes(None), compares_meshes=False)))
    wide = replace(on_two_nodes(None), model=model_of("llama-3-8b"))
    assert "a node has 2 ranks" in forecast_of("auto/tp:4", wide).refused
    whole = replace(wide.model, family="phi3")
    assert "not for phi3" in forecast_of("auto/tp:2", replace(wide, model=whole)).refused
    chunked = replace(on_two_nodes(None), saving=Saving(attention_chunks=2))
    assert "--attention-chunks" in forecast_of("auto/tp:2", chunked).refused


def test_a_part_of_a_model_has_its_share_of_all_but_hidden_states() -> None:
    whole, part = model_of("llama-3-8b"), model_of("llama-3-8b").cut(8)
    assert (part.hidden, part.layers) == (whole.hidden, whole.layers)
    assert 8 * part.products == whole.products and 8 * part.kv_heads == whole.kv_heads
    assert 8 * part.size == pytest.approx(whole.size, rel=1e-3)


def test_no_wait_is_less_than_nothing() -> None:
    """Where less and less is exposed, a line would go on below zero."""
    for way in WAYS:
        if way.route == "direct":
            call = predict_call(way, setting(32, 64, per_node=2), most=16)
            assert call.standing is not None and min(call.forward.exposed, call.backward.exposed) >= 0


@pytest.mark.parametrize("world", [3, 7, 48])
def test_weights_of_a_world_that_divides_no_width_are_those_of_the_fullest_rank(world: int) -> None:
    model = model_of("llama-3-8b")
    step = StepMemory(q=make_request(ranks=world), buffers=0)
    matrices = [*model.outside, *model.inside]
    shards = [torch.empty(rows, columns, device="meta").chunk(world)[0] for rows, columns in matrices]
    assert step.weights == 4 * sum(shard.numel() for shard in shards)


def test_a_gather_is_the_busier_link_s() -> None:
    rates = replace(H100, inside=replace(H100.inside, latency=0.0), across=replace(H100.across, latency=0.0))
    within, between = (gather(8e9, 16, node, rates) for node in (16, 8))
    assert within.inside == pytest.approx(7.5e9) and within.across == 0
    assert within.seconds == pytest.approx(7.5e9 / rates.inside.bytes_per_second)
    assert between.inside + between.across == pytest.approx(7.5e9) and between.across == pytest.approx(7.5e9 / 8)
    assert between.seconds == pytest.approx(7.5e9 / 8 / rates.across.bytes_per_second)
    shared = replace(rates, across=replace(rates.across, shared=True))
    assert gather(8e9, 16, 8, shared).seconds == pytest.approx(8 * between.seconds)
    assert gather(8e9, 1, 8, rates) == Transfer()


SPLIT = "route=direct,ulysses_degree=16"


def make_request(**more: Any) -> ForecastRequest:
    device = Device(peak=1e15, memory=more.pop("memory", 80e9))
    cluster = Cluster(ranks=more.pop("ranks", 8), per_node=8, rates=H100, device=device)
    return ForecastRequest(cluster=cluster, **({"seq_len": 1 << 17, "model": model_of("llama-3-8b")} | more))


def test_a_step_is_attention_products_and_what_is_exposed() -> None:
    asked = make_request()
    found = {each.strategy: each for each in forecasts(asked)}
    ours = found["auto"]
    seen, model = asked.seq_len * (asked.seq_len + 1) // 2, model_of("llama-3-8b")
    attention = 32 * 4 * 32 * 128 * seen
    matrices = 2 * asked.seq_len * (model.size - 128256 * 4096 - 65 * 4096)  # without embedding and norms
    assert asked.flops == pytest.approx(3 * (attention + matrices))
    assert ours.mfu == pytest.approx(asked.flops / (ours.seconds * 8 * 1e15))
    # As it is, every strategy's attention keeps its buffers; 132 GB of activations don't fit, what is recomputed does.
    assert ours.remat == "keep-attention" and sum(ours.memory["none"].values()) > 0.9 * 80e9
    head = 2 * asked.seq_len * 128256 * 4096
    matrix_seconds = (4 * (matrices - head) + 4 * head) / (8 * 0.55e15)
    assert ours.rest == pytest.approx(matrix_seconds)  # the device's bandwidth is unknown here

    call = predict_call(ours.ways[0], asked.setting(Mask()))
    assert ours.attention == pytest.approx(32 * (call.forward.seconds + call.backward.seconds))
    layer = forecast_of("auto", replace(asked, remat="layer"))
    assert layer.attention == pytest.approx(32 * (2 * call.forward.seconds + call.backward.seconds))
    # Two gathers of the layers, one of the rest, in bf16; gradients in fp32.
    rest = 2 * 128256 * 4096 + 4096
    assert sum(ours.sent["parameters"]) == pytest.approx(7 / 8 * (4 * (model.size - rest) + 2 * rest + 4 * model.size))
    assert recommended([*found.values()]) is ours
    assert all(each.fits for each in found.values())


def test_elementwise_operations_and_adamw_move_bytes_at_the_memorys_bandwidth() -> None:
    asked = make_request(seq_len=65536)
    cluster = replace(asked.cluster, device=replace(asked.cluster.device, bandwidth=2e12))
    more = replace(asked, cluster=cluster).rest_seconds("layer") - asked.rest_seconds("layer")
    norms, rotary, sums, gate = 2 * 36 * 4096, 20 * (4096 + 1024), 12 * 4096, 10 * 14336  # bytes per token, bf16
    moved = 4 * 65536 * 32 * (norms + rotary + sums + gate) + 28 * 8_030_261_248
    assert more == pytest.approx(moved / (8 * 0.8 * 2e12))


@pytest.mark.parametrize("strategy", ["zigzag-ring", "ulysses", "tensor-sequence"])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(strategy: str) -> None:
    asked = make_request(remat="layer")
    longest = forecast_of(strategy, asked).longest
    assert longest and longest % GRAIN == 0
    for seq_len, fits in ((longest, True), (longest + 8 * GRAIN, False)):
        assert forecast_of(strategy, replace(asked, seq_len=seq_len)).fits is fits


def test_nothing_fits_a_small_device_and_nothing_is_known_of_another() -> None:
    small = forecasts(make_request(memory=2e9))
    assert recommended(small) is None and {each.longest for each in small} == {0}
    unknown = forecasts(make_request(memory=None))
    assert {each.fits for each in unknown} == {None} and recommended(unknown) is not None
    assert {each.remat for each in unknown} == {"none"}


def test_what_a_forward_fetched_is_kept_with_its_results() -> None:
    """keep-attention would recompute local q, k and v, but it must keep the cached ones."""
    asked = make_request(strategy=SPLIT, ranks=16)
    found = predicted_step(SPLIT, asked)
    groups = found.ways[0].groups
    assert replace(groups, chunks=0) == Groups(16, 8, keep=True, results=True)
    token = 2 * asked.seq_len // 16  # bytes of a number for each token
    assert found.more["kept"] == token * 2 * 8 * 128  # keys and values at a second rank
    results = token * 32 * (128 + 2)  # out and lse of the rank's heads too
    assert found.more["results"] == token * (32 + 2 * 16) * 128 + results
    for remat, kept in (("none", found.more["kept"]), ("keep-attention", found.more["results"]), ("layer", 0)):
        steps = [StepMemory(q=asked, buffers=0, remat=remat, **more) for more in ({}, found.more)]
        assert steps[1].kept_by_layer() - steps[0].kept_by_layer() == kept


def test_a_part_that_stands_for_all_can_have_its_heads_cut_as_asked() -> None:
    assert (
        chosen(
            setting(768, 64, shape=replace(SHAPE, q_heads=6, kv_heads=3)), Strategy(layout="zigzag", ulysses_degree=3)
        ).groups.query
        == 3
    )


def test_layers_with_windows_are_counted_apart() -> None:
    windows = (None, 4096) * 16
    mixed = make_request(model=replace(model_of("llama-3-8b"), reaches=windows), remat="layer")
    full = make_request(remat="layer")
    short = replace(full, model=replace(full.model, reaches=(4096,) * 32))
    both = [forecast_of("zigzag-ring", each) for each in (mixed, full, short)]
    assert both[0].attention == pytest.approx((both[1].attention + both[2].attention) / 2)
    assert mixed.flops < full.flops


LENGTHS = (3000, 40, 500, 12, 1200, 700, 90, 260, 2500, 30, 11, 1849)  # a long tail


def joined_request(times: int = 1, **more: Any) -> ForecastRequest:
    """A row of packed sequences with a long tail of lengths, on layers with and without windows."""
    borders = tuple((times * np.cumsum([0, *LENGTHS])).tolist())
    model = replace(model_of("llama-3-8b"), reaches=(None, 128) * 16)
    row = {"seq_len": borders[-1], "borders": borders, "joined": 4, "model": model}
    return make_request(**row | {"ranks": 4} | more)


@pytest.mark.parametrize("degree", ["auto", 1])
def test_a_balanced_row_sends_what_its_plans_count(degree: Any) -> None:
    """All layers share the layout that follows the widest window."""
    asked = joined_request(strategy=f"ulysses_degree={degree}", remat="none")
    found, sizes = (
        forecast_of(asked.strategy, asked),
        {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16},
    )

    def counted(group: Any) -> int:
        strategy = Strategy(layout="balanced", ulysses_degree=degree)
        hardware, call = Hardware(rates=H100, nodes=[0] * 4), CallShape(**sizes)
        plan = make_plan(asked.seq_len, strategy=strategy, hardware=hardware, call=call, group=group)
        plans = Plans.by_windows(plan, [None, 128], Mask(cu_seqlens=asked.borders))
        return sum(16 * plan.bytes(batch=1, **sizes).sent for plan in plans.values())

    with local_world(4) as world:
        sent = world.run(counted)
    assert sum(found.sent["attention"]) == pytest.approx(np.mean(sent), rel=1e-12) and min(sent) > 0


def test_the_fullest_rank_of_a_balanced_row_counts() -> None:
    """Memory is that of a sequence of which each rank holds as many tokens."""
    most, mean, whole = most_tokens(16 * sum(LENGTHS), 4), 4 * sum(LENGTHS), "ulysses_degree=1"
    balanced = joined_request(16, strategy=whole, remat="layer")
    even = replace(balanced, strategy="layout=zigzag,ulysses_degree=1", joined=1)
    longer = replace(even, seq_len=4 * most, borders=None)
    full, less, same = (forecast_of(each.strategy, each) for each in (balanced, even, longer))
    assert full.memory == same.memory != less.memory
    assert full.rest == pytest.approx(less.rest * most / mean)
    assert predicted_step(whole, balanced).q.tokens == most > even.tokens == mean


def test_the_longest_of_joined_sequences_is_that_of_each() -> None:
    asked = joined_request(remat="layer")
    longest = forecast_of("auto", asked).longest
    assert longest and longest % GRAIN == 0

    def fits(tokens: int) -> bool | None:
        row = 4 * tokens
        borders = tuple(each * row // asked.seq_len for each in asked.borders or ())
        return forecast_of("auto", replace(asked, seq_len=row, borders=borders)).fits

    assert fits(longest) and not fits(longest + 8 * GRAIN)


def test_calls_with_sinks_keep_no_results() -> None:
    """burst_attention caches out and lse only without sinks."""
    asked, model = make_request(strategy=SPLIT, ranks=16), model_of("llama-3-8b")
    sinks = replace(asked, model=replace(model, options=("sinks",)))
    plain, with_sinks = (predicted_step(SPLIT, each) for each in (asked, sinks))
    assert plain.ways[0].groups.results and not with_sinks.ways[0].groups.results
    token = 2 * asked.seq_len // 16
    assert plain.more["results"] - with_sinks.more["results"] == token * 32 * (
        128 + 2
    )  # out and lse of the rank's heads
    backward = [each.calls[0][1].backward for each in (plain, with_sinks)]
    sent = [each.mean_inside + each.mean_across for each in backward]
    assert sent[0] < sent[1]


def test_figures_are_for_people() -> None:
    assert [scaled(value, "FLOP") for value in (8.19e15, 0, 999.6e9)] == ["8.19 PFLOP", "0 FLOP", "1 TFLOP"]
    given = {1.4e9: "1.4 GB", 123: "123 B", 80e9: "80 GB", 1_000_000: "1 MB", 0: "0 B", 999.6e9: "1 TB"}
    assert [*map(bytes_text, given)] == [*given.values()]
    assert [seconds_text(x) for x in (0.023, 2e-6, 1.5, 130, 9000, 3e5)] == [
        "23 ms",
        "2 us",
        "1.5 s",
        "2.17 min",
        "2.5 h",
        "3.47 days",
    ]
    assert [tokens_text(x) for x in (1 << 20, 96 << 10, 1000, 2097153)] == ["1M", "96K", "1,000", "2,097,153"]
