"""The bound that ``burst bench peers`` compares our time with."""

from __future__ import annotations

import pytest
import torch
from burst_bench.harness.bound import Exchanged, bound_of, exchanged
from burst_bench.peers import compare

from burst_attention import CallShape, Hardware, Strategy, make_plan
from burst_attention.testing import WorkerError, local_world

LINK = 80e6  # bits per second: 10 MB per second
SIZES = {"q_heads": 8, "kv_heads": 8, "head_dim": 64}


def found(**strategy):
    """Return the exchanges of both passes, and the bytes of the busiest rank in each."""

    def rank(group):
        call = CallShape(**SIZES, dtype=torch.float32)
        hardware = Hardware(rates="preset")
        plan = make_plan(4096, group=group, strategy=Strategy(**strategy), call=call, hardware=hardware)
        moved = plan.bytes(batch=1, **SIZES)
        most = max(moved.forward_sent, moved.forward_received), max(moved.backward_sent, moved.backward_received)
        return exchanged(plan, LINK), most

    with local_world(4) as ranks:
        passes, most = zip(*ranks.run(rank), strict=True)
    assert all(each == passes[0] for each in passes)
    return passes[0], [max(each) for each in zip(*most, strict=True)]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_wire_needs_at_least_the_busiest_ranks_bytes(degree):
    passes, most = found(layout="zigzag", ulysses_degree=degree, chunks=1)
    assert [each.moving for each in passes] == pytest.approx([8 * x / LINK for x in most], rel=1e-6)


def test_nothing_hides_what_one_chunk_exchanges():
    passes, _ = found(layout="contiguous", ulysses_degree=4, chunks=1)
    assert [each.open for each in passes] == pytest.approx([each.moving for each in passes])


def test_chunks_and_rings_hide_most_of_it():
    chunked, _ = found(layout="zigzag", ulysses_degree=4, cache_qkv=True, chunks=2)
    assert all(0.2 * each.moving < each.open < 0.8 * each.moving for each in chunked)
    forward, backward = found(layout="zigzag", ulysses_degree=1, circulate="query")[0]
    assert forward.open == 0, "the first visit is of local keys, and no result leaves"
    assert 0 < backward.open < 0.5 * backward.moving, "the last dQ leaves after the last visit"


def test_a_bound_is_the_larger_of_wire_and_computing():
    passes = [Exchanged(2.0, 0.5), Exchanged(2.0, 0.5)]
    assert bound_of(passes, [2.0, 6.0], cores=2) == 2.0 + 3.5


def test_each_rounds_time_is_compared_with_its_own_bound(monkeypatch):
    monkeypatch.setattr(compare, "cores", lambda: 2)
    passes = [Exchanged(2.0, 0.5), Exchanged(2.0, 0.5)]
    took = [compare.Took(11.0, 0.0, (2.0, 6.0)), compare.Took(9.0, 0.0, (4.0, 12.0))]
    assert compare.shares(took, passes) == [(2.0 + 3.5) / 11, (2.5 + 6.5) / 9]
    assert compare.shares(took, None) is None


def test_routes_that_forward_shards_have_no_bound():
    with pytest.raises(WorkerError, match="no bound is known: route=ring"):
        found(layout="zigzag", route="ring", ulysses_degree=1)
