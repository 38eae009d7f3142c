"""The memory of a call before it is made: what is counted, how it falls with the ranks; and plans that cannot be."""

from __future__ import annotations

import pytest
import torch

from burst_attention.attention.footprint import LiveBytes, peak_memory
from burst_attention.cli import main
from burst_attention.plan.cost import Shape
from burst_attention.plan.layout import Layout
from burst_attention.plan.mask import Mask
from burst_attention.plan.route import ROUTES
from burst_attention.plan.schedule import Schedule

SHAPE = Shape(batch=2, q_heads=4, kv_heads=2, head_dim=8, v_head_dim=12, io=2, partial=2, accumulate=4)


def test_live_bytes_are_those_alive_at_once() -> None:
    known = torch.zeros(10, device="meta")
    with LiveBytes(known) as live:
        a = torch.zeros(1000, device="meta")
        view = a[:10]
        del a
        assert live.most == 4040  # a view keeps its storage
        del view
        for _ in range(5):  # one after the other, at whatever address
            b = torch.zeros(1000, device="meta")
            del b
        assert live.most == 4040
        c, d = (torch.zeros(600, device="meta") for _ in range(2))
        assert live.most == 4840 and len(c) == len(d)


@pytest.mark.parametrize(
    ("travels", "units"), [("query", (9.1, 16.2, 20.3, 22.8)), ("key-value", (9.1, 15.1, 20.1, 26.1))]
)
def test_a_sweep_holds_no_more_than_it_did(travels: str, units: tuple[float, ...]) -> None:
    """In tensors of a shard: what is foretold is the sweep's own, so a sweep that held more would foretell more."""
    shape = Shape(batch=1, q_heads=8, kv_heads=8, head_dim=64, v_head_dim=64, io=2, partial=2, accumulate=4)
    for world, most in zip((1, 2, 4, 8), units, strict=True):
        schedule = Schedule(Layout("zigzag", 512 * world, world), Mask(), ROUTES["direct"], 0)
        assert peak_memory(schedule, shape, torch.bfloat16, travels) <= 1.02 * most * 512 * 8 * 64 * 2


def test_memory_falls_with_the_world() -> None:
    def memory(world: int) -> int:
        schedule = Schedule(Layout("zigzag", 4096, world), Mask(), ROUTES["direct"], 0)
        return peak_memory(schedule, SHAPE, torch.bfloat16, "query")

    # A lone rank holds no sums in fp32, one of two has but one exchange each way.
    assert memory(8) * 1.6 < memory(4) < memory(2) / 1.3 and memory(2) < memory(1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "0"], "--ranks 0"),
        (["--ranks", "2", "--q-heads", "3", "--kv-heads", "2"], "--q-heads 3"),
        (["--ranks", "2", "--window", "0"], "--window 0"),
        (["--ranks", "2", "--peak-tflops", "-1"], "--peak-tflops -1"),
    ],
)
def test_plans_that_cannot_be(arguments: list[str], told: str, capsys) -> None:
    assert main(["plan", "--seq-len", "64", *arguments]) == 2
    assert told in capsys.readouterr().err
