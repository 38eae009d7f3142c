"""One derivative, backward, is there; any other is refused by name, on all ranks, and is never zeros."""

import time

import pytest
import torch
from torch.autograd import forward_ad

from burst_attention import Strategy, burst_attention, make_plan
from burst_attention.loss import next_token_loss, token_log_probs
from burst_attention.testing import local_world

SEQLEN = 8


def tensor(plan, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(plan.rank), dtype=torch.float64)


def attention_of(attend):
    def function(plan):
        k, v = (tensor(plan, 1, 2, plan.length, 4) for _ in range(2))
        return lambda q: attend(q, k, v, plan)

    return function


def loss_of(plan):
    weight, labels = tensor(plan, 7, 4), torch.zeros(1, plan.length, dtype=torch.int64)
    return lambda hidden: next_token_loss(hidden.flatten(0, 1)[:1], weight, labels, plan)


def log_probs_of(plan):
    weight, labels = tensor(plan, 7, 4), plan.shard_labels(torch.zeros(1, SEQLEN, dtype=torch.int64))
    return lambda hidden: token_log_probs(hidden.flatten(0, 1)[:1], weight, labels, plan).log_probs


CALLS = {
    "burst_attention": attention_of(burst_attention),
    "next_token_loss": loss_of,
    "token_log_probs": log_probs_of,
    "unshard": lambda plan: lambda x: plan.unshard(x, 2, grad="sum"),
    "sum_shards": lambda plan: lambda x: plan.sum_shards(torch.cat([x] * plan.world, 2), 2),
}


def forward_mode(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def forward_over_reverse(function, x):
    y = x.clone().requires_grad_()
    out = function(y)
    with forward_ad.dual_level():
        given = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        return forward_ad.unpack_dual(torch.autograd.grad(out, y, given)[0]).tangent


def second(function, x):
    y = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(y).square().sum(), y, create_graph=True)
    return torch.autograd.grad(grad.sum(), y, allow_unused=True)


DERIVATIVES = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "forward mode": forward_mode,
    "forward over reverse": forward_over_reverse,
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "vmap of another": lambda f, x: torch.func.vmap(lambda y: f(x) * y)(torch.ones(2, dtype=x.dtype)),
    "jvp by two backwards": lambda f, x: torch.autograd.functional.jvp(f, x, torch.ones_like(x)),
    "second": second,
}


def refused(plan, call, derivative):
    x = tensor(plan, 1, 2, plan.length, 4)
    with pytest.raises((ValueError, RuntimeError)) as raised:
        derivative(CALLS[call](plan), x)
    return str(raised.value)


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_other_derivatives_are_refused_by_name(derivative) -> None:
    for call in CALLS:
        text = refused(make_plan(SEQLEN, strategy=Strategy(layout="contiguous")), call, DERIVATIVES[derivative])
        assert call in text
        assert any(reported in text for reported in ("torch.func", "no forward-mode", "can be differentiated once"))


def one_asks(group, call):
    """Rank 1 asks for a tangent, rank 0 for the call alone; then both make it."""
    plan = make_plan(SEQLEN, group=group, strategy=Strategy(layout="contiguous"))
    x, plain = tensor(plan, 1, 2, plan.length, 4), lambda f, x: f(x)
    started = time.monotonic()
    text = refused(plan, call, forward_mode if plan.rank == 1 else plain)
    assert time.monotonic() - started < 2
    CALLS[call](plan)(x)
    return text


def test_one_rank_that_asks_is_heard_by_all() -> None:
    for call in CALLS:
        with local_world(2, timeout=4) as ranks:
            texts = ranks.run(one_asks, call)
        assert all("has a tangent" in text for text in texts) and "rank 1 refused" in texts[0]


def test_batches_of_gradients_are_right_or_refused() -> None:
    plan = make_plan(SEQLEN)
    x = tensor(plan, 1, 2, SEQLEN, 4)
    jacobian, function = torch.autograd.functional.jacobian, CALLS["burst_attention"](plan)
    assert torch.equal(jacobian(function, x, vectorize=True), jacobian(function, x))
    for call in ("next_token_loss", "token_log_probs", "unshard", "sum_shards"):
        with pytest.raises(ValueError, match=f"the backward of {call} takes no batches of gradients"):
            jacobian(CALLS[call](plan), x, vectorize=True)


def test_what_is_traced_is_refused_too() -> None:
    torch._dynamo.reset()
    plan = make_plan(SEQLEN)
    x = tensor(plan, 1, 2, SEQLEN, 4)

    def tangent(x):
        return torch.func.jvp(CALLS["burst_attention"](plan), (x,), (x,))[1]

    with pytest.raises(Exception, match=r"can't be transformed by torch\.func"):
        torch.compile(tangent, backend="eager")(x)
