"""burst bench ablation: every variant is judged before it is timed, and differs from ours as it says."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from burst_bench.ablation import compare
from burst_bench.harness.workload import Workload

from burst_attention.attention.passes import Backward, Forward, Tensors
from burst_attention.plan.build import Builder
from burst_attention.plan.groups import Groups
from burst_attention.plan.mask import Mask
from burst_attention.plan.program import Visit
from burst_attention.plan.rows import Direction, Side
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import Link
from tests.support.schedules import make_schedule

Rows = dict[str, dict[str, Any]]
# At which heads are cut, and what was fetched is kept: whatever this machine does.
SLOW = replace(preset("cpu"), inside=Link(latency=2e-4, bytes_per_second=5e6))
SIZE = Workload(seq_len=1024, heads=4, kv_heads=4, head_dim=64)


@dataclass(frozen=True, eq=False)
class Forgetful(Forward):
    """A forward that leaves out every hop but the first."""

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Same(Backward):
    """The library's backward, under another name: so that the ablation's own assembly is taken."""


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    return compare


@pytest.fixture(scope="module")
def rows(ablation: ModuleType) -> Rows:
    named = {variant.name: variant for variant in ablation.VARIANTS}
    ours, narrow = named["published"], named["io-dtype accumulation"]
    variants = [
        *ablation.VARIANTS,
        replace(ours, name="fp32 tiles", kernel="aten-fp32"),
        replace(narrow, name="fp32 tiles, narrow sums", kernel="aten-fp32"),
        replace(ours, name="own assembly", backward=Same),
        replace(ours, name="forgetful", forward=Forgetful),
    ]
    found = ablation.compare(2, SIZE, 1, variants=[replace(variant, rates=SLOW) for variant in variants])
    return {row["name"]: row for row in found}


@pytest.mark.long
def test_every_variant_is_right_and_has_all_its_figures(ablation: ModuleType, rows: Rows) -> None:
    for variant in ablation.VARIANTS:
        row = rows[variant.name]
        assert row["correct"], row
        assert all(0 < row["errors"][name] <= row["bounds"][name] < 0.1 for name in ("out", "dq", "dk", "dv"))
        assert len(row["seconds"]) == len(row["ratios"]) == 1
        assert math.isfinite(row["seconds"][0]) and row["seconds"][0] > 0
        assert row["ratios"] == [row["seconds"][0] / rows["ours"]["seconds"][0]]
        for key in (*ablation.COUNTED, *ablation.PEAKS):
            assert len(row[key]) == 2


def test_peak_memory_holds_the_inputs_and_grows_with_eager_tiles(rows: Rows) -> None:
    inputs = 4 * SIZE.heads * SIZE.seq_len // 2 * SIZE.head_dim * 2  # bf16 on one of two ranks
    for row in rows.values():
        if row["correct"]:
            assert all(peak >= forward for forward, peak in zip(row["peak_forward"], row["peak"], strict=True))
            assert max(row["peak"]) > inputs
    for key in ("peak_forward", "peak"):
        assert max(rows["no LAO"][key]) > 1.5 * max(rows["ours"][key])


def test_a_wrong_variant_is_named_wrong_and_has_no_time(ablation: ModuleType, rows: Rows) -> None:
    row = rows["forgetful"]
    assert not row["correct"]
    assert row["errors"]["out"] > row["bounds"]["out"]
    assert all(row[key] == [] for key in ("seconds", "ratios", *ablation.COUNTED, *ablation.PEAKS))
    costs, _ = ablation.tables(list(rows.values()), "", "")
    shown = dict(zip(costs.columns[0]._cells, costs.columns[1]._cells, strict=True))
    assert shown["forgetful"] == "[red]WRONG[/]"
    assert "WRONG" not in shown["ours"]
    work = dict(zip(costs.columns[0]._cells, costs.columns[-1]._cells, strict=True))
    assert (work["published"], work["contiguous"], work["forgetful"]) == ("1.00 and 1.00", "1.50 and 1.50", "")


def test_bytes_are_in_the_order_that_the_methods_promise(rows: Rows) -> None:
    def sent(name: str) -> int:
        return sum(rows[name]["bytes_forward"]) + sum(rows[name]["bytes_backward"])

    for name, like in (
        ("pair by pair", "ours"),
        ("no overlap", "ours"),
        ("no LAO", "ours"),
        ("published, no overlap", "published"),
        ("no GAO", "published"),
        ("io-dtype accumulation", "published"),
    ):
        ours = rows[like]
        assert [rows[name][key] for key in ("bytes_forward", "bytes_backward")] == [
            ours["bytes_forward"],
            ours["bytes_backward"],
        ]
    assert sent("ring route") >= sent("published")
    assert sum(rows["key-value circulates"]["bytes_backward"]) > sum(rows["published"]["bytes_backward"])
    assert sent("RingAttention") > sent("key-value circulates")  # dK, dV in fp32


def test_ours_is_what_was_planned_and_each_part_undone_costs_bytes(rows: Rows) -> None:
    assert (
        rows["ours"]["differs"]
        == "as planned: zigzag, circulate='query', ulysses_degree=2, cache_qkv=True, chunks=2, direct"
    )

    def sent(name: str, key: str) -> int:
        return sum(rows[name][key])

    assert sent("no cache", "bytes_forward") == sent("ours", "bytes_forward")
    assert sent("no cache", "bytes_backward") > 1.2 * sent("ours", "bytes_backward")
    assert sent("heads whole", "bytes_backward") > sent("ours", "bytes_backward")
    assert rows["ours"]["scores_forward"] == [SIZE.seq_len * (SIZE.seq_len + 1) // 4] * 2, "half of the heads each"


def test_only_the_contiguous_layout_leaves_ranks_with_unequal_work(rows: Rows) -> None:
    whole = SIZE.seq_len * (SIZE.seq_len + 1) // 2
    for name, row in rows.items():
        if row["correct"]:
            forward, backward = row["scores_forward"], row["scores_backward"]
            assert sum(forward) == sum(backward) == whole
            unequal = name.startswith("contiguous")  # from 3 ranks on, either side travelling balances it
            assert (max(forward) > 1.4 * whole / 2) is (max(backward) > 1.4 * whole / 2) is unequal


def test_sums_in_the_io_dtype_cost_exactness(rows: Rows) -> None:
    """Over tiles in fp32: over bf16 tiles and two ranks nothing is left to round."""
    wide, narrow = rows["fp32 tiles"]["errors"], rows["fp32 tiles, narrow sums"]["errors"]
    assert all(narrow[name] > 1.02 * wide[name] for name in wide)


def test_the_late_merge_is_ours_bit_for_bit_and_so_is_the_own_assembly(rows: Rows) -> None:
    """Errors are sums over all entries in one order: equal to the last bit only if the results are."""
    for name in ("no GAO", "published, no overlap", "own assembly"):
        assert rows[name]["errors"] == rows["published"]["errors"]
    assert rows["no overlap"]["errors"] == rows["ours"]["errors"]


def test_no_round_is_refused(ablation: ModuleType) -> None:
    with pytest.raises(ValueError, match="rounds=0 must be at least 1"):
        ablation.compare(2, SIZE, 0)


@pytest.mark.parametrize("chunks", [0, 1, 2])
@pytest.mark.parametrize("direction", Direction)
def test_pair_by_pair_a_visit_is_of_one_pair(ablation: ModuleType, direction: Direction, chunks: int) -> None:
    """Each visit holds one pair, and each step covers the same area as in our program."""
    pairwise = next(variant.builder for variant in ablation.VARIANTS if variant.name == "pair by pair")
    how = {"mask": Mask(), "layout": "zigzag", "route": "direct", "rank": 1, "world": 4}
    ours, groups = make_schedule(64, **how), Groups(4, 4, keep=True, chunks=chunks)
    both = [ours.under(builder=each).program("query", direction, groups) for each in (Builder, pairwise)]
    whole, pairs = ([op for op in program.ops if isinstance(op, Visit)] for program in both)
    assert all(len(chunks) == 1 for visit in pairs for chunks in visit.chunks.values())
    assert len({tuple(map(tuple, visit.chunks.values())) for visit in pairs}) == len(pairs) > 2 * len(whole)
    area = [Counter[int]() for _ in both]
    for found, visits in zip(area, (whole, pairs), strict=True):
        for visit in visits:
            found[visit.step] += visit.tiles.area
    assert area[0] == area[1]


def test_without_overlap_an_exchange_is_over_when_it_was_posted(ablation: ModuleType, monkeypatch) -> None:
    waiting = next(variant.transport for variant in ablation.VARIANTS if variant.name == "no overlap")
    waited: list[Any] = []
    monkeypatch.setattr(waiting, "wait", lambda _, pending: waited.append(pending))
    posted = waiting(None).post([], [], label="hop 1")
    assert waited == [posted]


def test_without_gao_a_hop_is_kept_until_the_sweep_is_over(ablation: ModuleType) -> None:
    late = next(variant.forward for variant in ablation.VARIANTS if variant.name == "no GAO")
    make = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 3, 4, generator=make)
    work, same = late(q, q, q, 1.0, None), Forward(q, q, q, 1.0, None)
    total, part = [(torch.randn(q.shape, generator=make), torch.randn(1, 1, 3, generator=make)) for _ in range(2)]
    before, merged = total[0].clone(), tuple(x.clone() for x in total)
    work.combine(Side.QUERY, total, part)
    assert torch.equal(total[0], before)
    work.merge()
    same.combine(Side.QUERY, merged, part)
    assert torch.equal(total[0], merged[0]) and not torch.equal(total[0], before)
