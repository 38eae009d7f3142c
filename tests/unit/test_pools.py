"""Pools of keys: who makes which, and which each query sees, against a count token by token."""

import itertools

import numpy as np
import pytest
import torch

from burst_attention import make_plan
from burst_attention.kernels import chosen
from burst_attention.plan.layout import Layout
from burst_attention.plan.mask import Mask
from burst_attention.recurrence.pools import PastPools, Pools, pooled, pooled_in_step, pools_of, pools_of_step
from burst_attention.recurrence.runs import runs_of
from burst_attention.testing import local_world

DOCUMENTS = {"one": (0, 61), "packed": (0, 1, 5, 5, 9, 33, 40, 61), "short": (0, 2)}


def of_all(documents, size):
    """(first token of each pool, (first, stop) of each position), counted token by token."""
    starts, seen = [], []
    for start, stop in itertools.pairwise(documents):
        first = len(starts)
        for at in range(start, stop):
            if (at + 1 - start) % size == 0:
                starts.append(at + 1 - size)
            seen.append((first, len(starts)))
    return starts, seen


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "zigzag-per-document", "balanced"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_pools_are_those_counted(layout, documents, size):
    borders = DOCUMENTS[documents]
    starts, seen = of_all(borders, size)
    for world in (1, 2, 4):
        cut = Layout(layout, borders[-1], world).cut_for(Mask(cu_seqlens=borders), borders[-1])
        for rank in range(world):
            pools = Pools(size, runs_of(cut, borders, rank))
            assert pools.starts.tolist() == starts and pools.layout.seqlen == len(starts)
            places = cut.positions(rank)
            assert np.stack(pools.seen, 1).tolist() == [list(seen[at]) for at in places]
            assert len(pools.tails()) == len(places) and pools.count == len(starts) and not pools.held
            made = [starts[n] + size - 1 for n in pools.layout.places(rank)]
            assert made == sorted({*places.tolist()} & {start + size - 1 for start in starts})


def test_pools_of_one_rank_are_made_of_their_own_tokens():
    plan = make_plan(23, mask=Mask(cu_seqlens=(0, 6, 23)))
    x = torch.arange(46.0).view(1, 23, 2)
    keys = pooled(x, lambda x: x.unflatten(1, (-1, 5)).sum(2), pools_of(plan, 5), plan)
    assert torch.equal(keys[0], torch.stack([x[0, at : at + 5].sum(0) for at in (0, 6, 11, 16)]))
    assert pools_of(plan, 5) is pools_of(plan, 5)


def of_pieces(group, x, size, pieces):
    """Check pools, in pieces of a sequence: on every rank in a step, else on shards behind what rank 0 holds."""
    base, past, first = make_plan(64, group=group, strategy="layout=zigzag,ulysses_degree=1"), PastPools(), 0

    def pool(x):
        return x.unflatten(1, (-1, size)).sum(2)

    starts, seen = of_all((0, x.shape[1]), size)
    for count, shards in pieces:
        stop = first + count
        if shards:
            held = [[range(first)], *[[]] * (base.world - 1)]
            plan = base.following(count, first=first, mask=Mask(), held=held)
            pools, places = pools_of(plan, size), plan.positions.tolist()
            keys = pooled(plan.shard(x[:, first:stop], 1), pool, pools, plan, past=past)
        else:
            pools, places = pools_of_step(first, stop, size), [*range(first, stop)]
            keys = pooled_in_step(x[:, first:stop], pool, pools, past)
        assert pools.count == stop // size and torch.equal(keys, pool(x[:, : stop // size * size]))
        assert pools.starts.tolist() == starts[: pools.count]
        assert np.stack(pools.seen, 1).tolist() == [list(seen[at]) for at in places]
        for at, tail in zip(places, pools.tails().tolist(), strict=True):
            own = [*range((at + 1) // size * size, at + 1)]
            assert tail == own + [-1] * (size - 1 - len(own))
        first = stop
    assert first == x.shape[1]
    return past


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("begins_on_shards", [False, True])
def test_pools_in_pieces_are_those_of_the_whole(size, begins_on_shards):
    """Pools are completed by a step, by another rank's shard, or by a later piece; the last states are kept."""
    x = torch.arange(2 * 98 * 3.0).view(2, 98, 3)
    pieces = [(13, True)] if begins_on_shards else [(2, False), (11, False)]
    pieces += [(33, True), (1, False), (1, False), (40, True), (10, False)]
    for world in (1, 3):
        with local_world(world) as ranks:
            for past in ranks.run(of_pieces, x, size, pieces):
                assert size == 1 or torch.equal(past.columns, x[:, -size:].mT)


def test_pools_of_other_tokens_are_refused():
    x, keys = torch.zeros(1, 8, 3), torch.zeros(1, 2, 3)
    wrong = [
        (PastPools(), 8, "has 0 pools of keys, without the last tokens, but 2 pools and 0 tokens come before"),
        (PastPools(torch.zeros(1, 3, 4), keys=keys), 12, "has 2 pools of keys, but 3 pools and 0 tokens come before"),
        (PastPools(keys=keys), 9, "has 2 pools of keys, without the last tokens, but 2 pools and 1 tokens come before"),
    ]
    for past, first, said in wrong:
        with pytest.raises(ValueError, match=said):
            pooled_in_step(x, lambda x: x.unflatten(1, (-1, 4)).sum(2), pools_of_step(first, first + 8, 4), past)


@pytest.mark.parametrize("keys", [5, 300])
def test_a_choice_between_two_keys(keys, monkeypatch):
    """In blocks of queries and keys, it is that of whole rows of scores."""
    monkeypatch.setattr(chosen, "_ROWS", 7)
    monkeypatch.setattr(chosen, "_COLUMNS", 64)
    torch.manual_seed(0)
    q, k, weights = torch.randn(2, 16, 40, 8), torch.randn(2, 1, keys, 8), torch.randn(2, 16, 40)
    first = torch.randint(0, keys, (40,)).sort().values
    stop = torch.maximum(first, torch.randint(0, keys + 1, (40,)))
    found = chosen.positions_of(chosen.choose_between(q, k, weights, first, stop, 4, 0.5))
    scores = (weights[..., None] * (0.5 * q @ k.mT).relu()).sum(1)
    for row, at in itertools.product(range(2), range(40)):
        of_query = scores[row, at, first[at] : stop[at]]
        best = (of_query.topk(min(4, len(of_query))).indices + first[at]).sort().values.tolist()
        assert found[row, 0, at].tolist() == [-1] * (4 - len(best)) + best
