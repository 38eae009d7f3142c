"""Plans of the next batch are made by a thread while a step runs; results stay the same."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.attention import batch as batches
from burst_attention.attention.batch import PlanCache, Plans
from burst_attention.integrations import hf
from burst_attention.plan.build import Builder
from burst_attention.testing import local_world

SEQLEN = 48


def borders(*inner: int) -> tuple[int, ...]:
    return (0, *inner, SEQLEN)


@pytest.fixture
def built(monkeypatch):
    """The threads that built programs, in order."""
    threads: list[threading.Thread] = []
    real = Builder.program

    def program(self: Builder) -> Any:
        threads.append(threading.current_thread())
        return real(self)

    monkeypatch.setattr(Builder, "program", program)
    return threads


def attended(plan: Any) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(plan.rank)
    q, k, v = (torch.randn(1, heads, plan.length, 8, generator=make).requires_grad_() for heads in (4, 2, 2))
    out = burst_attention(q, k, v, plan)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))


@pytest.mark.parametrize("strategy", ["burst-attention", "ulysses", None])
def test_a_call_builds_nothing_that_a_thread_has_built(strategy, built):
    def rank(group: Any) -> None:
        cache = PlanCache(make_plan(SEQLEN, group=group, strategy=strategy), [None, 9])
        for plan in cache.get(SEQLEN, borders(20)).values():
            attended(plan)
        cache.ahead(SEQLEN, borders(7, 30))
        plans = cache.get(SEQLEN, borders(7, 30))
        before = built.count(threading.current_thread())
        found = [attended(plan) for plan in plans.values()]
        assert built.count(threading.current_thread()) == before > 0
        alone = PlanCache(cache.base, [None, 9]).get(SEQLEN, borders(7, 30))
        for plan, results in zip(alone.values(), found, strict=True):
            for x, y in zip(results, attended(plan), strict=True):
                assert torch.equal(x, y)

    with local_world(2) as ranks:
        ranks.run(rank)
    assert any(each.name.startswith("burst-plans") for each in built)


def test_documents_of_the_same_length_keep_the_layout():
    base = make_plan(SEQLEN, strategy="burst-attention")
    assert PlanCache(base, [None]).get(SEQLEN, borders(3)).one.schedule.layout is base.schedule.layout


def test_what_fails_in_the_thread_is_the_callers_error():
    cache = PlanCache(make_plan(SEQLEN), [None])
    cache.ahead(SEQLEN, borders(60))
    with pytest.raises(ValueError, match="cu_seqlens"):
        cache.get(SEQLEN, borders(60))


def test_few_batches_are_planned_ahead_and_a_known_one_is_not():
    cache = PlanCache(make_plan(SEQLEN), [None])
    known = cache.get(SEQLEN, None)
    cache.ahead(SEQLEN, None)
    assert not cache._coming and cache.get(SEQLEN, None) is known
    for cut in range(1, 10):
        cache.ahead(SEQLEN, borders(cut))
    assert len(cache._coming) == batches.MOST_AHEAD
    assert cache.get(SEQLEN, borders(1)).one.mask == Mask(cu_seqlens=borders(1))
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.get(SEQLEN, borders(3)).one.mask == Mask(cu_seqlens=borders(3))


def packed(n: int) -> dict[str, torch.Tensor]:
    cut = 5 + 7 * n
    ids = torch.randint(64, (1, SEQLEN), generator=torch.Generator().manual_seed(n))
    positions = torch.cat([torch.arange(cut), torch.arange(SEQLEN - cut)])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def test_a_models_losses_are_the_same_and_its_forward_plans_nothing(monkeypatch):
    planned: list[str] = []
    real = Plans.by_windows.__func__

    def by_windows(cls: Any, *given: Any) -> Plans:
        if given[0].world == 2:  # an earlier test's thread may still run
            planned.append(threading.current_thread().name)
        return real(cls, *given)

    monkeypatch.setattr(Plans, "by_windows", classmethod(by_windows))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}

    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64)
    weights = LlamaForCausalLM(config).state_dict()

    def rank(group: Any) -> list[list[float]]:
        losses = []
        for ahead in (False, True):
            model = LlamaForCausalLM(copy.deepcopy(config))
            model.load_state_dict(weights)
            hf.parallelize(model, group)
            given = [packed(n) for n in range(5)]
            losses.append([model(**each).loss.item() for each in (hf.ahead(model, given) if ahead else given)])
        return losses

    with local_world(2) as ranks:
        for alone, ahead in ranks.run(rank):
            assert alone == ahead
    threads = [name.startswith("burst-plans") for name in planned]
    assert (threads.count(True), threads.count(False)) == (10, 10), "each of two ranks has five batches, twice"


def test_a_model_that_is_not_parallelized_is_refused():
    with pytest.raises(TypeError, match=r"call hf\.parallelize first"):
        list(hf.ahead(torch.nn.Linear(2, 2), []))
