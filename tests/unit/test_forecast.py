"""Predictions of calls and steps, compared with the plan's bytes and times, larger worlds, and a model's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from burst_train.engines import choose
from burst_train.engines.contract import Heads
from burst_train.engines.ulysses import ulysses_sent
from burst_train.figures import bytes_text, flops_text, seconds_text, tokens_text
from burst_train.forecast import buffers as buffers_module
from burst_train.forecast import collectives
from burst_train.forecast.buffers import buffers, token_bytes
from burst_train.forecast.calls import AttentionStrategy, Workload, chosen, predict_call
from burst_train.forecast.candidates import MAKERS
from burst_train.forecast.footprint import training_memory
from burst_train.forecast.forecast import GRAIN, forecast_of, forecasts, predicted_step, recommended
from burst_train.forecast.machines import Device
from burst_train.forecast.models import MODELS, Model
from burst_train.forecast.named import model_of
from burst_train.forecast.request import Cluster, ForecastRequest
from burst_train.forecast.step_memory import OVERLAPPING, PARTS, Step
from burst_train.forecast.timeline import Bar, _bars, drawn, picture
from burst_train.memory import MemoryConfig
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from burst_attention import CallShape, Hardware, Mask, Strategy, make_plan
from burst_attention.attention.batch import Plans
from burst_attention.attention.footprint import peak_of
from burst_attention.attention.hardware import shape_of
from burst_attention.plan.balance import most_tokens
from burst_attention.plan.groups import Groups
from burst_attention.plan.rows import Direction
from burst_attention.planner.choice import Candidate
from burst_attention.planner.presets import preset
from burst_attention.testing import local_world

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


def setting(
    world: int, tokens: int = 250, *, mask: Mask | None = None, shape: Any = SHAPE, per_node: int = 2
) -> Workload:
    given = Mask() if mask is None else mask
    return Workload(seq_len=world * tokens, mask=given, world=world, per_node=per_node, shape=shape, rates=H100)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_bytes_and_seconds_are_those_of_the_plan(way: AttentionStrategy, mask: Mask) -> None:
    asked = setting(4, mask=mask)
    call, schedules = predict_call(way, asked), [asked.schedule(way, rank) for rank in range(4)]
    traffic = [each.traffic(SHAPE, way.circulate, way.groups) for each in schedules]
    for one, name in ((call.forward, "forward_sent"), (call.backward, "backward_sent")):
        assert (one.inside + one.across) * 4 == pytest.approx(sum(getattr(each, name) for each in traffic), rel=1e-12)
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
    assert f"predicted: {call.seconds:.3g} s" in text


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
        assert a.inside + a.across == pytest.approx(b.inside + b.across, rel=close)
        assert sum(a.busiest) == pytest.approx(sum(b.busiest), rel=2 * close)


def test_documents_and_windows_that_few_ranks_can_not_stand_for_are_refused() -> None:
    way = WAYS[0]
    with pytest.raises(ValueError, match="--window 3000 is more than half"):
        predict_call(way, setting(64, 100, mask=Mask(window=3000)), most=16)
    with pytest.raises(ValueError, match="documents of 3,200 tokens are longer"):
        predict_call(way, setting(64, 100, mask=Mask(cu_seqlens=(0, 3200, 6400))), most=16)
    with pytest.raises(ValueError, match=r"--ranks 521 can't be predicted.*use --ranks 768"):
        chosen(setting(521), Strategy())
    with pytest.raises(ValueError, match="two nodes at least"):
        predict_call(way, setting(64, per_node=16), most=16)
    near = predict_call(way, setting(64, 100, mask=Mask(window=50)), most=16)
    assert near.seconds == pytest.approx(predict_call(way, setting(64, 100, mask=Mask(window=50))).seconds, rel=0.05)


@pytest.mark.parametrize("way", [w for w in WAYS if w.route != "nodes"], ids=str)
def test_buffers_of_many_ranks_are_those_of_a_few(way: AttentionStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, dtype = setting(32, 64), torch.bfloat16
    monkeypatch.setattr(buffers_module, "ENOUGH", 16)
    whole = [
        peak_of(asked.schedule(way, rank), SHAPE, dtype, Candidate(way.groups, way.circulate), Direction.BACKWARD)
        - 64 * token_bytes(SHAPE, dtype)
        for rank in (0, 10, 20, 31)
    ]
    close = 0.2 if way.circulate == "blocks" else 0.07
    assert buffers(way, asked, dtype) == pytest.approx(max(whole), rel=close)


TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 8, "num_key_value_heads": 2}


def read(config: Any, folder: Any) -> Model:
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return model_of(str(folder))


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig])
def test_parameters_are_those_of_the_model_itself(kind: Any, tmp_path: Any) -> None:
    for tied in (False, True):
        config = kind(**TINY, head_dim=16, tie_word_embeddings=tied)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        assert read(config, tmp_path).size == sum(p.numel() for p in whole.parameters())


def test_models_by_name_are_as_large_as_they_were_published() -> None:
    billions = {
        "llama-3-8b": 8.03,
        "llama-3-70b": 70.55,
        "llama-2-7b": 6.74,
        "llama-2-13b": 13.02,
        "llama-2-70b": 68.98,
    }
    billions |= {"mistral-7b": 7.25, "qwen-2.5-7b": 7.62, "qwen-2.5-72b": 72.71, "qwen-3-8b": 8.19}
    assert {name: round(model.size / 1e9, 2) for name, model in MODELS.items()} == billions


def test_memory_is_what_the_model_itself_shows_where_its_head_holds_most(tmp_path: Any) -> None:
    """With few tokens and a large vocabulary, logits and the head's gradients take the most memory."""
    for vocabulary, tokens in ((8192, 1024), (16384, 2048)):
        config = LlamaConfig(**TINY | {"vocab_size": vocabulary}, head_dim=16)
        sizes = {"dtype": torch.bfloat16, "memory": MemoryConfig(remat="layer")}
        true = training_memory(config, engine=choose("ring"), seq_len=tokens, world=1, **sizes)
        step = Step(model=read(config, tmp_path), tokens=tokens, batch=1, world=1, io=2, buffers=0, remat="layer")
        assert true is not None and step.parts()["loss"] == pytest.approx(true["loss"], rel=0.03) and true["loss"]
        assert step.total == pytest.approx(sum(true.values()), rel=0.02)


@pytest.mark.parametrize(
    ("kind", "dtype", "world", "tokens", "chunks", "remat"),
    [
        (LlamaConfig, torch.bfloat16, 4, 2048, 1, "none"),
        (LlamaConfig, torch.bfloat16, 1, 2048, 4, "layer"),
        (LlamaConfig, torch.float32, 4, 2048, 2, "keep-attention"),
        (Qwen3Config, torch.bfloat16, 4, 64, 1, "keep-attention"),
        (Qwen3Config, torch.bfloat16, 4, 64, 1, "layer"),
        (Qwen2Config, torch.float32, 2, 96, 1, "none"),
    ],
)
@pytest.mark.long
def test_memory_is_what_the_model_itself_shows(
    kind: Any, dtype: torch.dtype, world: int, tokens: int, chunks: int, remat: Any, tmp_path: Any
) -> None:
    config, seq_len = kind(**TINY, head_dim=16), world * tokens
    memory = MemoryConfig(remat=remat, mlp_chunks=chunks)
    true = training_memory(config, engine=choose("ring"), seq_len=seq_len, world=world, dtype=dtype, memory=memory)
    assert true is not None
    shape = shape_of(dtype, batch=1, q_heads=8, kv_heads=2, head_dim=16)
    held = buffers(WAYS[1], setting(world, tokens, shape=shape), dtype)
    model = read(config, tmp_path)
    step = Step(
        model=model,
        tokens=tokens,
        batch=1,
        world=world,
        io=dtype.itemsize,
        buffers=held,
        remat=remat,
        mlp_chunks=chunks,
    )
    parts = step.parts()
    assert tuple(parts) == PARTS
    assert step.total == pytest.approx(sum(true.values()), rel=0.03)
    for name in ("weights", "AdamW"):
        assert parts[name] == pytest.approx(true[name], rel=0.1 if parts["gathered"] == 0 else 0)
    if parts["gathered"] and true["gathered"]:
        assert parts["gathered"] == true["gathered"]


@pytest.mark.parametrize(
    ("kind", "world", "chunks", "heads", "offload"),
    [(LlamaConfig, 4, 8, 2, "none"), (Qwen3Config, 4, 8, 4, "disk:/x"), (LlamaConfig, 4, 8, 1, "host")],
)
@pytest.mark.long
def test_memory_of_chunks_and_offload_is_what_the_model_shows(
    kind: Any, world: int, chunks: int, heads: int, offload: str, tmp_path: Any
) -> None:
    config, tokens, dtype = kind(**TINY | {"num_hidden_layers": 5}, head_dim=16), 8192, torch.bfloat16
    optimizer: Any = "adamw-8bit" if heads == 1 else "adamw"
    chunked: Any = {"remat": "layer", "mlp_chunks": chunks, "attention_chunks": heads}
    memory, ring = MemoryConfig(**chunked, offload=offload, optimizer=optimizer), choose("ring")
    true = training_memory(config, engine=ring, seq_len=world * tokens, world=world, dtype=dtype, memory=memory)
    shape = shape_of(dtype, batch=1, q_heads=8 // heads, kv_heads=max(1, 2 // heads), head_dim=16)
    held = buffers(WAYS[1], setting(world, tokens, shape=shape), dtype, calls=min(heads, OVERLAPPING))
    flags = chunked | {"offload": offload != "none", "low_bit": optimizer == "adamw-8bit"}
    step = Step(model=read(config, tmp_path), tokens=tokens, batch=1, world=world, io=2, buffers=held, **flags)
    assert true is not None and step.total == pytest.approx(sum(true.values()), rel=0.04)
    assert step.parts()["AdamW"] == true["AdamW"]


def test_what_other_engines_send_is_what_they_count() -> None:
    asked = setting(4, 64, shape=SHAPE)
    heads = Heads(q_heads=8, kv_heads=4, head_dim=16, hidden=128, intermediate=512)
    sizes = {"batch": 2, "dtype": torch.bfloat16}

    def sent(group: Any) -> tuple[Any, ...]:
        whole, cut = (choose(name) for name in ("ulysses", "tensor-sequence"))
        plan = whole.plan(asked.seq_len, group=group)
        meshes = [choose("usp", strategy=Strategy(ulysses_degree=n)) for n in (1, 2, 4)]
        of_meshes = [each.sent([each.plan(asked.seq_len, group=group)], heads, **sizes) for each in meshes]
        return ulysses_sent(plan, heads, 2, torch.bfloat16), cut.sent([plan], heads, **sizes), *of_meshes

    with local_world(4) as world:
        counted = np.mean(world.run(sent), axis=0)  # a ring's ranks differ
    calls = [collectives.ulysses(asked), collectives.tensor(asked, 128)]
    calls += [collectives.usp(asked, n) for n in (1, 2, 4)]
    for call, (forward, backward) in zip(calls, counted, strict=True):
        assert call.forward.inside + call.forward.across == pytest.approx(forward, rel=1e-12)
        assert call.backward.inside + call.backward.across == pytest.approx(backward, rel=1e-12)
    assert all(call.forward.exposed > 0 and call.forward.inside * 3 >= call.forward.across for call in calls[:2])
    uncut, mesh, whole = calls[2:]
    assert uncut == predict_call(collectives.RING, asked)  # a neighbour alone exchanges nothing
    assert whole.forward.inside == calls[0].forward.inside
    assert whole.forward.seconds == pytest.approx(calls[0].forward.seconds, rel=1e-6)  # another layout's borders
    # On two nodes of two ranks each neighbours share a node, and the ring of two is all that crosses.
    ring = predict_call(collectives.RING, collectives.ring_of(asked, 2))
    assert (ring.forward.inside, ring.forward.across) == (0, mesh.forward.across)
    assert mesh.backward.exposed > ring.backward.exposed


def test_rings_that_share_a_port_or_cores_have_a_part_of_them() -> None:
    shared = replace(H100, across=replace(H100.across, shared=True), overhead=replace(H100.overhead, at_once=4.0))
    own, part = (collectives.ring_of(replace(setting(16, per_node=4), rates=rates), 8) for rates in (H100, shared))
    assert part.rates.across.bytes_per_second == own.rates.across.bytes_per_second / 4  # of a node's four ranks
    assert part.rates.inside == own.rates.inside and part.rates.overhead.at_once == 0.5
    assert (part.world, part.per_node, part.shape.q_heads) == (2, 1, SHAPE.q_heads // 8)
    # 8 neighbours on two nodes: a port carries what all four ranks of its node send to the other.
    near, far = (replace(link, latency=0.0) for link in (H100.inside, H100.across))
    both = (replace(H100, inside=near, across=replace(far, shared=shared)) for shared in (False, True))
    settings = [replace(setting(8, 4096, per_node=4), rates=rates) for rates in both]
    one, all_of_them = (collectives.usp(each, 8).forward for each in settings)
    assert one.computing == all_of_them.computing
    assert all_of_them.exposed == pytest.approx(4 * one.exposed)


def test_many_ranks_of_a_mesh_are_extrapolated_from_fewer() -> None:
    call = collectives.usp(setting(128, 256, shape=replace(SHAPE, q_heads=8), per_node=4), 2)
    assert call.standing == (32, 64)  # of all ranks, in 16 and 32 of each ring


def test_a_gather_is_the_busier_link_s() -> None:
    rates = replace(H100, inside=replace(H100.inside, latency=0.0), across=replace(H100.across, latency=0.0))
    within, between = (collectives.gather(8e9, 16, node, rates) for node in (16, 8))
    assert within.inside == pytest.approx(7.5e9) and within.across == 0
    assert within.seconds == pytest.approx(7.5e9 / rates.inside.bytes_per_second)
    assert between.inside + between.across == pytest.approx(7.5e9) and between.across == pytest.approx(7.5e9 / 8)
    assert between.seconds == pytest.approx(7.5e9 / 8 / rates.across.bytes_per_second)
    shared = replace(rates, across=replace(rates.across, shared=True))
    assert collectives.gather(8e9, 16, 8, shared).seconds == pytest.approx(8 * between.seconds)
    assert collectives.gather(8e9, 1, 8, rates) == collectives.Exchange()


def make_request(**more: Any) -> ForecastRequest:
    device = Device(peak=1e15, memory=more.pop("memory", 80e9))
    cluster = Cluster(ranks=more.pop("ranks", 8), per_node=8, rates=H100, device=device)
    model = MODELS["llama-3-8b"]
    given = {"seq_len": 1 << 17, "model": model, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 32}
    return ForecastRequest(cluster=cluster, **(given | more))


def test_a_step_is_attention_products_and_what_is_exposed() -> None:
    asked = make_request()
    found = {each.engine: each for each in forecasts(asked)}
    ours = found["burst"]
    seen, model = asked.seq_len * (asked.seq_len + 1) // 2, MODELS["llama-3-8b"]
    attention = 32 * 4 * 32 * 128 * seen
    matrices = 2 * asked.seq_len * (model.size - 128256 * 4096 - 65 * 4096)  # without embedding and norms
    assert asked.flops == pytest.approx(3 * (attention + matrices))
    assert ours.mfu == pytest.approx(asked.flops / (ours.seconds * 8 * 1e15))
    # As it is, every engine's attention keeps its buffers; 132 GB of activations don't fit, what is recomputed does.
    assert ours.remat == "keep-attention" and sum(ours.memory["none"].values()) > 0.9 * 80e9
    head = 2 * asked.seq_len * 128256 * 4096
    matrix_seconds = (4 * (matrices - head) + 4 * head) / (8 * 0.55e15)
    assert ours.rest == pytest.approx(matrix_seconds)  # the device's bandwidth is unknown here

    call = predict_call(ours.ways[0], asked.setting(Mask()))
    assert ours.attention == pytest.approx(32 * call.seconds)
    layer = forecast_of("burst", replace(asked, remat="layer"))
    assert layer.attention == pytest.approx(32 * (call.seconds + call.forward.seconds))
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


@pytest.mark.parametrize("engine", ["ring", "ulysses", "usp", "tensor-sequence"])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(engine: str) -> None:
    asked = make_request(remat="layer")
    longest = forecast_of(engine, asked).longest
    assert longest and longest % GRAIN == 0
    for seq_len, fits in ((longest, True), (longest + 8 * GRAIN, False)):
        assert forecast_of(engine, replace(asked, seq_len=seq_len)).fits is fits


def test_nothing_fits_a_small_device_and_nothing_is_known_of_another() -> None:
    small = forecasts(make_request(memory=2e9))
    assert recommended(small) is None and {each.longest for each in small} == {0}
    unknown = forecasts(make_request(memory=None))
    assert {each.fits for each in unknown} == {None} and recommended(unknown) is not None
    assert {each.remat for each in unknown} == {"none"}


def test_what_a_forward_fetched_is_kept_with_its_results() -> None:
    """keep-attention would recompute local q, k and v, but it must keep the cached ones."""
    asked = make_request(ulysses_degree=16, ranks=16, route="direct")
    candidate = MAKERS["burst"](asked)
    groups = candidate.ways[0].groups
    assert replace(groups, chunks=0) == Groups(16, 8, keep=True, results=True)
    token = 2 * asked.seq_len // 16  # bytes of a number for each token
    assert candidate.kept == token * 2 * 8 * 128  # of keys and values, of which each head is at two ranks, the second
    results = token * 32 * (128 + 2)  # out and lse of the rank's heads too
    assert candidate.results == token * (32 + 2 * 16) * 128 + results
    sizes = {
        "model": MODELS["llama-3-8b"],
        "tokens": asked.seq_len // 16,
        "batch": 1,
        "world": 16,
        "io": 2,
        "buffers": 0,
    }
    for remat, more in (("none", candidate.kept), ("keep-attention", candidate.results), ("layer", 0)):
        steps = [Step(**sizes, remat=remat), Step(**sizes, remat=remat, kept=candidate.kept, results=candidate.results)]
        assert steps[1].kept_by_layer() - steps[0].kept_by_layer() == more


def test_a_part_that_stands_for_all_can_have_its_heads_cut_as_asked() -> None:
    assert (
        chosen(
            setting(768, 64, shape=replace(SHAPE, q_heads=6, kv_heads=3)), Strategy(layout="zigzag", ulysses_degree=3)
        ).groups.query
        == 3
    )


def test_layers_with_windows_are_counted_apart() -> None:
    windows = (None, 4096) * 16
    mixed = make_request(model=replace(MODELS["llama-3-8b"], windows=windows), remat="layer")
    full, short = make_request(remat="layer"), make_request(window=4096, remat="layer")
    both = [forecast_of("ring", each) for each in (mixed, full, short)]
    assert both[0].attention == pytest.approx((both[1].attention + both[2].attention) / 2)
    assert mixed.flops < full.flops


LENGTHS = (3000, 40, 500, 12, 1200, 700, 90, 260, 2500, 30, 11, 1849)  # a long tail


def joined_request(times: int = 1, **more: Any) -> ForecastRequest:
    """A row of packed sequences with a long tail of lengths, on layers with and without windows."""
    borders = tuple((times * np.cumsum([0, *LENGTHS])).tolist())
    model = replace(MODELS["llama-3-8b"], windows=(None, 128) * 16)
    row = {"seq_len": borders[-1], "borders": borders, "joined": 4, "layout": "balanced", "model": model}
    return make_request(**row | {"ranks": 4} | more)


@pytest.mark.parametrize("degree", ["auto", 1])
def test_a_balanced_row_sends_what_its_plans_count(degree: Any) -> None:
    """All layers share the layout that follows the widest window."""
    asked = joined_request(ulysses_degree=degree, remat="none")
    found, sizes = forecast_of("burst", asked), {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}

    def counted(group: Any) -> int:
        strategy = Strategy(layout="balanced", ulysses_degree=degree)
        hardware, call = Hardware(rates=H100, nodes=[0] * 4), CallShape(**sizes)
        plan = make_plan(asked.seq_len, strategy=strategy, hardware=hardware, call=call, group=group)
        plans = Plans.by_windows(plan, [None, 128], asked.borders)
        return sum(16 * plan.bytes(batch=1, **sizes).sent for plan in plans.values())

    with local_world(4) as world:
        sent = world.run(counted)
    assert sum(found.sent["attention"]) == pytest.approx(np.mean(sent), rel=1e-12) and min(sent) > 0


def test_the_fullest_rank_of_a_balanced_row_counts() -> None:
    """Memory is that of a sequence of which each rank holds as many tokens."""
    most, mean, whole = most_tokens(16 * sum(LENGTHS), 4), 4 * sum(LENGTHS), {"remat": "layer", "ulysses_degree": 1}
    balanced, even = (joined_request(16, layout=name, **whole) for name in ("balanced", "zigzag"))
    longer = replace(even, seq_len=4 * most, borders=None, joined=1)
    assert balanced.tokens == longer.tokens == most > even.tokens == mean
    full, less, same = (forecast_of("burst", each) for each in (balanced, even, longer))
    assert full.memory == same.memory != less.memory
    assert full.rest == pytest.approx(less.rest * most / mean)
    # A layout that was left open counts like one that was asked for.
    step = predicted_step(replace(balanced, layout="auto"), MAKERS["burst"](balanced))
    assert step.forecast("burst").memory == full.memory


def test_a_balanced_layout_is_that_of_burst_alone() -> None:
    """One document is spread evenly, and other engines have other layouts."""
    zigzag, balanced = (make_request(layout=name, remat="layer") for name in ("zigzag", "balanced"))
    assert balanced.tokens == zigzag.tokens
    assert forecast_of("burst", balanced).tokens_per_second == forecast_of("burst", zigzag).tokens_per_second
    rows = [joined_request(layout=name, joined=1, remat="layer") for name in ("zigzag", "balanced")]
    for name in ("ring", "ulysses", "usp", "tensor-sequence"):
        one, other = (forecast_of(name, each) for each in rows)
        assert one == other and one.tokens_per_second


def test_the_longest_of_joined_sequences_is_that_of_each() -> None:
    asked = joined_request(remat="layer")
    longest = forecast_of("burst", asked).longest
    assert longest and longest % GRAIN == 0

    def fits(tokens: int) -> bool | None:
        row = 4 * tokens
        borders = tuple(each * row // asked.seq_len for each in asked.borders or ())
        return forecast_of("burst", replace(asked, seq_len=row, borders=borders)).fits

    assert fits(longest) and not fits(longest + 8 * GRAIN)


def test_calls_with_sinks_keep_no_results() -> None:
    """burst_attention caches out and lse only without sinks."""
    asked = make_request(ulysses_degree=16, ranks=16, route="direct")
    sinks = replace(asked, model=replace(MODELS["llama-3-8b"], options=("sinks",)))
    plain, with_sinks = (MAKERS["burst"](each) for each in (asked, sinks))
    assert plain.ways[0].groups.results and not with_sinks.ways[0].groups.results
    token = 2 * asked.seq_len // 16
    assert plain.results - with_sinks.results == token * 32 * (128 + 2)  # out and lse of the rank's heads
    backward = [each.calls[0][1].backward for each in (plain, with_sinks)]
    assert backward[0].inside + backward[0].across < backward[1].inside + backward[1].across


@pytest.mark.parametrize(("way", "direction"), [*product(WAYS, Direction)], ids=str)
def test_pictures_show_what_the_planner_predicts(way: AttentionStrategy, direction: Direction) -> None:
    asked = setting(4, 1024)
    one = picture(way, drawn(way, asked), direction)
    call = predict_call(way, asked)
    whole = call.forward if direction is Direction.FORWARD else call.backward
    assert one.world == 4 and one.bytes.sum() == pytest.approx(4 * (whole.inside + whole.across))
    ends = [bars[-1].end for bars in one.bars]
    assert max(ends) + H100.overhead.call == pytest.approx(whole.seconds, abs=1e-8)
    for bars in one.bars:
        assert all(bar.begin < bar.end for bar in bars)
        assert all(a.end == b.begin for a, b in pairwise(bars))
    seen = np.tril(np.ones((4, 4), bool)) if way.layout == "contiguous" else np.ones((4, 4), bool)
    assert ((one.ranks >= 0) == seen).all() and ((one.steps >= 0) == seen).all()


def test_a_picture_of_many_ranks_is_of_a_few() -> None:
    assert drawn(WAYS[0], setting(256)).world == 16
    assert drawn(replace(WAYS[5], groups=Groups(32, 4)), setting(256)).world == 64


def test_figures_are_for_people() -> None:
    assert [flops_text(8.19e15), flops_text(0), flops_text(999.6e9)] == ["8.19 PFLOP", "0 FLOP", "1 TFLOP"]
    assert [bytes_text(x) for x in (1.4e9, 123, 80e9, 1_000_000)] == ["1.4 GB", "123 B", "80 GB", "1 MB"]
    assert [seconds_text(x) for x in (0.023, 2e-6, 1.5, 130, 9000, 3e5)] == [
        "23 ms",
        "2 us",
        "1.5 s",
        "2.17 min",
        "2.5 h",
        "3.47 days",
    ]
    assert [tokens_text(x) for x in (1 << 20, 96 << 10, 1000, 2097153)] == ["1M", "96K", "1,000", "2,097,153"]


def test_a_rank_waits_until_what_it_needs_has_come() -> None:
    bars = _bars([1.0, 4.0, 4.0, 6.0], np.array([1.0, 2.0, 0.0, 2.0]))
    assert bars == [Bar(0, 0, 1, False), Bar(1, 1, 2, True), Bar(1, 2, 4, False), Bar(3, 4, 6, False)]
