"""Ranks that disagree, refuse, die or stop: every rank raises, by name and in time; nothing hangs."""

import gc
import itertools
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from burst_bench.pool import WorkerPool

from burst_attention import Hardware, Mask, Plan, Strategy, burst_attention, make_plan
from burst_attention.comm.transport import Pending, Receive
from burst_attention.kernels.aten import Aten, CpuFlash
from burst_attention.kernels.reference import Reference
from burst_attention.testing import local_world

SEQLEN = 24


def tensors(plan, *, heads=2, kv_heads=None, dim=8, value_dim=None, batch=1, dtype=torch.float32, grad="qkv"):
    shapes = {"q": (heads, dim), "k": (kv_heads or heads, dim), "v": (kv_heads or heads, value_dim or dim)}
    return [torch.randn(batch, h, plan.length, d, dtype=dtype, requires_grad=n in grad) for n, (h, d) in shapes.items()]


def caught(function, *arguments: Any, **options: Any) -> tuple[str, str, float]:
    """(class, text, seconds) of what a call raises."""
    started = time.monotonic()
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


def disagree(group: Any, odd: dict[str, Any]) -> tuple:
    """The last rank makes an odd call; then all make a healthy one."""
    options = dict(odd)
    circulate = options.pop("circulate", "auto")
    plan = make_plan(SEQLEN, timeout=5, group=group)
    last = plan.rank == plan.world - 1
    options = options if last else {}
    call: dict[str, Any] = {n: options.pop(n) for n in ("scale", "kernel", "return_lse") if n in options}
    used = plan.with_mask(options.pop("mask")) if "mask" in options else plan
    if last and circulate != "auto":
        schedule = replace(plan.schedule, strategy=replace(plan.schedule.strategy, circulate=circulate))
        used = Plan(schedule, plan.planner, plan.transport, plan.agreement)
    if "keep" in options:  # a shard of another length
        q, k, v = (x[:, :, : options["keep"]] for x in tensors(plan))
    else:
        q, k, v = tensors(plan, **options)
    sent = plan.transport.sent
    result = caught(burst_attention, q, k, v, used, **call)
    moved = plan.transport.sent - sent
    burst_attention(*tensors(plan), plan).sum().backward()  # the group is unharmed
    return (*result, moved)


ODD = {
    "head dim": ({"dim": 16}, "DisagreementError", "head dim"),
    "heads": ({"heads": 4}, "DisagreementError", "query heads"),
    "key-value heads": ({"kv_heads": 1}, "DisagreementError", "key-value heads"),
    "value head dim": ({"value_dim": 4}, "DisagreementError", "value head dim"),
    "batch": ({"batch": 2}, "DisagreementError", "batch"),
    "documents": ({"mask": Mask(cu_seqlens=range(0, 25, 2))}, "DisagreementError", "cu_seqlens"),
    "dtype": ({"dtype": torch.float64}, "DisagreementError", "dtype"),
    "mask": ({"mask": Mask(window=3)}, "DisagreementError", "window=3"),
    "scale": ({"scale": 0.5}, "DisagreementError", "scale"),
    "gradients": ({"grad": "qk"}, "DisagreementError", "gradients wanted"),
    "circulate": ({"circulate": "key-value"}, "DisagreementError", "circulate"),
    "return_lse": ({"return_lse": True}, "DisagreementError", "return_lse"),
    "kernel": ({"kernel": "reference"}, "DisagreementError", "kernel"),
    "bad scale": ({"scale": float("nan")}, "ValueError", "scale=nan"),
    "huge scale": ({"scale": 10**400}, "ValueError", "scale=1000"),
    "negative scale": ({"scale": -0.5}, "DisagreementError", "scale"),
    "vanishing scale": ({"scale": 5e-324}, "ValueError", "scale=5e-324 is too small for torch.float32"),
    "bad kernel": ({"kernel": "magic"}, "ValueError", "kernel='magic'"),
    "bad dtype": ({"dtype": torch.complex64, "grad": ""}, "TypeError", "complex64"),
    "bad length": ({"keep": 2}, "ValueError", "tokens"),
}


def by_threads(world: int, function: Any, *arguments: Any) -> list[Any]:
    with local_world(world) as ranks:
        return ranks.run(function, *arguments)


@pytest.mark.parametrize("odd", list(ODD))
def test_disagreement_raises_on_every_rank(odd: str) -> None:
    options, kind, reported = ODD[odd]
    for rank, (raised, text, seconds, moved) in enumerate(by_threads(3, disagree, options)):
        assert (raised, moved) == (kind, 0), text
        assert reported in text
        assert "rank 2" in text or (rank == 2 and kind != "DisagreementError")
        assert seconds < 5


def bad_tensors(group: Any, degree: int) -> list[tuple]:
    plan = make_plan(SEQLEN, strategy=Strategy(ulysses_degree=degree), timeout=5, group=group)
    q, k, v = (x.detach() for x in tensors(plan, heads=4, kv_heads=2))
    calls = (q, k.double(), v), (q, k, v[:, :1]), (q[:, :3], k, v), (q, k, v[:, :, 1:])
    return [caught(burst_attention, *call, plan) for call in calls]


@pytest.mark.parametrize("degree", [1, 2])
def test_bad_tensors_are_refused_with_heads_whole_or_split(degree: int) -> None:
    words = "k is torch.float64", "k has 2 heads, v has 1", "q has 3 heads", "v has shape"
    for results in by_threads(2, bad_tensors, degree):
        assert [kind for kind, _, _ in results] == ["TypeError", "ValueError", "ValueError", "ValueError"]
        assert all(text.startswith(word) for word, (_, text, _) in zip(words, results, strict=True))


def leave(scale: float) -> tuple:
    """The last rank makes another call than one that all have made before."""
    plan = make_plan(SEQLEN, timeout=2)
    for _ in range(3):
        burst_attention(*tensors(plan), plan).sum().backward()
    return caught(burst_attention, *tensors(plan), plan, scale=scale if plan.rank == plan.world - 1 else None)


def test_a_rank_that_leaves_a_repeated_call_is_named_at_the_deadline(pools) -> None:
    """Ranks compare a call once. One that then makes another waits for the others, which wait for it."""
    pool = pools(3)
    results = pool.run(leave, 0.25)
    pool.broken = True  # late messages may still arrive
    for rank, (raised, text, _) in enumerate(results):
        assert raised == "ExchangeError"
        assert ("the agreement on burst_attention" if rank == 2 else "hop 1 of the forward") in text
        assert rank == 2 or "rank 2" in text or "rank 1" in text


def plans_mixed_up(group: Any, one: list[int], other: list[int]) -> tuple:
    """The last rank takes a plan by ``other`` nodes, where all others take that by ``one``."""
    options = {"timeout": 5, "strategy": Strategy(route="nodes", ulysses_degree=1), "group": group}
    plans = [make_plan(SEQLEN, hardware=Hardware(nodes=nodes), **options) for nodes in (one, other)]
    mine = plans[plans[0].rank == plans[0].world - 1]
    sent = mine.transport.sent
    reported = caught(burst_attention, *tensors(mine), mine)
    moved = mine.transport.sent - sent
    plan = make_plan(SEQLEN, hardware=Hardware(nodes=other), **options)
    burst_attention(*tensors(plan), plan).sum().backward()
    return *reported, moved


def test_plans_by_other_nodes_are_not_the_same() -> None:
    for raised, text, _, moved in by_threads(4, plans_mixed_up, [0, 0, 1, 1], [0, 1, 0, 1]):
        assert (raised, moved) == ("DisagreementError", 0), text
        assert "disagree on route: rank 3 has nodes (2, digest" in text
    for raised, text, _, moved in by_threads(4, plans_mixed_up, [0, 0, 1, 1], [7, 7, 3, 3]):  # by other names
        assert raised == "nothing" and moved > 0, text


@pytest.mark.parametrize(
    ("odd", "kind", "reported"),
    [
        ({"seqlen": 17}, "DisagreementError", "seqlen"),
        ({"strategy": Strategy(layout="striped")}, "DisagreementError", "layout"),
        ({"strategy": Strategy(route="nodes")}, "DisagreementError", "route"),
        ({"mask": Mask(prefix=99)}, "ValueError", "prefix=99"),
        ({"timeout": -1}, "ValueError", "timeout=-1"),
        ({"strategy": "spiral"}, "ValueError", "spiral"),
    ],
)
def test_plans_that_differ_or_one_rank_refuses(odd: dict[str, Any], kind: str, reported: str) -> None:
    def plan(group: Any) -> tuple:
        options = {"seqlen": 16, "timeout": 5, "group": group} | (odd if group.rank() == 1 else {})
        return caught(make_plan, **options)

    for rank, (raised, text, seconds) in enumerate(by_threads(2, plan)):
        assert raised == kind and reported in text and seconds < 5
        assert "rank 1" in text or (rank == 1 and kind == "ValueError")


def odd_small_calls(group: Any) -> list[tuple]:
    """Rank 1 passes what can't be, or too much, or is in another call."""
    plan = make_plan(16, timeout=5, group=group)
    odd, rows = plan.rank == 1, torch.zeros(plan.length, 2)
    return [
        caught(plan.unshard, None if odd else rows, 0),
        caught(plan.exchange_small, [1 / 3] * 200 if odd else [1.0] * 200),
        caught(plan.refuse, RuntimeError("\x01" * 3000)) if odd else caught(plan.exchange_small, [1.0]),
        caught(burst_attention, *tensors(plan), plan) if odd else caught(plan.unshard, rows, 0),
        caught(plan.exchange_small, [2.0]),
    ]


def test_odd_small_calls() -> None:
    for unshard, large, refusal, other, healthy in by_threads(2, odd_small_calls):
        assert unshard[0] == "TypeError" and large[0] == refusal[0] == "ValueError" and healthy[0] == "nothing"
        assert "not a tensor" in unshard[1] and "bytes to agree on" in large[1]
        assert other[0] == "DisagreementError" and "unshard" in other[1] and "burst_attention" in other[1]


def fall(rank: int, how: str, when: str, route: str, cut: int) -> tuple:
    """``rank`` dies or stops: before a call, between forward and backward, or in the middle of a sweep."""
    strategy = Strategy(route=route, ulysses_degree=cut, chunks=2 if cut > 1 else "auto")
    plan = make_plan(96, mask=Mask(causal=False), timeout=4, strategy=strategy)
    q, k, v = tensors(plan, heads=3)
    out = burst_attention(q, k, v, plan)
    out.sum().backward()
    out = burst_attention(q, k, v, plan)

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    if plan.rank == rank and when != "in the sweep":
        end()
    if plan.rank == rank:  # stop while the backward's second visit is computed
        visits = []

        class Mortal(Aten):
            def backward(self, *arguments: Any, **options: Any):
                visits.append(1)
                if len(visits) == 2:
                    end()
                return super().backward(*arguments, **options)

        plan.kinds[:] = [replace(kind, kernel=Mortal(CpuFlash())) for kind in plan.kinds]
    call = (lambda: burst_attention(q, k, v, plan)) if when == "before a call" else (lambda: out.sum().backward())
    first = caught(call)
    second = caught(burst_attention, q, k, v, plan)
    return (*first, *second[:2])


@pytest.mark.parametrize(
    ("how", "when", "route", "cut"),
    [
        ("killed", "before the backward", "direct", 1),
        ("killed", "in the sweep", "ring-attention", 1),
        ("killed", "in the sweep", "direct", 3),
        ("stopped", "before a call", "ring-attention", 1),
        ("stopped", "in the sweep", "direct", 1),
    ],
)
@pytest.mark.long
def test_a_lost_rank_is_named(how: str, when: str, route: str, cut: int) -> None:
    with WorkerPool(3, timeout=30) as pool:
        pool.run(os.getpid)  # the ranks are there: on a busy machine that alone takes long
        results, errors, lost = pool.gather(fall, 1, how, when, route, cut, timeout=25, patience=4)
        assert sorted(lost) == [1] and not errors, (lost, errors)
        named = 0
        for rank in (0, 2):
            raised, text, seconds, again, again_text = results[rank]
            assert raised == "ExchangeError", text
            assert f"rank {rank} could not" in text and seconds < (5 if when != "in the sweep" else 9)
            assert "hop " in text and ("of the forward" if when == "before a call" else "of the backward") in text
            named += "rank 1" in text
            # After a failure the group is not used again: late messages of the old exchange may still be in it.
            assert again == "ExchangeError" and "failed before" in again_text
        assert named >= 1
        pool.broken = True


def swapped_backwards(group: Any, kind: str) -> list[tuple]:
    """Two calls, whose backwards rank 1 runs in the other order: each would add up the other's gradients."""
    plan = make_plan(SEQLEN, timeout=1, group=group)
    if kind == "unshard":
        results = [plan.unshard(tensors(plan)[0], 2, grad="sum") for _ in range(2)]
    else:
        other = plan.with_mask(Mask(window=3)) if kind == "masks" else plan
        results = [burst_attention(*tensors(p), p) for p in (plan, other)]
    if kind == "kinds":
        results[1] = plan.unshard(tensors(plan)[0], 2, grad="sum")
    order = results if plan.rank == 0 else results[::-1]
    sent = plan.transport.sent
    caught_here = [caught(x.sum().backward) for x in order]
    return [(*c, plan.transport.sent - sent) for c in caught_here]


@pytest.mark.parametrize("kind", ["calls", "masks", "unshard", "kinds"])
def test_backwards_in_different_orders_never_meet(kind: str) -> None:
    """Messages of different calls don't match, so the first waits until the deadline, and the group has failed."""
    for raised in by_threads(2, swapped_backwards, kind):
        assert [r[0] for r in raised] == ["ExchangeError"] * 2, raised
        assert "backward" in raised[0][1] and "failed before" in raised[1][1]


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=["fails", "interrupted"])
def test_a_rank_that_ends_in_the_sweep_knows_it(error: BaseException) -> None:
    """A rank's backward runs out of memory or is interrupted; its process survives, and calls again."""

    class Poor(Reference):
        def backward(self, *_: Any, **__: Any):
            raise error

    def rank(group: Any) -> tuple:
        plan = make_plan(SEQLEN, mask=Mask(causal=False), timeout=30, group=group)
        out = burst_attention(*tensors(plan), plan)
        plan.exchange_small([0.0])
        plan.transport.timeout = 2
        if plan.rank == 1:
            plan.kinds[:] = [replace(kind, kernel=Poor()) for kind in plan.kinds]
        try:
            first = caught(out.sum().backward)
        except KeyboardInterrupt:
            first = "KeyboardInterrupt", "", 0.0
        return first, caught(burst_attention, *tensors(plan), plan)

    (first, again), (failed, retried) = by_threads(2, rank)
    assert first[0] == "ExchangeError" and "rank 1" in first[1] and again[0] == "ExchangeError"
    assert failed[0] == type(error).__name__ and retried[0] == "ExchangeError" and retried[2] < 1
    assert f"{failed[0]} on this rank" in retried[1]


def default_timeout() -> tuple:
    plan = make_plan(16)
    if plan.rank == 1:
        time.sleep(6)
        return "slept", "", 6.0
    return caught(burst_attention, *tensors(plan), plan)


@pytest.mark.long
def test_the_groups_own_timeout_is_the_default() -> None:
    with WorkerPool(2, timeout=2) as pool:
        raised, _, seconds = pool.gather(default_timeout, timeout=20)[0][0]
        assert raised == "ExchangeError" and 1.5 < seconds < 5.5
        pool.broken = True


def counted() -> tuple[int, ...]:
    """Threads, file descriptors, process groups, and objects of requests under way."""
    gc.collect()
    requests = sum(isinstance(x, (dist.Work, Pending)) for x in gc.get_objects())
    tasks, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    return threading.active_count(), tasks, files, len(dist.distributed_c10d._world.pg_map), requests


def hygiene() -> tuple:
    """What is counted before and after 100 calls, whether they gave equal bits, and whether inputs were kept."""
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
    census = counted()
    for _ in range(100):
        last = run(inputs)
    after = counted()
    same = all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    return census, after, same, all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


def test_a_hundred_calls_leave_nothing_and_give_the_same_bits(pools) -> None:
    for before, after, same_bits, inputs_kept in pools(2).run(hygiene):
        assert all(now <= then for then, now in zip(before, after, strict=True)), (before, after)
        assert same_bits and inputs_kept


def test_nothing_saved_is_written_to() -> None:
    assert by_threads(2, kept_by_the_backward) == [True, True]


def kept_by_the_backward(group: Any) -> bool:
    """Saved tensors are freed by a backward: keep the graph and look again."""
    plan = make_plan(40, group=group)
    q, k, v = tensors(plan)
    out = burst_attention(q, k, v, plan)
    copies = [x.clone() for x in out.grad_fn.saved_tensors if x is not None]  # without sinks, theirs is None
    dout = torch.randn_like(out)
    kept = dout.clone()
    out.backward(dout, retain_graph=True)
    saved = [x for x in out.grad_fn.saved_tensors if x is not None]
    return all(torch.equal(a, b) for a, b in zip(saved, copies, strict=True)) and torch.equal(dout, kept)


def plan_dies() -> tuple:
    """A plan and its group are collected when the user drops them."""
    import weakref

    from burst_attention.comm import link

    before = len(link._HEALTH)
    group = dist.new_group([0, 1], backend="gloo")
    plan = make_plan(16, group=group)
    burst_attention(*tensors(plan), plan)
    ghost = weakref.ref(plan)
    dist.destroy_process_group(group)
    del plan, group
    gc.collect()
    return ghost() is None, len(link._HEALTH) <= before


def test_a_plan_leaves_no_group_behind(pools) -> None:
    assert pools(2).run(plan_dies) == [(True, True)] * 2


class SlowWork:
    """A receive that arrives after ``seconds``, or at its deadline fails as gloo's does."""

    def __init__(self, seconds: float, given: list[float]) -> None:
        self.seconds, self.given = seconds, given

    def wait(self, timeout: timedelta) -> None:
        self.given.append(timeout.total_seconds())
        time.sleep(min(self.seconds, timeout.total_seconds()))
        if self.seconds > timeout.total_seconds():
            raise RuntimeError("timed out")


def test_slow_receives_share_one_deadline() -> None:
    given: list[float] = []

    def wait(group) -> tuple[str, str, float]:
        transport = make_plan(8, group=group, timeout=0.5).transport
        receives = [Receive(0, torch.empty(1)) for _ in range(6)]
        return caught(transport.wait, Pending("slow receives", receives, [SlowWork(0.2, given) for _ in receives]))

    ((raised, text, _),) = by_threads(1, wait)
    assert raised == "ExchangeError" and "slow receives" in text
    assert len(given) <= 3 and all(later <= earlier - 0.2 for earlier, later in itertools.pairwise(given))
