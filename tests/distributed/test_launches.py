"""How many operators and Triton programs a call starts; none reads a value, for which the host would wait on a GPU."""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from burst_attention import Mask, Strategy, burst_attention, make_plan
from burst_attention.attention.hardware import shape_of
from burst_attention.plan.program import Visit
from burst_attention.plan.rows import Direction
from burst_attention.testing import local_world

kernel_module = pytest.importorskip("burst_attention.kernels.triton.kernel")
if not kernel_module.interpreted():
    pytest.skip("threads share Triton's interpreter, not a GPU", allow_module_level=True)

# Operators that start no work on a device: views, allocations, and wrappers of others that are counted.
VIEWS = """
    alias as_strided chunk detach empty empty_like expand flatten lift_fresh narrow new_empty permute
    reshape resize_ resolve_conj resolve_neg result_type select slice split split_with_sizes squeeze t to transpose
    unbind unflatten unsqueeze view view_as_real
    clone contiguous full full_like new_full new_zeros ones ones_like stack zeros zeros_like
"""
# strategy, ranks -> the most operators of a forward and of a backward, 8 key-value heads.
MOST = {
    ("auto", 1): (12, 20),
    ("burst-attention", 4): (80, 160),
    ("ring-attention", 4): (80, 160),
    ("ulysses", 4): (60, 80),
    ("usp:2", 4): (70, 140),
}


def operators_of(strategy: str, world: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> list[Counter[str]]:
    """The operators of rank 0's forward and backward, in its third call."""

    def rank(group: Any) -> list[Counter[str]] | None:
        plan = make_plan(64 * world, group=group, strategy=strategy)
        q, k, v = (torch.randn(1, n, plan.length, 16, dtype=dtype).requires_grad_() for n in (heads, 8, 8))

        def call() -> Iterator[None]:
            out = burst_attention(q, k, v, plan)
            yield
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            yield

        for _ in range(2):
            list(call())
        if plan.rank:
            return list(call()) and None
        steps, counts = call(), []
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                next(steps)
            counts.append(Counter(event.name for event in seen.events() if event.name.startswith("aten::")))
        return counts

    with local_world(world) as ranks:
        return ranks.run(rank)[0]


@pytest.mark.parametrize(("strategy", "world"), MOST)
def test_a_call_has_few_operators_and_reads_no_value(strategy, world, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    for heads in (16, 32):  # the limits hold for any number of heads
        for counts, most in zip(operators_of(strategy, world, heads), MOST[strategy, world], strict=True):
            work = Counter({name: count for name, count in counts.items() if name[6:] not in VIEWS.split()})
            assert counts["aten::_local_scalar_dense"] == 0
            assert 0 < work.total() <= most, work.most_common()


WORLD, HEADS, DIM = 8, 8, 16


def counted(group: Any, started: Counter[tuple[int, str]], mask: Mask, cut: dict[str, Any]) -> tuple[Any, ...]:
    """How heads are cut; by direction a rank's visits, the steps that have any, and the programs that were started."""
    plan = make_plan(40, mask=mask, group=group, strategy=Strategy(layout="zigzag", ulysses_degree=WORLD, **cut))
    shape = shape_of(torch.float32, batch=1, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM)
    groups, circulate = plan.planner.decide(plan.schedule, shape)
    steps = []
    for direction in Direction:
        visits = [op.step for op in plan.schedule.program(circulate, direction, groups).ops if isinstance(op, Visit)]
        steps.append((len(visits), len({*visits})))
    q, k, v = (torch.randn(1, HEADS, plan.length, DIM, requires_grad=True) for _ in range(3))
    burst_attention(q, k, v, plan, kernel="triton").sum().backward()
    me = threading.get_ident()
    return groups, steps, [started[me, name] for name in ("run_forward", "run_backward")]


@pytest.mark.parametrize(
    ("mask", "cut"),
    [
        (Mask(), {}),  # as the planner has it
        (Mask(causal=False), {"chunks": 2, "cache_qkv": False}),
    ],
    ids=["auto", "chunks, all seen"],
)
def test_a_step_starts_one_program_forward_and_two_backward(mask, cut, monkeypatch):
    started: Counter[tuple[int, str]] = Counter()
    for name in ("run_forward", "run_backward"):
        run = getattr(kernel_module.Triton, name)

        def counting(self: Any, *given: Any, run: Any = run, name: str = name, **more: Any) -> None:
            started[threading.get_ident(), name] += 1
            run(self, *given, **more)

        monkeypatch.setattr(kernel_module.Triton, name, counting)
    with local_world(WORLD) as ranks:
        found = ranks.run(lambda group: counted(group, started, mask, cut))
    for groups, ((visits, steps), (visits_back, steps_back)), (forward, backward) in found:
        assert groups.query == WORLD and steps > 0 and steps_back > 0
        assert (visits, visits_back) == (steps, steps_back)
        assert forward == steps and backward == 2 * steps_back
