"""What keeps one rank from a call is heard by the others at once, and the group is as good as before."""

import importlib
import threading
import time
from contextlib import nullcontext

import pytest
import torch

import burst_attention
from burst_attention import ExchangeError, PeerError, Strategy, make_plan
from burst_attention.attention import call as attention_call
from burst_attention.comm.agreement import RECORD_BYTES
from burst_attention.integrations.hf.layers.attention import Attention
from burst_attention.loss import next_token_loss, next_token_nll, token_log_probs
from burst_attention.testing import local_world

SEQLEN = 12


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error that can't tell itself")


def inputs(plan, count=3):
    make = torch.Generator().manual_seed(plan.rank)
    return [torch.randn(1, 2, plan.length, 4, generator=make).requires_grad_() for _ in range(count)]


def attention(plan):
    return burst_attention.burst_attention(*inputs(plan), plan)


def unshard(plan):
    return plan.unshard(inputs(plan, 1)[0], 2, grad="sum")


def sum_shards(plan):
    return plan.sum_shards(torch.ones(1, SEQLEN, requires_grad=True), 1)


def loss(plan, function=next_token_loss):
    hidden = torch.randn(1, plan.length, 4, generator=torch.Generator().manual_seed(plan.rank)).requires_grad_()
    return function(hidden, torch.ones(7, 4), torch.zeros(1, plan.length, dtype=torch.int64), plan)


def log_probs(plan):
    hidden, labels = torch.ones(1, plan.length, 4), torch.zeros(1, SEQLEN, dtype=torch.int64)
    return token_log_probs(hidden, torch.ones(7, 4), plan.shard_labels(labels), plan)


def model(plan):
    return Attention()(torch.nn.Module(), *inputs(plan), None, plan=plan, position_ids=plan.positions[None])[0]


CALLS = {  # of each call, what it does by itself first: made to fail on one rank
    "burst_attention": ("burst_attention.attention.call.check_types", attention),
    "burst_attention as an operator": ("burst_attention.attention.call.choose", attention),
    "make_plan": ("burst_attention.attention.new_plan.known_shape", lambda plan: make_plan(SEQLEN, group=plan.group)),
    "unshard": ("burst_attention.attention.unshard.check_transforms", unshard),
    "sum_shards": ("burst_attention.attention.unshard.check_transforms", sum_shards),
    "next_token_loss": ("burst_attention.loss.next_token.check_arguments", loss),
    "next_token_loss's logits": ("burst_attention.loss.next_token.measure", loss),
    "next_token_nll, reported in the next call": (
        "burst_attention.loss.next_token.measure",
        lambda plan: plan.exchange_small([loss(plan, next_token_nll).sum().item()]),
    ),
    "token_log_probs": ("burst_attention.loss.log_probs.check_arguments", log_probs),
    "token_log_probs' logits": ("burst_attention.loss.log_probs.measure", log_probs),
    "exchange_small": ("burst_attention.attention.plan.float", lambda plan: plan.exchange_small([1.0])),
    "an agreement itself": ("burst_attention.comm.agreement.dict", lambda plan: plan.exchange_small([1.0])),
    "a model": ("burst_attention.integrations.hf.reading.configs.check_rope", model),
}


def results_of(call, layout="contiguous", world=3, **strategy):
    """(what ``call(plan)`` raised, seconds, what a call raised afterwards) of each rank."""

    def rank(group):
        plan, reported = make_plan(SEQLEN, group=group, strategy=Strategy(layout=layout, **strategy)), []
        for made in (call, attention):
            started = time.monotonic()
            try:
                made(plan)
                reported.append(None)
            except Exception as error:
                reported.append(error)
            reported.append(time.monotonic() - started)
        return reported

    with local_world(world, timeout=3) as ranks:
        return ranks.run(rank)


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_fails_on_its_way_into_a_call_is_heard_at_once(monkeypatch, name) -> None:
    target, call = CALLS[name]
    module, function = target.rsplit(".", 1)
    module = importlib.import_module(module)
    real, failures = getattr(module, function, {"float": float, "dict": dict}.get(function)), []

    def fails_once(*arguments, **options):
        if threading.current_thread().name == "rank 1" and armed.is_set() and not failures:
            failures.append(True)
            raise MemoryError("no room")
        return real(*arguments, **options)

    armed = threading.Event()
    monkeypatch.setattr(module, function, fails_once, raising=function not in ("float", "dict"))

    def armed_call(plan):
        plan.exchange_small([0.0])  # all plans are made
        armed.set()
        return call(plan)

    for rank, (error, seconds, afterwards, _) in enumerate(results_of(armed_call, world=2)):
        assert afterwards is None and seconds < 2
        assert type(error) is (MemoryError if rank == 1 else PeerError), repr(error)
        assert "no room" in str(error) and (rank == 1 or "MemoryError" in str(error))
        assert rank == 1 or "rank 1 failed before the call" in str(error)


def fails(error):
    """A call that only rank 1 does not reach the agreement of."""

    def call(plan):
        with plan.agreement.entering("a call"):
            if plan.rank == 1:
                raise error
        plan.agreement.agree("a call", {})

    return call


# ASCII, astral, lone surrogates, control characters, mixed.
TEXTS = ["x" * 3000, "\U0001f600" * 3000, "\ud83d" * 3000, "\x01" * 3000, "a\U0001f600\ud83dü" * 1000]


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_any_text_fits_its_record(kind) -> None:
    for text in TEXTS:
        for rank, (error, seconds, afterwards, _) in enumerate(results_of(fails(kind(text)))):
            assert afterwards is None and seconds < 2
            assert type(error) is (kind if rank == 1 or kind is ValueError else PeerError)
            assert text[: RECORD_BYTES // 12 - 20] in str(error)


def test_an_error_without_a_text_is_named_by_its_class() -> None:
    (first, *_), (own, *_), _ = results_of(fails(Mute()))
    assert type(own) is Mute and type(first) is PeerError and "Mute" in str(first)


def test_the_lowest_rank_that_refuses_decides_the_class_and_a_failure_stays_its_own() -> None:
    def call(plan):
        with plan.agreement.entering("a call"):
            raise [MemoryError("no room"), TypeError("no type"), ValueError("no value")][plan.rank]

    errors = [error for error, *_ in results_of(call)]
    assert [type(error) for error in errors] == [MemoryError, TypeError, TypeError]
    assert "rank 1 refused the call: no type; this rank refused it too: no value" in str(errors[2])


def test_a_rank_keeps_its_error_if_no_peer_can_be_notified() -> None:
    def call(group):
        plan = make_plan(SEQLEN, group=group)
        if plan.rank == 1:
            with pytest.raises(ValueError, match="no value") as raised:
                fails(ValueError("no value"))(plan)
            return raised.value.__notes__[0]
        return None

    with local_world(2, timeout=0.5) as ranks:
        assert "The other ranks could not be notified: rank 1 could not" in ranks.run(call)[1]


@pytest.mark.parametrize("what", ["q was written to", "a saved tensor can't be had again", "no room on the way"])
def test_a_rank_that_fails_before_its_backward_raises_alone(what, monkeypatch):
    """Ranks agree on a call once, so the others learn of it at the deadline, or when its process ends."""
    prepare = attention_call.prepare_backward

    def prepared(*arguments, **options):
        if what == "no room on the way" and threading.current_thread().name == "rank 1":
            raise MemoryError("no room")
        return prepare(*arguments, **options)

    monkeypatch.setattr(attention_call, "prepare_backward", prepared)

    def call(plan):
        q, k, v = inputs(plan)

        def unpack(x):
            if plan.rank == 1 and what.startswith("a saved"):
                raise MemoryError("no room")
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack)
        with hooks if what.startswith("a saved") else nullcontext():
            out = burst_attention.burst_attention(q, k, v, plan)
        if plan.rank == 1 and what.startswith("q"):
            with torch.no_grad():
                q.add_(1)
        out.sum().backward()

    # Where what was fetched is kept, q itself is not needed, and may be written to.
    (first, *_), (own, seconds, *_) = results_of(call, world=2, cache_qkv=False)
    assert isinstance(own, RuntimeError | MemoryError) and not isinstance(own, PeerError | ExchangeError)
    assert seconds < 2
    assert type(first) is ExchangeError and "could not receive from rank 1" in str(first), repr(first)
