"""Attention by chunks of heads: equal to all heads at once, with smaller tensors alive."""

import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from burst_attention import ExchangeError, Mask, Strategy, burst_attention, make_plan
from burst_attention.attention import head_chunks
from burst_attention.attention.head_chunks import HeadCall, Projection, attend_by_heads
from burst_attention.testing import local_world
from tests.support.conditioning import error_of

Q_HEADS, KV_HEADS, DIM, WIDTH, LENGTH = 8, 4, 6, 24, 53
MASKS = {"causal": Mask(), "window": Mask(window=9), "packed": Mask(cu_seqlens=(0, 11, 30, LENGTH))}
STRATEGIES = {
    "auto": None,
    "burst": "burst-attention",
    "ulysses": "ulysses",
    "usp": Strategy(ulysses_degree=2, layout="zigzag", chunks=1),
    "ring": "ring-attention",
}


def inputs(dtype=torch.float64):
    draw = torch.Generator().manual_seed(3)
    sizes = (2, LENGTH, WIDTH), (Q_HEADS * DIM, WIDTH), (KV_HEADS * DIM, WIDTH), (KV_HEADS * DIM, WIDTH)
    made = [torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]
    return made, torch.randn(2, LENGTH, Q_HEADS, DIM, generator=draw, dtype=torch.float64).to(dtype)


def heads_of(hidden, weight):
    return (hidden @ weight.T).unflatten(-1, (-1, DIM)).transpose(1, 2)


def projection(plan, chunks):
    q_rows, kv_rows = Q_HEADS // chunks * DIM, max(1, KV_HEADS // chunks) * DIM

    def rows(weight, chunk):
        size, at = (q_rows, chunk) if weight == 0 else (kv_rows, chunk * KV_HEADS // max(chunks, KV_HEADS))
        return ((at * size, (at + 1) * size),)

    def run(hidden, chunk, weights, tokens):
        return HeadCall(*(heads_of(hidden, w) for w in weights), plan)

    return Projection(chunks, rows, run)


def whole_and_chunked(group, chunks, strategy, mask="causal", scored=False):
    """Return (out, gradients) of all heads at once and in chunks; ``scored``: with a soft cap, and with sinks."""
    (hidden, *weights), dout = inputs(torch.float64)
    plan = make_plan(LENGTH, mask=MASKS[mask], strategy=STRATEGIES[strategy], group=group)
    logits = torch.linspace(-1, 1, Q_HEADS, dtype=torch.float64)
    results = []
    for count in (0, chunks):
        tensors = [plan.shard(hidden.detach(), 1), *(w.detach().clone() for w in weights), *[logits.clone()] * scored]
        leaves = [x.requires_grad_() for x in tensors]
        options = {"softcap": 0.8, "sinks": leaves[4] * 1.5} if scored and not count else {}
        if count:
            plain = projection(plan, count)

            def rows(weight, chunk, plain=plain, own=Q_HEADS // count):
                return ((chunk * own, (chunk + 1) * own),) if weight == 3 else plain.rows(weight, chunk)

            def run(hidden, chunk, given, tokens, plain=plain):
                call = plain.run(hidden, chunk, given[:3], tokens)
                return replace(call, softcap=0.8, sinks=given[3] * 1.5) if scored else call

            out = attend_by_heads(leaves[0], leaves[1:], Projection(count, rows, run))
        else:
            out = burst_attention(*(heads_of(leaves[0], w) for w in leaves[1:4]), plan, **options).transpose(1, 2)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, plan.shard(dout, 1))))
    return results


def check_chunks(world, *arguments):
    with local_world(world) as ranks:
        for results in ranks.run(whole_and_chunked, *arguments):
            for whole, chunked in zip(*results, strict=True):
                assert whole.abs().max() > 0
                assert error_of(chunked, whole) <= 1e-12


@pytest.mark.parametrize(("strategy", "chunks"), [("auto", 1), ("auto", 4), ("ulysses", 2)])
def test_soft_caps_and_sinks_in_chunks(strategy, chunks):
    check_chunks(2, chunks, strategy, "causal", True)


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_chunks_of_heads_are_all_heads(world, chunks):
    check_chunks(world, chunks, "auto", list(MASKS)[(world + chunks.bit_length()) % 3])


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "auto"])
def test_under_every_strategy(strategy):
    check_chunks(2, 2, strategy)


def failing(unpack=lambda rank, x: x, group=None):
    """Return what a call of two chunks and its backward raised on this rank, and its seconds."""
    (hidden, *weights), _ = inputs()
    plan = make_plan(LENGTH, group=group)
    leaves = [x.requires_grad_() for x in (plan.shard(hidden, 1), *weights)]
    plan.exchange_small([0.0])
    plan.transport.timeout = 2
    began, error = time.monotonic(), None
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, partial(unpack, plan.rank)):
            out = attend_by_heads(leaves[0], leaves[1:], projection(plan, 2))
        out.sum().backward()
    except Exception as raised:
        error = raised
    return error, time.monotonic() - began


@pytest.mark.parametrize("what", ["prepare_forward", "prepare_backward"])
def test_a_rank_that_fails_in_a_later_chunk_raises_at_once(monkeypatch, what):
    real, calls = getattr(head_chunks, what), []

    def fails(*arguments, **options):
        if threading.current_thread().name == "rank 1":
            calls.append(what)
            if len(calls) == 2:  # the others already wait for the first chunk's messages
                raise MemoryError("no room")
        return real(*arguments, **options)

    monkeypatch.setattr(head_chunks, what, fails)
    with local_world(2, timeout=30) as ranks:
        first, second = ranks.run(lambda group: failing(group=group))
    assert type(first[0]) is ExchangeError and type(second[0]) is MemoryError
    assert not hasattr(second[0], "__notes__") and second[1] < 3


def test_a_rank_that_has_lost_what_chunks_saved_raises_and_is_named_at_the_deadline():
    def unpack(rank, x):
        if rank == 1:
            raise MemoryError("no room")
        return x

    with local_world(2, timeout=2) as ranks:
        first, second = ranks.run(lambda group: failing(unpack, group=group))
    assert type(first[0]) is ExchangeError and "from rank 1 in hop 1 of the backward" in str(first[0])
    assert type(second[0]) is MemoryError
