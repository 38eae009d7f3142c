"""Planning for thousands of ranks: function calls and memory, and choices made in a smaller world."""

import cProfile
import pstats
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from burst_attention import Mask
from burst_attention.plan.cost import Shape
from burst_attention.plan.groups import Groups
from burst_attention.plan.layout import Layout
from burst_attention.plan.rows import Direction
from burst_attention.planner import planner as planner_module
from burst_attention.planner import standing
from burst_attention.planner.explain import explain
from burst_attention.planner.planner import Planner
from burst_attention.planner.presets import preset
from burst_attention.planner.standing import MOST_ON_PAPER, extended, few_nodes, shortened, stand_in
from burst_attention.planner.timing import Timed
from tests.support.schedules import Planned, make_schedule

SHAPE = Shape(batch=1, q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128, io=2, partial=2, accumulate=4)
TOKENS = 10_000_000


def documents(count: int, seqlen: int = TOKENS) -> Mask:
    cuts = np.sort(np.random.default_rng(0).integers(1, seqlen, count - 1)).tolist()
    return Mask(cu_seqlens=[0, *cuts, seqlen]) if count > 1 else Mask()


def planned(world: int, mask: Mask, seqlen: int = TOKENS, rates: str = "h100-hgx+infiniband-400g") -> Planned:
    planner = Planner(preset(rates), tuple(rank // 8 for rank in range(world)), SHAPE)
    options = {"layout": "auto", "route": "auto", "ulysses_degree": "auto", "planner": planner}
    return make_schedule(seqlen, mask=mask, rank=world // 3, world=world, **options)


def calls_of(make: Callable[[], object]) -> int:
    with cProfile.Profile() as profile:
        make()
    return pstats.Stats(profile).total_calls


def peak_bytes(make: Callable[[], object]) -> int:
    tracemalloc.start()
    make()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def decided(world: int, mask: Mask) -> None:
    schedule = planned(world, mask)
    schedule.decide(SHAPE)
    explain(schedule.planner, schedule.schedule, SHAPE)


def programs(circulate: str = "query", world: int = 8, **options: object) -> None:
    options = {"layout": "zigzag", "route": "direct"} | options
    schedule = make_schedule(1 << 20, rank=world // 3, world=world, **options)
    assert all(schedule.program(circulate, direction).ops for direction in Direction)


NODES = Planner(nodes=tuple(rank // 8 for rank in range(64)))
COUNTED = {  # at most half more than today
    "2,000 documents": (lambda: programs(mask=documents(2000, 1 << 20)), 40_000),
    "ring-attention": (lambda: programs("key-value", 64, mask=Mask(), route="ring-attention", planner=NODES), 400_000),
    "65,536 pairs": (lambda: planned(256, Mask()).choose_call(SHAPE), 360_000),
    "4096 ranks, 10,000 documents": (lambda: decided(4096, documents(10_000)), 1_200_000),
}


@pytest.mark.parametrize("what", COUNTED)
def test_planning_takes_few_function_calls(what: str) -> None:
    make, most = COUNTED[what]
    assert calls_of(make) <= most


@pytest.mark.long
def test_a_plan_for_thousands_of_ranks_takes_little_memory() -> None:
    for world, count in ((1024, 1), (4096, 10_000)):
        mask = documents(count)
        assert peak_bytes(lambda world=world, mask=mask: decided(world, mask)) < 150e6  # gigabytes for all traffic


@pytest.mark.long
def test_a_rank_builds_its_own_programs_from_the_messages_it_takes_part_in() -> None:
    """Heads are split here, so most messages of the cells that a rank must know pass it by."""
    schedule = planned(1024, Mask())
    groups, circulate = schedule.decide(SHAPE)
    assert groups.query == 8 and len(schedule.program(circulate, Direction.FORWARD, groups).ops) > 64
    fresh = [planned(1024, Mask()) for _ in "ab"]

    def make() -> None:
        one = fresh.pop()
        for each in Direction:
            one.program(circulate, each, groups)

    assert calls_of(make) < 2_500_000  # they are 1.1 million; from all messages 7.1 million
    assert peak_bytes(make) < 250e6


@pytest.mark.parametrize(
    ("world", "mask", "rates"),
    [
        (96, "documents", "h100-hgx+infiniband-400g"),
        pytest.param(96, "window", "cpu", marks=pytest.mark.slow),
        pytest.param(128, "causal", "h100-hgx+infiniband-400g", marks=pytest.mark.slow),
        pytest.param(128, "documents", "cpu", marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_a_small_worlds_choice_is_as_good_as_the_whole_worlds(monkeypatch, world, mask, rates):
    seqlen = world << 13
    seen = {"causal": Mask(), "window": Mask(window=20_000), "documents": documents(40, seqlen)}[mask]
    whole = planned(world, seen, seqlen, rates)
    best = whole.choose_call(SHAPE)
    monkeypatch.setattr(planner_module, "MOST_ON_PAPER", 48)
    chosen = planned(world, seen, seqlen, rates)
    groups, circulate = chosen.decide(SHAPE)
    monkeypatch.setattr(planner_module, "MOST_ON_PAPER", 128)
    by_whole = [one.seconds for one in Planned(whole.planner, chosen.schedule).timed(SHAPE, circulate, groups)]
    aside = sum(one.seconds for one in whole.timed(SHAPE, best.candidate.circulate, best.candidate.groups))
    assert sum(by_whole) <= (1.25 if mask == "documents" else 1.02) * aside


def test_which_ranks_stand_for_many() -> None:
    ways = [Groups(n, n) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert stand_in(ways, 1024) == (64, ways[:-1])  # of 64 groups they would be one context slice
    assert stand_in([Groups(24, 24)], 1536) == (48, [Groups(24, 24)])
    assert few_nodes(tuple(n // 8 for n in range(1024)), 64) == tuple(n // 8 for n in range(64))
    assert few_nodes(tuple(n // 72 for n in range(1152)), 64) == tuple(n // 16 for n in range(64))
    assert few_nodes((0,) * 1024, 64) == (0,) * 64 and few_nodes(None, 64) is None


def test_a_smaller_world_of_no_tokens_has_none() -> None:
    layout, mask = shortened(Layout("zigzag", 0, 160), Mask(window=3), 8)
    assert (layout.seqlen, layout.world, mask.window) == (0, 8, 1)


def test_times_of_a_large_world_are_extrapolated_from_two_small_ones() -> None:
    few, many = (
        Timed(seconds=3.0 * n, computing=2.0 * n, visits=n, launches=n, inside=10 * n, across=n) for n in (4, 8)
    )
    whole = extended(few, many, (4, 8, 100), "key-value")
    assert (whole.computing, whole.seconds, whole.visits, whole.inside) == (200, 300, 100, 1000)


def test_choosing_again_hashes_no_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a known mask looks up its choice by a few numbers."""
    schedule = planned(MOST_ON_PAPER // 4, documents(10_000))
    first = schedule.decide(SHAPE)

    def once_more(*_: object) -> None:
        raise AssertionError("looked at the documents again")

    monkeypatch.setattr(Mask, "__hash__", once_more)
    monkeypatch.setattr(planner_module, "representative", once_more)
    monkeypatch.setattr(standing, "representative", once_more)
    assert schedule.decide(SHAPE) == first
    assert schedule.choose_groups(SHAPE) == replace(
        first[0], chunks=schedule.choose_call(SHAPE).candidate.groups.chunks
    )
