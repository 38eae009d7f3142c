"""How many programs of the Triton kernel a step starts, with heads cut over eight ranks: none is a loop over shards."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch

from burst_attention import Mask, Strategy, burst_attention, make_plan
from burst_attention.attention.hardware import shape_of
from burst_attention.plan.program import Visit
from burst_attention.plan.rows import Direction
from burst_attention.testing import local_world

kernel_module = pytest.importorskip("burst_attention.kernels.triton.kernel")
if not kernel_module.interpreted():
    pytest.skip("threads share Triton's interpreter, not a GPU", allow_module_level=True)

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
def test_a_step_starts_one_program_forward_and_two_backward(
    mask: Mask, cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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
