"""The balanced layout: work and tokens by rank, the traffic that it avoids, and its invariants."""

import gc
import weakref
from dataclasses import replace
from itertools import accumulate, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention import Mask, Strategy, make_plan
from burst_attention.attention.batch import Plans
from burst_attention.plan.balance import most_tokens, seen
from burst_attention.plan.band import band_area
from burst_attention.plan.cost import Shape
from burst_attention.plan.layout import Layout
from burst_attention.plan.route import ROUTES
from burst_attention.plan.rows import Direction
from burst_attention.plan.schedule import Schedule
from burst_attention.plan.tile import wanted_tiles
from burst_attention.planner.planner import MOST_DERIVED, Planner
from burst_attention.planner.traffic import TrafficModel
from tests.support.schedules import make_schedule
from tests.unit.test_plan import masks, worlds

SHAPE = Shape(batch=1, q_heads=8, kv_heads=4, head_dim=8, v_head_dim=8, io=2, partial=2, accumulate=4)


def planned(mask: Mask, seqlen: int, world: int, layout: str = "balanced") -> Schedule:
    return make_schedule(seqlen, mask=mask, layout=layout, route="direct", rank=0, world=world)


def borders(lengths) -> list[int]:
    return [0, *accumulate(lengths)]


def areas(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (query owner, key owner, number of unmasked pairs) of each tile."""
    world = schedule.layout.world
    i, j, *rest = wanted_tiles(schedule.layout, schedule.layout, schedule.regions, np.ones((world, world), bool)).T
    return i, j, band_area(rest[1] - rest[0], rest[3] - rest[2], *rest[4:])


def shares(schedule: Schedule) -> np.ndarray:
    """Return each rank's work for its queries divided by the mean, counted tile by tile."""
    i, _, area = areas(schedule)
    work = np.bincount(i, area, minlength=schedule.layout.world)
    return work / work.mean()


def test_ranks_take_turns_in_having_a_token_more() -> None:
    """A split document gives some ranks an extra token; these must not always be the same ranks."""
    for world, count, more in product((2, 3), (2, 3, 4), (1, -1)):
        length = world * 1000 + more % world
        documents = Mask(cu_seqlens=borders([length] * count))
        lengths = Layout("balanced", length * count, world).cut_for(documents, length * count).lengths
        assert max(lengths) - min(lengths) <= 1


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), st.data())
def test_every_token_is_on_one_rank_and_none_holds_more_than_is_said(seqlen: int, world: int, data) -> None:
    layout = Layout("balanced", seqlen, world).cut_for(data.draw(masks(seqlen)), seqlen)
    held = [layout.positions(rank) for rank in range(world)]
    assert sorted(np.concatenate(held).tolist()) == list(range(seqlen))
    assert [len(each) for each in held] == list(layout.lengths)
    assert max(layout.lengths) <= most_tokens(seqlen, world)
    assert min(layout.lengths) > 0 or seqlen < world
    assert all((np.diff(each) > 0).all() for each in held)
    for rank in range(world):
        assert [p for s in layout.segments(rank) for p in s] == held[rank].tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 60), st.data())
def test_what_queries_see_is_counted_as_the_mask_says(length: int, data) -> None:
    mask = replace(data.draw(masks(length)), blocks=None, block=None, together=None)  # they don't count
    if mask.cu_seqlens is None:
        counts = mask.dense(length).sum(1)
        assert [seen(mask, length, n) for n in range(length + 1)] == [0, *np.cumsum(counts).tolist()]


@pytest.mark.parametrize(("world", "seqlen"), [(4, 1 << 12), (8, 1 << 16), (16, 1 << 20)])
def test_one_long_document_and_many_short_ones(seqlen: int, world: int) -> None:
    """Half of the sequence is one document: work stays within 1.08, far better than zigzag."""
    dice = np.random.default_rng(seqlen + world)
    cuts = np.sort(dice.choice(np.arange(seqlen // 2 + 1, seqlen), min(500, seqlen // 64), replace=False))
    ends = np.r_[0, seqlen // 2, cuts, seqlen]
    for mask in (Mask(cu_seqlens=ends), Mask(cu_seqlens=seqlen - ends[::-1])):
        schedule = planned(mask, seqlen, world)
        assert shares(schedule).max() <= 1.08
        assert max(schedule.layout.lengths) <= most_tokens(seqlen, world)
        assert shares(planned(mask, seqlen, world, "zigzag")).max() > 1.3


@pytest.mark.parametrize(
    ("world", "lengths"),
    [(8, [64]), (2, [64, 64, 64]), (3, [100, 60, 45]), (8, [900, 60, 45, 3, 2]), (3, [512, 256, 128, 128])],
)
def test_documents_that_fit_send_nothing(lengths: list[int], world: int) -> None:
    """There is one document of each length per rank, in any order."""
    shuffled = np.random.default_rng(7).permutation(lengths * world).tolist()
    schedule = planned(Mask(cu_seqlens=borders(shuffled)), sum(shuffled), world)
    assert set(schedule.layout.lengths) == {sum(lengths)} and shares(schedule).max() == 1
    i, j, _ = areas(schedule)
    assert (i == j).all(), "a document is on several ranks"
    for rank in range(world):
        alone = Schedule(schedule.layout, schedule.mask, schedule.route, rank)
        assert all(alone.program("query", direction).edges == [] for direction in Direction)


def ranks_of_documents(layout: Layout, ends: list[int]) -> list[int]:
    """Return on how many ranks each document lies."""
    held = [np.unique(np.searchsorted(ends, layout.positions(rank), "right")) for rank in range(layout.world)]
    return np.bincount(np.concatenate(held), minlength=len(ends)).tolist()


@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [
        ([4000] * 4, [2] * 4),
        ([4000] * 6, [2, 2, 2, 2, 4, 4]),
        ([8000] * 2 + [1000] * 16, [4, 4] + [1] * 16),
        ([2000] * 8, [1] * 8),
        ([4000, 4000, 8000], [4, 4, 8]),
        ([16000], [8]),
    ],
    ids=str,
)
def test_a_document_is_on_the_fewest_ranks_that_have_room(lengths: list[int], ranks: list[int]) -> None:
    ends = borders(lengths)
    schedule = planned(Mask(cu_seqlens=ends), ends[-1], 8)
    assert ranks_of_documents(schedule.layout, ends[1:]) == ranks
    assert shares(schedule).max() <= 1.05


@pytest.mark.parametrize(
    ("lengths", "world", "causal"),
    [
        ([11057, 11057, 11057, 6767, 5588], 7, False),
        ([5190, 5190, 925, 2705, 337, 2495, 2334, 2822, 2733, 945], 5, True),
        ([64 * n for n in (640, 866, 902, 166, 207, 98, 522)], 5, True),
        ([1, 6, 4, 20, 1, 15, 7], 7, True),
        ([30, 30, 31, 30, 31, 30, 31], 9, True),
    ],
)
def test_a_document_on_all_ranks_has_room_on_each(lengths: list[int], world: int, causal: bool) -> None:
    mask = Mask(causal=causal, cu_seqlens=borders(lengths))
    layout = Layout("balanced", sum(lengths), world).cut_for(mask, sum(lengths))
    assert max(layout.lengths) <= most_tokens(sum(lengths), world)


@pytest.mark.parametrize(("world", "seed"), [(12, 0), (12, 1), (32, 2), (32, 3)])
def test_a_long_tail_of_lengths_sends_little(world: int, seed: int) -> None:
    """Work within 1.05, tokens within 1/16; a token's key goes to 2.7 other ranks at most on average, not to all."""
    drawn = np.random.default_rng(seed).lognormal(4.8, 2.0, 7 * world)
    lengths = np.clip(drawn.astype(int), 2, 8192).tolist()
    ends = borders(lengths)
    schedule = planned(Mask(cu_seqlens=ends), ends[-1], world)
    sent = sum(n * (k - 1) for n, k in zip(lengths, ranks_of_documents(schedule.layout, ends[1:]), strict=True))
    assert shares(schedule).max() <= 1.05 and sent <= 2.7 * ends[-1]
    assert max(schedule.layout.lengths) <= 1.07 * ends[-1] / world


def test_one_document_under_any_mask() -> None:
    both_ways = Mask(), Mask(causal=False), Mask(causal=False, window=100), Mask(prefix=3000)
    for mask in (*both_ways, *(Mask(window=w) for w in (1, 100, 600, 1500, 3000))):
        schedule = planned(mask, 4096, 4)
        assert shares(schedule).max() <= 1.08
        assert mask.prefix or set(schedule.layout.lengths) == {1024}
    assert shares(planned(Mask(prefix=3000), 4096, 4, "zigzag")).max() > 1.08
    layout = planned(Mask(window=8), 4096, 4).layout
    assert [layout.segments(rank) for rank in range(4)] == [(range(n, n + 1024),) for n in range(0, 4096, 1024)]


def test_one_causal_document_is_cut_as_zigzag_does_it() -> None:
    for seqlen in (7, 64, 101):
        one, other = (planned(Mask(), seqlen, 4, name).layout for name in ("balanced", "zigzag"))
        for rank in range(4):
            assert sorted(one.positions(rank)) == sorted(other.positions(rank))


def test_a_mask_derived_later_keeps_the_tokens_and_a_length_cuts_again() -> None:
    mask, other = (Mask(cu_seqlens=[0, *ends, 120]) for ends in ([90], [10, 20, 100]))
    schedule = planned(mask, 120, 4)
    assert schedule.with_mask(other).layout is schedule.layout
    again = schedule.with_mask(other, seqlen=120)
    assert again.layout == planned(other, 120, 4).layout != schedule.layout
    assert schedule.with_mask(other).description != again.description  # a rank that chose another layout is detected


def test_all_layers_of_a_model_share_one_cut() -> None:
    plan = make_plan(400, strategy=Strategy(layout="balanced"))
    plans = Plans.by_windows(plan, [7, None, 50], Mask(cu_seqlens=(0, 300, 400)))
    assert len({each.schedule.layout for each in plans.values()}) == 1
    assert plans.one.schedule.layout.mask == Mask(cu_seqlens=(0, 300, 400))
    assert Plans.by_windows(plan, [7, 50], Mask()).one.schedule.layout.mask == Mask(window=50)


@pytest.mark.parametrize("layout", ["balanced", "zigzag"])
def test_equal_masks_share_a_schedule_and_many_leave_nothing_behind(layout: str) -> None:
    base = planned(Mask(), 64, 4, layout)
    one = base.with_mask(Mask(cu_seqlens=[0, 7, 64]), seqlen=64).schedule
    assert base.with_mask(Mask(cu_seqlens=(0, 7, 64)), seqlen=64).schedule is one
    assert base.with_mask(Mask(cu_seqlens=(0, 7, 64))).schedule is not one
    made = []
    for n in range(30):
        derived = base.with_mask(Mask(cu_seqlens=[0, 1 + n, 33 + n % 29, 64]), seqlen=64)
        program = derived.program(derived.choose_circulation(SHAPE), Direction.FORWARD)
        made.append((weakref.ref(derived.schedule), weakref.ref(program)))
        del derived, program
    gc.collect()
    assert all(sum(each() is not None for each in kind) <= MOST_DERIVED for kind in zip(*made, strict=True))


def test_many_ranks_choose_as_fewer_would() -> None:
    for layout, expected in (("zigzag", "key-value"), ("contiguous", "nearest")):
        schedule = planned(Mask(), 1 << 20, 4096, layout)
        assert schedule.choose_circulation(SHAPE) == expected
    planner = Planner(nodes=tuple(rank // 8 for rank in range(1024)))
    options = {"mask": Mask(causal=False), "layout": "contiguous", "rank": 900, "world": 1024}
    assert make_schedule(1 << 20, route="auto", planner=planner, **options).route.name == "nodes"


@settings(max_examples=60, deadline=None)
@given(worlds(most_tokens=40, most_ranks=6), st.data())
def test_rows_that_leave_hosts_are_those_of_the_edges(world, data) -> None:
    layout, mask = world
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=layout.world, max_size=layout.world))
    for route in ("direct", "nodes"):
        schedule = Schedule(layout, mask, replace(ROUTES[route], nodes=tuple(hosts)), 0)
        work = schedule.work("key-value", Direction.FORWARD)
        leaving = dict.fromkeys(hosts, 0)
        for edge in work.edges(work.cells()):
            if hosts[edge.source] != hosts[edge.target]:
                leaving[hosts[edge.source]] += edge.rows.count
        traffic = TrafficModel(layout, schedule.regions)
        assert traffic.rows_leaving(hosts, by_nodes=route == "nodes") == max(leaving.values())
