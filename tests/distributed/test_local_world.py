"""Ranks as threads of one process run the same algorithm, to the bit, and fail by name."""

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from burst_attention import Mask, Strategy, burst_attention, make_plan
from burst_attention.comm.agreement import DisagreementError
from burst_attention.comm.transport import ExchangeError, Receive, Send
from burst_attention.testing import Case, WorkerError, local_world
from burst_attention.testing.check import distributed_call

CASES = {
    "direct": Case(seqlen=67, dtype=torch.float64, mask=Mask(window=20), circulate="key-value", head_dim=8),
    "ring-attention": Case(seqlen=130, mask=Mask(cu_seqlens=[0, 30, 30, 101, 130]), layout="striped", head_dim=8),
}


def shards(group, case, route):
    strategy = Strategy(layout=case.layout, route=route, ulysses_degree=1)
    plan = make_plan(case.seqlen, mask=case.mask, group=group, strategy=strategy)
    results = dict(distributed_call(case, plan, case.inputs()).items())
    return results, plan.transport.sent, plan.transport.received


@pytest.mark.parametrize("route", CASES)
def test_threads_and_processes_give_the_same_bits_and_bytes(pools, route):
    with local_world(3) as ranks:
        threads = ranks.run(shards, CASES[route], route)
    for mine, theirs in zip(threads, pools(3).run(shards, None, CASES[route], route), strict=True):
        assert mine[1:] == theirs[1:]
        assert mine[1] > 0
        for name, tensor in mine[0].items():
            assert torch.equal(tensor, theirs[0][name]), name


def test_a_rank_that_raises_ends_the_others_by_name():
    def rank(group):
        plan = make_plan(32, group=group)
        if plan.rank == 1:
            raise KeyError("lost")
        q = torch.randn(1, 2, plan.length, 4)
        return burst_attention(q, q, q, plan)

    before, began = threading.active_count(), time.monotonic()
    with local_world(4, timeout=30) as ranks, pytest.raises(WorkerError, match="rank 1: KeyError") as raised:
        ranks.run(rank)
    assert time.monotonic() - began < 10, "no rank waits for the deadline"
    assert set(raised.value.errors) == {0, 1, 2, 3}
    assert all(isinstance(raised.value.errors[n], ExchangeError) for n in (0, 2, 3))
    reported = [str(raised.value.errors[n]) for n in (0, 2, 3)]
    assert all("rank 1" in text for text in reported) and any("rank 1 raised KeyError" in text for text in reported)
    assert threading.active_count() == before


@pytest.mark.parametrize(("mode", "odd"), [(torch.inference_mode, 0), (torch.inference_mode, 2), (torch.no_grad, 0)])
def test_a_rank_without_gradients_is_named(mode, odd):
    """Its buffers are inference tensors, which other threads may not write to outside of that mode."""

    def rank(group):
        plan = make_plan(32, group=group)
        q = torch.randn(1, 2, plan.length, 4, requires_grad=True)
        with mode() if plan.rank == odd else nullcontext(), pytest.raises(DisagreementError) as raised:
            burst_attention(q, q, q, plan)
        burst_attention(q, q, q, plan).sum().backward()  # the group is unharmed
        return str(raised.value)

    with local_world(3) as ranks:
        for reported in ranks.run(rank):
            assert (
                "the ranks disagree on gradients wanted by q, k, v" in reported and f"rank {odd} has [False" in reported
            )


@pytest.mark.parametrize("modes", [(torch.inference_mode,) * 2, (torch.inference_mode, nullcontext)])
def test_ranks_without_gradients_may_be_in_any_mode(modes):
    case = Case(seqlen=33)

    def rank(group):
        plan = make_plan(case.seqlen, group=group)
        with modes[plan.rank]():
            return burst_attention(*(plan.shard(case.inputs()[name], 2) for name in "qkv"), plan)

    plan, inputs = make_plan(case.seqlen), case.inputs()
    right = burst_attention(*(inputs[name] for name in "qkv"), plan)
    with local_world(2) as ranks:
        first, second = ranks.run(rank)
        (zeroth, _) = ranks.run(lambda group: make_plan(case.seqlen, group=group).positions)
    assert torch.allclose(first, right[:, :, zeroth], atol=1e-6) and second.shape[2] == 16


def test_a_rank_that_is_late_is_named():
    def rank(group):
        plan = make_plan(8, group=group, timeout=0.3)
        if plan.rank == 0:
            time.sleep(1.0)
            return
        q = torch.randn(1, 1, plan.length, 4)
        burst_attention(q, q, q, plan)

    with local_world(2) as ranks, pytest.raises(WorkerError, match=r"from rank 0|to rank 0") as raised:
        ranks.run(rank)
    assert isinstance(raised.value.errors[1], ExchangeError)


def test_messages_of_other_sizes_are_refused():
    def rank(group):
        transport = make_plan(4, group=group).transport
        peer = 1 - transport.rank
        tensor = torch.zeros(3 + transport.rank)
        sends, receives = ([Send(peer, tensor)], []) if transport.rank else ([], [Receive(peer, tensor)])
        transport.wait(transport.post(sends, receives, label="a test"))

    with local_world(2) as ranks, pytest.raises(WorkerError, match=r"a message of \[4\] .* met a buffer of \[3\]"):
        ranks.run(rank)


@pytest.mark.parametrize("arguments", [{"world": 0}, {"world": 2.0}, {"world": 2, "timeout": 0}])
def test_bad_worlds_are_refused(arguments):
    with pytest.raises(ValueError, match=r"world=|timeout="), local_world(**arguments):
        pass


def test_a_world_s_own_timeout_ends_an_exchange():
    ended = threading.Event()

    def rank(group):
        transport = make_plan(4, group=group).transport
        if group.rank() == 0:
            return ended.wait(20)  # sends nothing until the other has given up
        try:
            transport.wait(transport.post([], [Receive(0, torch.empty(1))], label="a test"))
        except ExchangeError:
            ended.set()
        return ended.is_set()

    with local_world(2, timeout=0.3) as ranks:
        assert ranks.run(rank) == [True, True]


def test_views_that_are_not_their_bytes_arrive_as_their_values():
    """A conjugate or negative view is contiguous, but its bytes are another number's."""
    whole = torch.complex(torch.arange(8.0), torch.arange(8.0) + 1)

    def rank(group):
        plan = make_plan(8, group=group)
        given = plan.shard(whole, 0)
        return plan.unshard(given.conj(), 0), plan.unshard(torch._neg_view(given.real.contiguous()), 0)

    with local_world(2) as ranks:
        for conjugate, negative in ranks.run(rank):
            assert torch.equal(conjugate, whole.conj()) and torch.equal(negative, -whole.real)
