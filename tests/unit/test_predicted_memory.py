"""Predicted memory of a call: its parts, its decrease with the ranks, and impossible plans."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from burst_attention.attention.footprint import LiveBytes, peak_bytes
from burst_attention.attention.sweep import DeviceIndices, Sums
from burst_attention.plan.cost import Shape
from burst_attention.plan.groups import Groups
from burst_attention.plan.layout import Layout
from burst_attention.plan.mask import Mask
from burst_attention.plan.route import ROUTES
from burst_attention.plan.rows import Direction, Rows, Side
from burst_attention.plan.schedule import Schedule
from burst_attention.plan.strategy import Strategy
from burst_attention.planner.choice import Candidate
from burst_attention.planner.planner import Planner
from burst_train.cli.preflight import least_memory
from burst_train.config import TrainConfig
from burst_train.forecast.footprint import walked

PLACE, DTYPES = (Side.KEY, 0, 0), np.array([torch.float32, torch.bfloat16], object)


def peak_of_ranks(schedule: Schedule, shape: Shape) -> int:
    """The peak of a forward or a backward on the fullest of some ranks."""
    chosen, ranks = Planner().decide(schedule, shape), walked(schedule.layout.world)
    each = [replace(schedule, rank=rank) for rank in ranks]
    return max(peak_bytes(one, shape, torch.bfloat16, chosen, direction) for one in each for direction in Direction)


class Adding:
    """The part of a pass that sums need."""

    direction = Direction.FORWARD
    returns = (PLACE[0],)

    def blank(self, side: Side, rows: int) -> tuple[Tensor, ...]:
        return (torch.zeros(1, 1, rows, 2),)

    def combine(self, side: Side, total: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> None:
        total[0].add_(part[0])

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        return (torch.float32,)


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
    ("circulate", "units"), [("query", (9.1, 16.2, 20.8, 22.8)), ("key-value", (9.1, 15.1, 20.7, 26.1))]
)
def test_a_sweep_holds_no_more_than_it_did(circulate: str, units: tuple[float, ...]) -> None:
    """The unit is a shard's tensor. The prediction follows the sweep, so a sweep that held more would predict more.

    A CPU widens a block of a message before it adds it. That copy counts, whether the sweep or the addition makes it.
    """
    shape = Shape(batch=1, q_heads=8, kv_heads=8, head_dim=64, v_head_dim=64, io=2, partial=2, accumulate=4)
    for world, most in zip((1, 2, 4, 8), units, strict=True):
        strategy = Strategy(ulysses_degree=1, circulate=circulate)
        schedule = Schedule(Layout("zigzag", 512 * world, world), Mask(), ROUTES["direct"], 0, strategy)
        assert peak_of_ranks(schedule, shape) <= 1.02 * most * 512 * 8 * 64 * 2


@pytest.mark.parametrize("results", [False, True])
@pytest.mark.parametrize(
    ("layout", "chunks", "units"), [("zigzag", 2, (10.6, 14.4)), ("zigzag-by-halves", 4, (10.1, 15.1))]
)
def test_chunks_hold_little_more_than_a_single_one(layout, chunks, units, results):
    """The unit is a shard's tensor. Rows completed by a chunk stay unchanged until sent; others are widened.

    A single chunk adds nothing up, so it has no sums in fp32. Cached results are one more until the forward ends."""
    shape = Shape(batch=1, q_heads=8, kv_heads=8, head_dim=64, v_head_dim=64, io=2, partial=2, accumulate=4)
    for direction, most in zip(Direction, units, strict=True):
        held = {}
        for count in (1, chunks):
            chosen = Candidate(Groups(4, 4, True, count, results=results), "query")
            schedule = Schedule(Layout(layout, 2048, 4), Mask(), ROUTES["direct"], 1, chosen.strategy())
            held[count] = peak_bytes(schedule, shape, torch.bfloat16, chosen, direction) / (512 * 8 * 64 * 2)
        more = {Direction.FORWARD: 1.05, Direction.BACKWARD: -0.1}[direction] * results
        assert held[1] <= {Direction.FORWARD: 10.6, Direction.BACKWARD: 13.4}[direction] + more
        assert held[chunks] <= min(most + more, 1.13 * held[1])


def test_rows_are_pieces_until_they_meet() -> None:
    """Two parts that touch, overlap or have indices sum to the same result as one buffer, whatever was sent before."""
    dice = np.random.default_rng(0)
    for case in range(120):
        rows, right = 12, torch.zeros(1, 1, 12, 2)
        program = SimpleNamespace(sum_rows={PLACE: Rows.all(rows)}, home={PLACE[0]: [PLACE]})
        sums = Sums(program, Adding(), DeviceIndices())  # type: ignore[arg-type]
        for _ in range(6):
            start, stop = sorted(dice.choice(rows + 1, 2, replace=False).tolist())
            chosen = dice.permutation(rows)[: stop - start]
            where = slice(start, stop) if dice.random() < 0.8 else chosen
            part = torch.from_numpy(dice.integers(-8, 8, (1, 1, stop - start, 2))).to(dice.choice(DTYPES))
            right[:, :, where] += part.float()
            running = sums.running(PLACE, where) if dice.random() < 0.3 else None
            if running is None:
                sums.add(PLACE, where, (part.clone(),))
            else:
                running[0].add_(part)
        assert torch.equal(sums.leave(PLACE, slice(3, 9), (torch.float32,))[0], right[:, :, 3:9]), case
        more = slice(*sorted(dice.choice([0, 1, 2, 3], 2, replace=False).tolist()))
        sums.add(PLACE, more, (torch.ones(1, 1, more.stop - more.start, 2),))
        right[:, :, more] += 1
        for last in (slice(0, 3), slice(9, 12)):
            assert torch.equal(sums.leave(PLACE, last, (torch.float32,))[0], right[:, :, last]), case


def test_adapters_count_before_a_run_starts() -> None:
    """A rank holds its share of frozen weights and of adapters; gradients and moments are of adapters alone."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    model = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    config = TrainConfig()
    whole, adapted = (
        least_memory(replace(config, model=replace(config.model, lora=rank)), model, 2) for rank in (None, 6)
    )
    of_rank = 3 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 96) + (96 + 64))  # numbers of a rank-1 adapter
    assert adapted["weights"] - whole["weights"] == adapted["gradients"] == 4 * 6 * of_rank // 2
    assert adapted["AdamW"] == 2 * adapted["gradients"]
