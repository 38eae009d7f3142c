"""Ranks that disagree, refuse, die or stop: every rank raises, by name and in time; nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from burst_attention import DisagreementError, ExchangeError, Mask, burst_attention, make_plan
from burst_attention.testing import WorkerPool

SEQLEN = 24


def tensors(plan, *, heads: int = 2, dim: int = 8, dtype=torch.float32, grad: str = "qkv") -> list[torch.Tensor]:
    return [torch.randn(1, heads, plan.length, dim, dtype=dtype, requires_grad=n in grad) for n in "qkv"]


def caught(function, *arguments: Any, **options: Any) -> tuple[str, str, float, int]:
    """(class, text, seconds, bytes moved) of what a call raises."""
    started = time.monotonic()
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started, 0
    return "nothing", "", time.monotonic() - started, 0


def disagree(odd: dict[str, Any], warm: int = 0) -> tuple:
    """The last rank makes an odd call, after ``warm`` healthy ones; then all make a healthy one."""
    plan = make_plan(SEQLEN, timeout=5)
    last = plan.rank == plan.world - 1
    for _ in range(warm):
        burst_attention(*tensors(plan), plan).sum().backward()
    options = dict(odd) if last else {}
    call: dict[str, Any] = {n: options.pop(n) for n in ("scale", "travels", "kernel", "return_lse") if n in options}
    used = plan.with_mask(options.pop("mask")) if "mask" in options else plan
    if "keep" in options:  # a shard of another length
        q, k, v = (x[:, :, : options["keep"]] for x in tensors(plan))
    else:
        q, k, v = tensors(plan, **options)
    sent = plan.transport.sent
    result = caught(burst_attention, q, k, v, used, **call)
    moved = plan.transport.sent - sent
    burst_attention(*tensors(plan), plan).sum().backward()  # the group is unharmed
    return (*result[:3], moved)


ODD = {
    "head dim": ({"dim": 16}, "DisagreementError", "head dim"),
    "heads": ({"heads": 4}, "DisagreementError", "query heads"),
    "dtype": ({"dtype": torch.float64}, "DisagreementError", "dtype"),
    "mask": ({"mask": Mask(window=3)}, "DisagreementError", "window=3"),
    "scale": ({"scale": 0.5}, "DisagreementError", "scale"),
    "gradients": ({"grad": "qk"}, "DisagreementError", "gradients wanted"),
    "travels": ({"travels": "key-value"}, "DisagreementError", "travels"),
    "return_lse": ({"return_lse": True}, "DisagreementError", "return_lse"),
    "kernel": ({"kernel": "reference"}, "DisagreementError", "kernel"),
    "bad scale": ({"scale": float("nan")}, "ValueError", "scale=nan"),
    "bad kernel": ({"kernel": "magic"}, "ValueError", "kernel='magic'"),
    "bad dtype": ({"dtype": torch.complex64, "grad": ""}, "TypeError", "complex64"),
    "bad length": ({"keep": 2}, "ValueError", "tokens"),
}


@pytest.mark.parametrize("odd", list(ODD))
@pytest.mark.parametrize("world", [2, 3])
def test_disagreement_raises_on_every_rank(pools, world: int, odd: str) -> None:
    options, kind, told = ODD[odd]
    for rank, (raised, text, seconds, moved) in enumerate(pools(world).run(disagree, options)):
        assert (raised, moved) == (kind, 0), text
        assert told in text
        refused_here = rank == world - 1 and kind != "DisagreementError"
        assert f"rank {world - 1}" in text or refused_here
        assert seconds < 5


def test_disagreement_after_many_healthy_calls(pools) -> None:
    for raised, text, _, _ in pools(3).run(disagree, {"scale": 0.25}, 20):
        assert raised == "DisagreementError"
        assert "rank 2 has 0.25" in text and "ranks 0, 1 have" in text


def odd_plan(name: str) -> tuple:
    rank = int(os.environ["RANK"])
    options = {"seqlen": 16} | ({name: {"seqlen": 17, "layout": "striped", "route": "ring"}[name]} if rank == 1 else {})
    seqlen = options.pop("seqlen")
    return caught(make_plan, seqlen, timeout=5, **options)


@pytest.mark.parametrize("name", ["seqlen", "layout", "route"])
def test_plans_that_differ(pools, name: str) -> None:
    for raised, text, seconds, _ in pools(2).run(odd_plan, name):
        assert raised == "DisagreementError" and name in text and "rank 1" in text and seconds < 5


def one_bad_plan() -> tuple:
    rank = int(os.environ["RANK"])
    return caught(make_plan, 16, mask=Mask(prefix=99 if rank == 1 else 3), timeout=5)


def test_one_rank_refuses_its_plan(pools) -> None:
    for raised, text, _, _ in pools(2).run(one_bad_plan):
        assert raised == "ValueError" and "prefix=99" in text


def different_calls() -> tuple:
    plan = make_plan(16, timeout=5)
    if plan.rank == 0:
        return caught(plan.unshard, torch.zeros(plan.length, 2), 0)
    return caught(burst_attention, *tensors(plan), plan)


def test_different_calls(pools) -> None:
    for raised, text, _, _ in pools(2).run(different_calls):
        assert raised == "DisagreementError" and "unshard" in text and "burst_attention" in text


def fall(rank: int, how: str, when: str, route: str) -> tuple:
    """``rank`` dies or stops: before a call, between forward and backward, or in the middle of a sweep."""
    plan = make_plan(96, mask=Mask(causal=False), route=route, timeout=4)
    q, k, v = tensors(plan)
    out = burst_attention(q, k, v, plan)
    out.sum().backward()
    out = burst_attention(q, k, v, plan)

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    if plan.rank == rank and when != "in the sweep":
        end()
    if plan.rank == rank:  # stop while the backward's second visit is computed
        from burst_attention.kernels.aten import Aten

        visits = []

        class Mortal(Aten):
            def backward(self, *arguments: Any):
                visits.append(1)
                if len(visits) == 2:
                    end()
                return super().backward(*arguments)

        object.__setattr__(out.grad_fn.call, "kernel", Mortal())
    call = (lambda: burst_attention(q, k, v, plan)) if when == "before a call" else (lambda: out.sum().backward())
    first = caught(call)
    second = caught(burst_attention, q, k, v, plan)
    return (*first[:3], *second[:2])


@pytest.mark.parametrize(
    ("how", "when", "route"),
    [
        ("killed", "before a call", "direct"),
        ("killed", "before the backward", "direct"),
        ("killed", "in the sweep", "ring"),
        ("stopped", "before a call", "ring"),
        ("stopped", "before the backward", "direct"),
        ("stopped", "in the sweep", "direct"),
    ],
)
def test_a_lost_rank_is_named(how: str, when: str, route: str) -> None:
    with WorkerPool(3, timeout=30) as pool:
        results, errors, lost = pool.gather(fall, 1, how, when, route, timeout=25, patience=6)
        assert sorted(lost) == [1] and not errors, (lost, errors)
        named = 0
        for rank in (0, 2):
            raised, text, seconds, again, again_text = results[rank]
            assert raised == "ExchangeError", text
            assert f"rank {rank} could not" in text and seconds < 4 * 2 + 2
            assert ("agreement on burst_attention" if when == "before a call" else "of the backward") in text
            assert "hop " in text or when == "before a call"
            named += "rank 1" in text
            # After a failure the group is not used again: late messages of the old exchange may still be in it.
            assert again == "ExchangeError" and "failed before" in again_text
        assert named >= 1
        assert when == "in the sweep" or named == 2
        pool.broken = True


def default_timeout() -> tuple:
    plan = make_plan(16)
    if plan.rank == 1:
        time.sleep(6)
        return "slept", "", 6.0
    return caught(burst_attention, *tensors(plan), plan)[:3]


def test_the_groups_own_timeout_is_the_default() -> None:
    with WorkerPool(2, timeout=3) as pool:
        raised, _, seconds = pool.gather(default_timeout, timeout=20)[0][0]
        assert raised == "ExchangeError" and 2 < seconds < 5
        pool.broken = True


def hygiene() -> tuple:
    """(threads, file descriptors, saved digests equal, bits equal) around 200 calls."""
    torch.manual_seed(3)
    plan = make_plan(40, mask=Mask(window=17))

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        out, lse = burst_attention(*inputs, plan, return_lse=True)
        grads = torch.autograd.grad(out.square().sum() + lse.sin().sum(), inputs)
        return [out.detach(), lse.detach(), *grads]

    inputs = tensors(plan)
    before = [x.detach().clone() for x in inputs]
    first = run(inputs)
    for _ in range(5):
        run(inputs)
    census = threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        last = run(inputs)
    after = threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    same = all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    return census, after, same, all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_two_hundred_calls_leave_nothing_and_give_the_same_bits(pools, world: int) -> None:
    for before, after, same_bits, inputs_kept in pools(world).run(hygiene):
        assert before == after
        assert same_bits and inputs_kept


def test_nothing_saved_is_written_to(pools) -> None:
    pool = pools(2)
    assert pool.run(kept_by_the_backward) == [True, True]


def kept_by_the_backward() -> bool:
    """Saved tensors are freed by a backward: keep the graph and look again."""
    plan = make_plan(40)
    q, k, v = tensors(plan)
    out = burst_attention(q, k, v, plan)
    copies = [x.clone() for x in out.grad_fn.saved_tensors]
    dout = torch.randn_like(out)
    kept = dout.clone()
    out.backward(dout, retain_graph=True)
    saved = out.grad_fn.saved_tensors
    return all(torch.equal(a, b) for a, b in zip(saved, copies, strict=True)) and torch.equal(dout, kept)


def plan_dies() -> tuple:
    """A plan and its group are collected when the user drops them."""
    import gc
    import weakref

    import torch.distributed as dist

    from burst_attention.comm import link

    before = len(link._CONTROLS)
    group = dist.new_group([0, 1], backend="gloo")
    plan = make_plan(16, group=group)
    burst_attention(*tensors(plan), plan)
    ghost = weakref.ref(plan)
    dist.destroy_process_group(group)
    del plan, group
    gc.collect()
    return ghost() is None, len(link._CONTROLS) <= before


def test_a_plan_leaves_no_group_behind(pools) -> None:
    assert pools(2).run(plan_dies) == [(True, True)] * 2


def test_disagreement_is_a_value_error() -> None:
    assert issubclass(DisagreementError, ValueError) and issubclass(ExchangeError, RuntimeError)
