"""Measure all rates from which a plan's time is predicted, better than a group's first plan does."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..kernels.contract import merge_
from ..plan.groups import WHOLE
from ..plan.strategy import Strategy
from ..plan.tile import Tile
from ..planner.passes import passes
from ..planner.planner import traffic_model_of
from ..planner.rates import Overhead, Rates, Speed
from .call import burst_attention
from .hardware import Hardware, shape_of, this_machine, usual_rates
from .new_plan import make_plan, single_rank_plan
from .plan import Plan
from .probe import DIM, FLOPS, SMALL, Passes, Probe, full
from .probe_chosen import chosen_kernels

HEADS = 2  # of a large tile
WEIGHT = 8192, 4096  # rows and columns of a weight that no cache holds


def calibrate(
    *, group: Any = None, device: torch.device | str = "cpu", name: str = "", rows: int = 1024, repeats: int = 7
) -> Rates:
    """Measure the rates of the group's ranks. Every rank must call it, and gets the same result.

    Links that don't exist here come from the usual preset for the device, and ``source`` says so. On one node these
    are the links across nodes; on one rank, all links.

    Args:
        group: as for :func:`burst_attention.make_plan`.
        device: where kernels run and messages are sent from.
        name: the machine's name, in a few words.
        rows: of a large tile.
        repeats: of each measurement. With the defaults all of them take about half a minute.
    """
    device = torch.device(device)
    on_gpu, strategy = device.type == "cuda", Strategy(layout="zigzag", ulysses_degree=1, circulate="query")
    plan = make_plan(64, group=group, strategy=strategy, hardware=Hardware(rates=usual_rates(on_gpus=on_gpu)))
    usual, nodes = plan.planner.rates, plan.planner.nodes or (0,) * plan.world  # rank 0's rates
    probe = Probe(plan.agreement, plan.transport, nodes, device, repeats=repeats, thorough=True)
    inside, across = probe.links()
    assumed = [what for what, link in (("inside of a node", inside), ("across", across)) if link is None]
    source = f"measured by burst calibrate on {plan.world} ranks, {device.type}, torch {torch.__version__}"
    if assumed:
        source += f"; links {' and '.join(assumed)} as estimated by {usual.name}"
    half, single, double = (_tiles(probe, dtype, rows) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    rates = Rates(
        name=name or f"{device.type}, {plan.world} ranks",
        source=source,
        inside=inside or usual.inside,
        across=across or usual.across,
        half=half.speed,
        single=single.speed,
        double=double.speed,
        overhead=_overhead(probe, plan, usual.overhead, half, rows),
        measured_on=this_machine(plan.world, on_gpu),
        chosen=chosen_kernels(probe),
    )
    if plan.world == 1:
        return rates
    if device.type == "cpu":
        busy = probe.busy(*_weight(probe, torch.float32))  # of all links together
        inside, across = (link and replace(link, busy=busy) for link in (inside, across))
        rates = replace(rates, inside=inside or usual.inside, across=across or usual.across)
    if probe.clock is not time.process_time:
        return rates
    fold = min(rates.overhead.fold, _fold_of_calls(probe, plan, rates, rows, half.seconds))
    return replace(rates, overhead=replace(rates.overhead, fold=fold))


@dataclass(frozen=True)
class _OfTiles:
    """What a kernel's tiles cost."""

    speed: Speed
    launches: Passes
    block: float  # the block size that a mask's border costs, in rows
    row: float  # seconds per row of one head: the mean of a forward and of half a backward, which handles keys too
    seconds: float  # of both passes of a large tile without a mask


def _tiles(probe: Probe, dtype: torch.dtype, rows: int) -> _OfTiles:
    """Measure a kernel by a small, a narrow, a large and a causal tile."""
    tiles = full(SMALL), full(rows, rows // 4), full(rows), Tile(0, rows, 0, rows, 0, rows - 1)
    small, narrow, whole, causal = probe.passes([(dtype, tile) for tile in tiles], HEADS)
    cells, triangle = HEADS * rows * rows, rows * (rows + 1) / 2
    # Three quarters of the columns give the time per cell. Some kernels are much faster with few columns; for them the
    # difference to the small tile is less, and counts.
    added = [min((wide - some) / 0.75, wide - less) for wide, some, less in zip(whole, narrow, small, strict=True)]
    slopes = [max(1e-12, seconds) / cells for seconds in added]
    rest = [max(0.0, took - slope * cells - less) for took, slope, less in zip(whole, slopes, small, strict=True)]
    border = [
        (took - less - more) / slope / HEADS - triangle
        for took, less, more, slope in zip(causal, small, rest, slopes, strict=True)
    ]
    return _OfTiles(
        speed=Speed(forward=FLOPS[0] / slopes[0], backward=FLOPS[1] / slopes[1]),
        launches=small,
        block=min(float(rows), max(0.0, sum(border) / rows)),  # the mean of both passes; each row loses half a block
        row=(rest[0] + rest[1] / 2) / 2 / (HEADS * rows),
        seconds=sum(whole),
    )


def _overhead(probe: Probe, plan: Plan, usual: Overhead, half: _OfTiles, rows: int) -> Overhead:
    """Measure what a merge, a visit, a pass and reading weights cost, in addition to the tiles of a kernel."""
    out, part = (probe.random(1, HEADS, 4 * rows, DIM, dtype=torch.float32) for _ in range(2))
    lse = torch.zeros(1, HEADS, 4 * rows, device=probe.device)
    (merged,) = probe.seconds([lambda: merge_(out, lse, part, lse.clone())])
    dtype = torch.bfloat16 if probe.device.type == "cuda" else torch.float32
    weight, row = _weight(probe, dtype)
    # The median: on shared cores the fastest repeat is one in which other ranks left the memory alone.
    (read,) = probe.seconds([lambda: torch.nn.functional.linear(row, weight)], of=statistics.median)
    alone, launch = single_rank_plan(SMALL), sum(half.launches)
    (here,) = probe.seconds([lambda: _call(probe, alone)])
    visit = max(0.0, (here - launch) / 4)  # half of each pass is the visit, half the operator around it
    (together,) = probe.seconds([lambda: _call(probe, plan)], time.perf_counter)
    return replace(
        usual,
        launch_forward=half.launches[0],
        launch_backward=half.launches[1],
        block=half.block,
        fold=out.nbytes / max(1e-9, merged + half.row * lse.numel()),
        visit=visit,
        call=max(0.0, together / 2 - plan.world * (visit + launch / 2)),
        at_once=0.0 if probe.device.type == "cuda" else probe.at_once(),
        read=weight.nbytes / max(1e-9, read),
    )


def _weight(probe: Probe, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight that no cache holds, and a row to multiply."""
    return torch.full(WEIGHT, 0.5, dtype=dtype, device=probe.device), probe.random(1, WEIGHT[1], dtype=dtype)


def _fold_of_calls(probe: Probe, plan: Plan, rates: Rates, rows: int, whole: float) -> float:
    """Return the fold rate that covers all of a visit's work on rows: gathering, widening and adding.

    It is fitted to the processor time that a call over all ranks takes beyond the work in ``rates``; other clocks would
    count waiting. ``whole``: seconds of a large tile when ``rates`` were measured.
    """
    plan, dtype = plan.with_mask(plan.mask, seqlen=rows * plan.world), torch.bfloat16
    shape = shape_of(dtype, batch=1, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM)
    wire, *_ = plan.planner.wires(plan.world)

    def computed(fold: float) -> float:
        with_fold = replace(wire, rates=replace(rates, overhead=replace(rates.overhead, fold=fold)))
        both = passes(traffic_model_of(plan.schedule), shape, "query", WHOLE, with_fold)
        return sum(float(each.work().seconds.sum(1).max()) for each in both)

    none, beyond = computed(math.inf), []
    turns: list[Callable[[], Any]] = [*probe.tile(dtype, full(rows), HEADS), partial(_call, probe, plan, HEADS)]
    for _ in range(3):
        # The machine may be slower now than when the kernel was measured. A tile in the same turns shows it.
        *tile, call = probe.seconds(turns)
        beyond.append(call * whole / max(1e-9, sum(tile)) - none)
    return (computed(1.0) - none) / max(1e-9, statistics.median(beyond))


def _call(probe: Probe, plan: Plan, heads: int = 1) -> None:
    q, k, v, dout = (probe.random(1, heads, plan.length, DIM, dtype=torch.bfloat16) for _ in range(4))
    burst_attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), plan).backward(dout)
