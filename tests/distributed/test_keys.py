"""Queries at some positions over keys at others: chunked prefill, follow-up turns and cross-attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from burst_attention import CallShape, Mask, Plan, Strategy, burst_attention, make_plan
from burst_attention.plan.cost import Shape
from burst_attention.plan.layout import Layout
from burst_attention.plan.schedule import Schedule
from burst_attention.planner.planner import Planner
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import Link
from burst_attention.recurrence.exchange import RunExchange
from burst_attention.testing import Case, WorkerError, attend
from burst_attention.testing.local import local_world
from tests.distributed.test_attention import check_cases
from tests.support.conditioning import greatest
from tests.support.pairwise import covering_array
from tests.support.schedules import pair_tiles

SPAN = 97  # positions of queries and keys
MASKS = {
    "full": Mask(causal=False),
    "causal": Mask(),
    "window": Mask(window=29),
    "window both ways": Mask(causal=False, window=31),
    "documents": Mask(cu_seqlens=[0, 40, 41, 60, SPAN]),
    "prefix": Mask(prefix=33),
    "together": Mask(window=19, together=[n // 3 % 5 - n % 29 // 20 for n in range(SPAN)]),
    "blocks": Mask(blocks=[[(3 * i + j) % 4 < 2 for j in range(7)] for i in range(7)], block=16),
}
FACTORS = {
    "world": [1, 2, 3, 4],
    "scene": ["follow-up", "one query", "empty shards", "more keys", "few keys", "striped"],
    "mask": list(MASKS),
    "layout": ["zigzag", "zigzag-by-halves", "contiguous"],
    "circulate": ["query", "key-value", "nearest", "blocks", "pass-query", "auto"],
    "dtype": [torch.float64, torch.float32],
    "groups": [1, 4],
    "kernel": ["reference", "aten", "auto"],
}


def cached(world: int, before: int, new: int, *, page: int = 7, holders: int | None = None) -> Layout:
    """Return the keys of a cache dealt in pages over the first ``holders`` ranks, and of new tokens in zigzag."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for n, first in enumerate(range(0, before, page)):
        held[n % (holders or world)].append((first, min(first + page, before)))
    for rank in range(world):
        held[rank] += [(s.start + before, s.stop + before) for s in Layout("zigzag", new, world).segments(rank)]
    return Layout.of_stretches(held)


def scene(name: str, world: int) -> dict[str, Any]:
    """Return a case's length, offset and keys."""
    if name in ("follow-up", "one query"):
        new = {"follow-up": 40, "one query": 1}[name]
        return {"seqlen": new, "query_offset": SPAN - new, "keys": cached(world, SPAN - new, new)}
    if name == "empty shards":
        return {"seqlen": 22, "query_offset": 60, "keys": Layout.of_stretches([[]] * (world - 1) + [[(0, SPAN)]])}
    if name == "striped":
        return {"seqlen": 30, "query_offset": 67, "layout": "striped", "keys": Layout("striped", SPAN, world)}
    if name == "more keys":
        return {"seqlen": 40, "keys": Layout("zigzag-by-halves", SPAN, world)}
    return {"seqlen": SPAN, "keys": Layout("contiguous", 5, world)}


def case_of(row: dict[str, Any]) -> Case:
    heads = {"q_heads": 12, "kv_heads": 12 // row["groups"], "head_dim": 16, "mask": MASKS[row["mask"]]}
    options = {name: value for name, value in row.items() if name not in ("scene", "mask", "groups", "world")}
    if (degree := row.get("ulysses_degree", 1)) == 1:
        options |= {"chunks": "auto"}
    elif degree != "auto" and row["world"] % degree:
        options |= {"ulysses_degree": "all"}
    return replace(Case(**heads, **options), **scene(row["scene"], row["world"]))


def check_rows(factors: dict[str, list[Any]], seed: int = 0) -> None:
    rows = covering_array(factors, seed=seed)
    for world in factors["world"]:
        check_cases(world, [case_of(row) for row in rows if row["world"] == world])


def test_every_two_values_meet() -> None:
    check_rows(FACTORS | {"route": ["direct", "ring-attention", "nodes"]})


def test_half_precision() -> None:
    few = {"scene": ["follow-up", "more keys", "few keys"], "circulate": FACTORS["circulate"], "world": [3]}
    few |= {"dtype": [torch.bfloat16, torch.float16], "kernel": ["aten"], "layout": ["zigzag"], "groups": [4]}
    check_rows(few | {"mask": ["causal", "window both ways", "documents"]})


def test_every_two_values_meet_with_heads_cut_and_scores_changed() -> None:
    factors = FACTORS | {"softcap": [None, 0.7], "sinks": [True, False], "kernel": ["reference", "blockwise", "auto"]}
    check_rows(factors | {"ulysses_degree": [1, 2, 4, "auto"], "chunks": [0, 1, 2, "auto"], "groups": [1, 12]}, seed=1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_queries_and_keys(world: int) -> None:
    cases = []
    for new in range(2 * world + 2):
        for before in (0, 1, world, 11)[new % 2 :: 2]:
            mask = [Mask(), Mask(causal=False), Mask(window=3)][(new + before) % 3]
            circulate = FACTORS["circulate"][(new + before) % 6]
            keys = cached(world, before, new, page=2, holders=1 + new % world)
            shape = {"q_heads": 2, "kv_heads": 1, "head_dim": 8, "batch": 2, "dtype": torch.float64}
            more = {"mask": mask, "circulate": circulate, "kernel": "reference", **shape}
            cases.append(Case(seqlen=new, keys=keys, query_offset=before, **more))
    check_cases(world, cases)


def test_keys_that_no_window_reaches_may_be_dropped() -> None:
    kept = Layout.of_stretches([[(60, 70), (80, 88)], [(70, 80), (88, SPAN)]])
    case = Case(seqlen=9, query_offset=88, keys=kept, mask=Mask(window=20), dtype=torch.float64)
    check_cases(2, [case])


def byte_counts(group: Any, case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """On a rank: the bytes that were counted, and those that were predicted."""
    where = {"keys": case.keys, "query_offset": case.query_offset}
    plan = make_plan(case.seqlen, mask=case.mask, **where, strategy=case.strategy, group=group)
    sizes = {name: getattr(case, name) for name in ("batch", "q_heads", "kv_heads", "head_dim", "dtype")}
    predicted, inputs, wire = plan.bytes(**sizes), case.inputs(), plan.transport
    q, dout = plan.shard(inputs["q"], 2).requires_grad_(), plan.shard(inputs["dout"], 2)
    k, v = (plan.shard_keys(inputs[name], 2).requires_grad_() for name in ("k", "v"))
    before = wire.sent, wire.received
    burst_attention(q, k, v, plan).backward(dout)
    return (wire.sent - before[0], wire.received - before[1]), (predicted.sent, predicted.received)


@pytest.mark.parametrize("degree", [1, 2, "auto"])
def test_bytes_are_as_predicted(degree: int | str) -> None:
    total = 0
    with local_world(4) as ranks:
        for n, circulate in enumerate(FACTORS["circulate"]):
            options = {"circulate": circulate, "ulysses_degree": degree, "q_heads": 4, "kv_heads": 2, "head_dim": 8}
            mask, name = (
                [Mask(), Mask(window=9), Mask(causal=False)][n % 3],
                FACTORS["scene"][(n + len(str(degree))) % 6],
            )
            case = replace(Case(mask=mask, dtype=torch.bfloat16, batch=2, **options), **scene(name, 4))
            for counted, predicted in ranks.run(byte_counts, case):
                assert counted == predicted
                total += sum(counted)
    assert total > 0


SHAPE = Shape(batch=1, q_heads=8, kv_heads=2, head_dim=64, v_head_dim=64, io=2, partial=2, accumulate=4)


def follow_up(planner: Planner, before: int, new: int, degree: Any, **more: Any) -> Schedule:
    strategy = Strategy(layout="zigzag", ulysses_degree=degree)
    options = {"mask": Mask(), "strategy": strategy, "rank": 0, "world": 4, "query_offset": before, **more}
    return planner.choose(new, keys=cached(4, before, new, page=256), **options)


@pytest.mark.parametrize(("degree", "grad"), [(1, True), (1, False), ("auto", False)])
def test_the_side_with_fewer_bytes_circulates(degree: Any, grad: bool) -> None:
    """Few new tokens after many: queries move. Many after few: keys do, in the forward at least."""
    slow = replace(preset("cpu"), across=Link(latency=1e-4, bytes_per_second=25e6))
    planner = Planner(slow, nodes=(0, 1, 2, 3), grad=grad)
    few, many = (follow_up(planner, *each, degree) for each in ((20_000, 100), (100, 20_000)))
    asked = planner.decide(few, SHAPE)
    assert (asked.circulate, asked.groups.query) == ("pass-query", 1)
    assert few.traffic(SHAPE, "pass-query").forward_sent * 40 < few.traffic(SHAPE, "query").forward_sent
    chosen = planner.decide(many, SHAPE)
    assert chosen.circulate in ("query", "key-value")
    sent = {name: many.traffic(SHAPE, name, chosen.groups) for name in ("query", "key-value", "pass-query")}
    if degree == 1:
        least = min(sent.values(), key=lambda each: each.sent if grad else each.forward_sent)
        assert sent[chosen.circulate] == least or not grad


def test_the_backward_counts_only_if_there_is_one() -> None:
    """One key-value head of eight: keys are fewer bytes in a backward alone, queries in a forward."""
    narrow = replace(SHAPE, v_head_dim=8)
    chosen = []
    for grad in (True, False):
        planner = Planner(nodes=(0, 1, 2, 3), grad=grad)
        schedule = follow_up(planner, 1_000, 700, 1, mask=Mask(causal=False))
        chosen.append(planner.decide(schedule, narrow).circulate)
        names = ("query", "key-value", "pass-query")
        traffic = {name: schedule.traffic(narrow, name) for name in names}
        least = min(names, key=lambda name: traffic[name].sent if grad else traffic[name].forward_sent)
        assert chosen[-1] == least, (grad, chosen, traffic)
    assert chosen[0] != chosen[1]


def test_one_rank_with_all_keys_need_not_compute_everything() -> None:
    """Moving the queries would be fewer bytes, but only the rank with the keys could compute."""
    planner, keys = Planner(nodes=(0, 1, 2, 3), grad=False), Layout.of_stretches([[(0, 4096)], [], [], []])
    options = {"mask": Mask(causal=False), "strategy": Strategy(ulysses_degree=1), "rank": 0, "world": 4}
    schedule = planner.choose(512, keys=keys, **options)
    assert planner.decide(schedule, SHAPE).circulate == "query"


def test_without_a_backward_the_forward_alone_counts() -> None:
    planned = [make_plan(64, call=CallShape(grad=grad)).planner for grad in (True, False)]
    assert [planner.times for planner in planned] == [(1, 1), (1, 0)]
    assert make_plan(64, call=CallShape(grad=False, remat="layer")).planner.times == (1, 0)
    with local_world(2) as ranks:
        [text, _] = ranks.run(
            lambda group: make_plan(64, group=group, call=CallShape(grad=False)).explain(q_heads=2, head_dim=16)
        )
    assert "without a backward" in text


def test_a_plan_knows_both_sides() -> None:
    keys = [[(0, 4), (8, 10)], [(4, 8), (10, 11)]]

    def on_a_rank(group: Any) -> Plan:
        return make_plan(3, keys=keys, query_offset=8, group=group, strategy=Strategy(layout="contiguous"))

    with local_world(2) as ranks:
        one, other = ranks.run(on_a_rank)
    assert one.positions.tolist() == [8] and other.positions.tolist() == [9, 10]
    assert one.key_positions.tolist() == [0, 1, 2, 3, 8, 9] and other.key_positions.tolist() == [4, 5, 6, 7, 10]
    assert (other.length, other.key_length, other.seqlen) == (2, 5, 3)
    assert other.shard(torch.arange(3), 0).tolist() == [1, 2]
    assert other.shard_keys(torch.arange(11) * 10, 0).tolist() == [40, 50, 60, 70, 100]
    assert "keys=6 of 11" in repr(one)
    narrower = other.with_mask(Mask(window=2))
    assert narrower.key_positions.tolist() == other.key_positions.tolist() and narrower.positions.tolist() == [9, 10]
    plain = make_plan(5)
    assert plain.key_positions.tolist() == plain.positions.tolist() and plain.key_length == 5
    assert plain.shard_keys(torch.arange(5), 0).tolist() == [0, 1, 2, 3, 4]


def test_neighbouring_stretches_are_one() -> None:
    one, other = (Layout.of_stretches([x, [(9, 12)]]) for x in ([(0, 4), range(4, 9), (12, 12)], [(0, 9)]))
    assert one == other and one.description == other.description and one.lengths == (9, 3)


def test_labels_are_shifted_within_the_queries() -> None:
    plan = make_plan(4, keys=[[(0, 10)]], query_offset=6, mask=Mask(cu_seqlens=[0, 3, 8, 10]))
    assert plan.shift_labels(torch.arange(4)[None]).tolist() == [[1, -100, 3, -100]]
    assert plan.document_positions.tolist() == [3, 4, 0, 1]


def test_a_recurrent_layer_refuses_keys_apart() -> None:
    with pytest.raises(ValueError, match="can't use a plan with keys"):
        RunExchange(make_plan(3, keys=[[(0, 11)]], query_offset=8))


def over_an_encoder(group: Any) -> list[float]:
    """On a rank: the errors of cross-attention over another plan's shards."""
    make = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, 2, 7, 8, generator=make, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, 1, 30, 8, generator=make, dtype=torch.float64) for _ in range(2))
    encoder = make_plan(30, mask=Mask(causal=False), group=group)
    plan = make_plan(7, mask=Mask(causal=False), keys=encoder, group=group)
    own = [plan.shard(q, 2).requires_grad_(), *(encoder.shard(x, 2).requires_grad_() for x in (k, v))]
    out = burst_attention(*own, plan)
    grads = torch.autograd.grad(out, own, plan.shard(dout, 2))
    right = attend(q, k, v, plan.mask, dout=dout)
    expected = plan.shard(right.out, 2), plan.shard(right.dq, 2), *(encoder.shard(x, 2) for x in (right.dk, right.dv))
    return [(a - b).abs().max().item() for a, b in zip((out, *grads), expected, strict=True) if a.numel()]


def test_the_shards_of_another_plan_are_keys() -> None:
    with local_world(3) as ranks:
        assert greatest(greatest(errors) for errors in ranks.run(over_an_encoder)) <= 1e-12


def test_a_compiled_call_knows_both_lengths() -> None:
    plan = make_plan(3, keys=[[(0, 11)]], query_offset=8)
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64, requires_grad=True) for n in (3, 11, 11))
    compiled = torch.compile(lambda q, k, v: burst_attention(q, k, v, plan) * 2, backend="aot_eager", fullgraph=True)
    found, expected = compiled(q, k, v), 2 * burst_attention(q, k, v, plan)
    grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, expected)]
    assert torch.equal(found, expected) and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


OTHERS = {
    "keys: rank 0 has given, 8 (": {"keys": [[[(0, 8)], []], [[(0, 4)], [(4, 8)]]]},
    "query_offset: rank 0 has 7, rank 1 has 6": {"query_offset": [7, 6]},
    "grad: rank 0 has False, rank 1 has True": {"call": [CallShape(grad=False), CallShape()]},
    "disagree on keys": {},
}


@pytest.mark.parametrize("reported", OTHERS)
def test_ranks_with_other_keys_are_named(reported: str) -> None:
    def plan(group: Any) -> None:
        own = {name: each[make_plan(4, group=group).rank] for name, each in OTHERS[reported].items()}
        make_plan(1, group=group, **{"keys": [[(0, 8)], []], "query_offset": 7, **own})

    def call(group: Any) -> None:
        plans = [make_plan(1, keys=keys, query_offset=7, group=group) for keys in ([[(0, 8)], []], [[], [(0, 8)]])]
        plan = plans[plans[0].rank]
        q, k = (torch.randn(1, 1, n, 8) for n in (plan.length, plan.key_length))
        burst_attention(q, k, k, plan)

    with local_world(2) as ranks, pytest.raises(WorkerError, match="DisagreementError") as caught:
        ranks.run(plan if OTHERS[reported] else call)
    assert reported in str(caught.value)


def test_many_pages_are_few_tiles() -> None:
    """512 pages that all queries see are one tile, and finding it takes no longer than a few."""
    keys, queries = cached(4, 131_072, 4096, page=256), Layout("zigzag", 4096, 4, start=131_072)
    pairs = pair_tiles(queries, keys, Mask().regions(queries.stop), range(4), range(4))
    assert max(map(len, pairs.values())) == 2 and len(pairs) == 16
    assert sum(tiles.area for tiles in pairs.values()) == 4096 * 131_072 + 4096 * 4097 // 2
