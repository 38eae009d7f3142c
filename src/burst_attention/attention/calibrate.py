"""Measure the rates that a plan's time is predicted from.

Kernels run on all ranks at the same time. Links are measured with the library's own transport.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..kernels import choose
from ..kernels.contract import Kernel, merge_
from ..plan.groups import WHOLE
from ..plan.strategy import Strategy
from ..plan.tile import Tile
from ..planner.passes import passes
from ..planner.planner import traffic_model_of
from ..planner.rates import Rates, Speed
from .call import burst_attention
from .hardware import Hardware, shape_of, this_machine, usual_rates
from .new_plan import make_plan, single_rank_plan
from .plan import Plan
from .probe import DIM, FLOPS, SMALL, Probe, full


@dataclass(frozen=True)
class CalibrationSizes:
    """How much is measured."""

    rows: int = 1024  # of a large tile
    heads: int = 2  # of a large tile
    message: int = 4 << 20  # bytes of all messages sent at the same time; 512 KiB at least are sent
    repeats: int = 7  # of each measurement


def calibrate(
    *, group: Any = None, device: torch.device | str = "cpu", name: str = "", sizes: CalibrationSizes | None = None
) -> Rates:
    """Measure the rates of the group's ranks. Every rank must call it, and gets the same result.

    Links that don't exist here come from the usual preset for the device, and ``source`` says so. On one node these
    are the links across nodes; on one rank, all links.

    Args:
        group: as for :func:`burst_attention.make_plan`.
        device: where kernels run and messages are sent from.
        name: the machine's name, in a few words.
        sizes: how much is measured. Default: about half a minute of measurements.
    """
    device = torch.device(device)
    on_gpu, strategy = device.type == "cuda", Strategy(layout="zigzag", ulysses_degree=1, circulate="query")
    plan = make_plan(64, group=group, strategy=strategy, hardware=Hardware(rates=usual_rates(on_gpus=on_gpu)))
    probe = _Calibration(plan, device, sizes or CalibrationSizes())
    usual = plan.planner.rates  # rank 0's, so that all ranks start from the same rates
    half, *launches, block, row, tile = probe.kernel(torch.bfloat16)
    single, double = (probe.kernel(dtype)[0] for dtype in (torch.float32, torch.float64))
    inside, across = probe.links()
    visit, call = probe.calls(sum(launches))
    times = {"launch_forward": launches[0], "launch_backward": launches[1], "visit": visit, "call": call}
    fold, at_once = probe.fold(row), 0.0 if on_gpu else probe.at_once()
    overhead = replace(usual.overhead, **times, fold=fold, block=block, at_once=at_once)
    assumed = [what for what, link in (("inside of a node", inside), ("across", across)) if link is None]
    source = f"measured by burst calibrate on {plan.world} ranks, {device.type}, torch {torch.__version__}"
    if assumed:
        source += f"; links {' and '.join(assumed)} as estimated by {usual.name}"
    rates = Rates(
        name=name or f"{device.type}, {plan.world} ranks",
        source=source,
        inside=inside or usual.inside,
        across=across or usual.across,
        half=half,
        single=single,
        double=double,
        overhead=overhead,
        measured_on=this_machine(plan.world, on_gpu),
    )
    return replace(rates, overhead=replace(overhead, fold=probe.rows(rates, tile)))


class _Calibration(Probe):
    """The measurements of one rank. All ranks get the same figures."""

    def __init__(self, plan: Plan, device: torch.device, sizes: CalibrationSizes) -> None:
        nodes = plan.planner.nodes or (0,) * plan.world
        super().__init__(
            plan.transport, plan.exchange_small, nodes, device, message=sizes.message, repeats=sizes.repeats
        )
        self.plan, self.sizes = plan, sizes
        # Ranks and other processes may share the cores, so count processor time where one thread does the work.
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        if alone:
            self.clock = time.process_time

    def kernel(self, dtype: torch.dtype) -> tuple[Speed, float, float, float, float, float]:
        """Measure the kernel for inputs of ``dtype``.

        Return its speed; seconds of a launch, forward and backward; the block size that a mask's border costs, in rows;
        seconds per row of one head, the mean of a forward's and of half a backward's, which also handles the keys'
        rows; and seconds of both passes of a large tile without a mask.
        """
        kernel = choose("auto", device=self.device, dtype=dtype, head_dims=(DIM, DIM))
        rows, heads = self.sizes.rows, self.sizes.heads
        small, narrow, whole, causal = (
            self._passes(kernel, tile, dtype)
            for tile in (full(SMALL), full(rows, rows // 4), full(rows), Tile(0, rows, 0, rows, 0, rows - 1))
        )
        cells = heads * rows * rows
        # Three quarters of the columns give the time per cell. Some kernels are much faster with few columns; for them
        # the difference to the small tile is less, and counts.
        added = [min((wide - some) / 0.75, wide - less) for wide, some, less in zip(whole, narrow, small, strict=True)]
        each = [max(1e-12, seconds) / cells for seconds in added]
        rest = [
            max(0.0, all_of_it - one * cells - less) for all_of_it, one, less in zip(whole, each, small, strict=True)
        ]
        row = (rest[0] + rest[1] / 2) / 2 / (heads * rows)
        alone = [less + more for less, more in zip(small, rest, strict=True)]
        triangle = rows * (rows + 1) / 2
        border = [(x - y) / one / heads - triangle for x, y, one in zip(causal, alone, each, strict=True)]
        block = min(float(rows), max(0.0, sum(border) / rows))  # the mean of both passes; each row loses half a block
        speed = Speed(forward=FLOPS[0] / each[0], backward=FLOPS[1] / each[1])
        return speed, small[0], small[1], block, row, sum(whole)

    def _passes(self, kernel: Kernel, tile: Tile, dtype: torch.dtype) -> list[float]:
        """Return the seconds of one tile's forward and backward."""
        return [self.seconds([call])[0] for call in self.tile(kernel, tile, dtype, self.sizes.heads)]

    def fold(self, row: float) -> float:
        """Return the bytes per second at which partial results are merged; a kernel takes ``row`` seconds per row."""
        shape = 1, self.sizes.heads, 4 * self.sizes.rows
        out, part = (self.random(*shape, DIM, dtype=torch.float32) for _ in range(2))
        lse = torch.zeros(shape, device=self.device)
        (merged,) = self.seconds([lambda: merge_(out, lse, part, lse.clone())])
        return out.nbytes / max(1e-9, merged + row * lse.numel())

    def rows(self, rates: Rates, whole: float) -> float:
        """Return the fold rate that covers all of a visit's work on rows: gathering, widening and adding.

        It is fitted to the processor time that a call over all ranks takes beyond the work in ``rates``; other clocks
        would count waiting. ``whole``: seconds of a large tile when ``rates`` were measured, from :meth:`kernel`.
        """
        folded = rates.overhead.fold
        if self.plan.world == 1 or self.clock is not time.process_time:
            return folded
        plan = self.plan.with_mask(self.plan.mask, seqlen=self.sizes.rows * self.plan.world)
        heads, dtype = self.sizes.heads, torch.bfloat16
        shape = shape_of(dtype, batch=1, q_heads=heads, kv_heads=heads, head_dim=DIM)
        wire, *_ = plan.planner.wires(plan.world)

        def computed(fold: float) -> float:
            with_fold = replace(rates, overhead=replace(rates.overhead, fold=fold))
            both = passes(traffic_model_of(plan.schedule), shape, "query", WHOLE, replace(wire, rates=with_fold))
            return sum(float(each.work().seconds.sum(1).max()) for each in both)

        none = computed(math.inf)
        kernel = choose("auto", device=self.device, dtype=dtype, head_dims=(DIM, DIM))
        turns: list[Callable[[], Any]] = self.tile(kernel, full(self.sizes.rows), dtype, heads)
        turns.append(partial(self._call, plan, heads))
        beyond = []
        for _ in range(3):
            # The machine may be slower now than when the kernel was measured. A tile in the same turns shows it.
            *tile, call = self.seconds(turns)
            beyond.append(call * whole / max(1e-9, sum(tile)) - none)
        return min(folded, (computed(1.0) - none) / max(1e-9, statistics.median(beyond)))

    def calls(self, launch: float) -> tuple[float, float]:
        """Return the seconds that a visit and a pass add, from calls of few tokens; ``launch``: of both passes."""
        alone = single_rank_plan(SMALL)
        (here,) = self.seconds([lambda: self._call(alone)])
        visit = max(0.0, (here - launch) / 4)  # half of each pass is the visit, half the operator around it
        (together,) = self.seconds([lambda: self._call(self.plan)], time.perf_counter)
        return visit, max(0.0, together / 2 - self.plan.world * (visit + launch / 2))

    def _call(self, plan: Plan, heads: int = 1) -> None:
        q, k, v, dout = (self.random(1, heads, plan.length, DIM, dtype=torch.bfloat16) for _ in range(4))
        burst_attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), plan).backward(dout)
