"""Measure the rates that a plan's time is predicted from.

Kernels run on all ranks at the same time. Links are measured with the library's own transport.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..comm.transport import PACKED_BYTES, Receive, Send
from ..kernels import choose
from ..kernels.contract import BackwardInputs, Kernel
from ..kernels.merge import merge_
from ..plan.groups import WHOLE
from ..plan.strategy import Strategy
from ..plan.tile import Tile, Tiles
from ..planner.planner import traffic_model_of
from ..planner.rates import Link, Rates, Speed
from ..planner.timing import simulations
from .entry import burst_attention
from .hardware import Hardware, shape_of, usual_rates
from .plan import Plan, make_plan, single_rank_plan

DIM = 128
AT_ONCE = 8  # messages in flight; a call sends about this many in a step
SMALL = 32  # rows and columns of a tile whose time is its launch only


@dataclass(frozen=True)
class CalibrationSizes:
    """How much is measured.

    Attributes:
        rows: rows of a large tile.
        heads: heads of a large tile.
        message: bytes of all messages sent at the same time; 512 KiB at least are sent.
        repeats: how often each measurement is repeated.
    """

    rows: int = 1024
    heads: int = 2
    message: int = 4 << 20
    repeats: int = 7


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
    usual = usual_rates(on_gpus=device.type == "cuda")
    plan = make_plan(
        64,
        group=group,
        strategy=Strategy(layout="zigzag", ulysses_degree=1, circulate="query"),
        hardware=Hardware(rates=usual),
    )
    probe = _Probe(plan, device, sizes or CalibrationSizes())
    usual = plan.planner.rates  # rank 0's, so that all ranks start from the same rates
    half, *launches, block, row = probe.kernel(torch.bfloat16)
    single, double = (probe.kernel(dtype)[0] for dtype in (torch.float32, torch.float64))
    inside, across = probe.links(usual)
    visit, call = probe.calls(sum(launches))
    overhead = replace(
        usual.overhead,
        launch_forward=launches[0],
        launch_backward=launches[1],
        visit=visit,
        call=call,
        fold=probe.fold(row),
        block=block,
        at_once=probe.at_once,
    )
    links = {"inside of a node": inside, "across": across}
    assumed = [what for what, link in links.items() if link is None]
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
    )
    return replace(rates, overhead=replace(overhead, fold=probe.rows(rates)))


class _Probe:
    """The measurements of one rank. All ranks get the same figures."""

    def __init__(self, plan: Plan, device: torch.device, sizes: CalibrationSizes) -> None:
        self.plan, self.device, self.sizes = plan, device, sizes
        self.nodes = plan.planner.nodes or (0,) * plan.world
        cores = len(os.sched_getaffinity(0)) // torch.get_num_threads() if device.type == "cpu" else 0
        here = self.nodes.count(self.nodes[plan.rank])
        (self.at_once,) = self._slowest([float(cores if 0 < cores < here else 0)])
        # Ranks and other processes may share the cores, so count processor time where one thread does the work.
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.process_time if alone else time.perf_counter

    def _slowest(self, mine: list[float]) -> list[float]:
        """Return the element-wise maximum over all ranks."""
        return [max(values) for values in zip(*self.plan.exchange_small(mine), strict=True)]

    def seconds(self, call: Callable[[], Any], clock: Callable[[], float] | None = None) -> float:
        """Return the seconds of a call that all ranks make at the same time.

        Each repeat counts the slowest rank. The result is the fastest repeat, because disturbances only add time.
        """
        clock, took = clock or self.clock, []
        for _ in range(self.sizes.repeats + 1):
            self.plan.exchange_small([0.0])
            self._settle()
            began = clock()
            call()
            self._settle()
            took.append(clock() - began)
        return min(self._slowest(took[1:]))

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def kernel(self, dtype: torch.dtype) -> tuple[Speed, float, float, float, float]:
        """Measure the kernel for inputs of ``dtype``.

        Returns:
            The speed; seconds of a forward's launch; seconds of a backward's launch; the block size that a mask's
            border costs, in rows; and seconds per row of one head, however much that row sees. The last is the mean
            of a forward's and of half a backward's, because a backward also handles the keys' rows.
        """
        kernel = choose("auto", device=self.device, dtype=dtype, head_dims=(DIM, DIM))
        rows, heads = self.sizes.rows, self.sizes.heads
        small, narrow, full, causal = (
            self._passes(kernel, tile, dtype)
            for tile in (_full(SMALL), _full(rows, rows // 4), _full(rows), Tile(0, rows, 0, rows, 0, rows - 1))
        )
        cells = heads * rows * rows
        # Three quarters of the columns give the time per cell. Some kernels are much faster with few columns; for them
        # the difference to the small tile is less, and counts.
        added = [min((wide - some) / 0.75, wide - less) for wide, some, less in zip(full, narrow, small, strict=True)]
        each = [max(1e-12, seconds) / cells for seconds in added]
        rest = [max(0.0, whole - one * cells - less) for whole, one, less in zip(full, each, small, strict=True)]
        row = (rest[0] + rest[1] / 2) / 2 / (heads * rows)
        flops = 2 * 2 * DIM, 2 * 5 * DIM
        alone = [less + more for less, more in zip(small, rest, strict=True)]
        triangle = rows * (rows + 1) / 2
        border = [(x - y) / one / heads - triangle for x, y, one in zip(causal, alone, each, strict=True)]
        block = min(float(rows), max(0.0, sum(border) / rows))  # the mean of both passes; each row loses half a block
        return Speed(forward=flops[0] / each[0], backward=flops[1] / each[1]), small[0], small[1], block, row

    def _passes(self, kernel: Kernel, tile: Tile, dtype: torch.dtype) -> list[float]:
        """Return the seconds of one tile's forward and backward."""
        sizes = (tile.rows, tile.columns, tile.columns, tile.rows)
        q, k, v, dout = (self.random(1, self.sizes.heads, n, DIM, dtype=dtype) for n in sizes)
        tiles, scale = Tiles(torch.tensor([tile]).numpy()), DIM**-0.5
        _, lse = kernel.forward(q, k, v, tiles, scale)
        inputs = BackwardInputs(dout, q, k, v, lse, torch.zeros_like(lse), tiles, scale)
        return [
            self.seconds(lambda: kernel.forward(q, k, v, tiles, scale)),
            self.seconds(lambda: kernel.backward(inputs)),
        ]

    def fold(self, row: float) -> float:
        """Return the bytes per second at which partial results are merged; a kernel takes ``row`` seconds per row."""
        shape = 1, self.sizes.heads, 4 * self.sizes.rows
        out, part = (self.random(*shape, DIM, dtype=torch.float32) for _ in range(2))
        lse = torch.zeros(shape, device=self.device)
        merged = self.seconds(lambda: merge_(out, lse, part, lse.clone()))
        return out.nbytes / max(1e-9, merged + row * lse.numel())

    def rows(self, rates: Rates) -> float:
        """Return the fold rate that covers all of a visit's work on rows: gathering, widening and adding.

        It is fitted to the processor time that a call over all ranks takes beyond the work in ``rates``. Other clocks
        would count waiting too, so with them the measured fold rate is returned as it is.
        """
        folded = rates.overhead.fold
        if self.plan.world == 1 or self.clock is not time.process_time:
            return folded
        plan = self.plan.with_mask(self.plan.mask, seqlen=self.sizes.rows * self.plan.world)
        sizes = {"batch": 1, "q_heads": self.sizes.heads, "kv_heads": self.sizes.heads, "head_dim": DIM}
        shape = shape_of(torch.bfloat16, **sizes)
        wire = plan.planner.wire(plan.world)

        def computed(fold: float) -> float:
            with_fold = replace(rates, overhead=replace(rates.overhead, fold=fold))
            passes = simulations(traffic_model_of(plan.schedule), shape, "query", WHOLE, replace(wire, rates=with_fold))
            return sum(float(each.work().seconds.sum(1).max()) for each in passes)

        none = computed(math.inf)
        took = self.seconds(lambda: self._call(plan, self.sizes.heads))
        return min(folded, (computed(1.0) - none) / max(1e-9, took - none))

    def links(self, usual: Rates) -> tuple[Link | None, Link | None]:
        """Return the links inside a node and across nodes; None where there is no such link."""
        mine = [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.plan.rank]]
        every = sorted({*self.nodes})
        place, counts = mine.index(self.plan.rank), [self.nodes.count(node) for node in every]
        inside = across = None
        if min(counts) > 1:
            latency, rate = self._ring(mine)
            inside = Link(latency=latency, bytes_per_second=rate, shared=False)
        if len(every) > 1 and len({*counts}) == 1:
            members = [[rank for rank, node in enumerate(self.nodes) if node == each] for each in every]
            latency, together = self._ring([ranks[place] for ranks in members])
            _, alone = self._ring([ranks[0] for ranks in members]) if counts[0] > 1 else (0.0, together)
            shared = alone > 1.5 * together
            across = Link(latency=latency, bytes_per_second=alone if shared else together, shared=shared)
        return inside, across

    def _ring(self, ranks: list[int]) -> tuple[float, float]:
        """Return (latency of a message in seconds, bytes per second).

        Each of ``ranks`` sends several messages at the same time to the next, as calls do. Other ranks only wait.
        """
        taking_part = self.plan.rank in ranks
        at = ranks.index(self.plan.rank) if taking_part else 0
        ahead, behind = ranks[(at + 1) % len(ranks)], ranks[at - 1]

        def send(size: int) -> float:
            leaving, arriving = (torch.zeros(AT_ONCE, size, dtype=torch.uint8, device=self.device) for _ in range(2))

            def exchange() -> None:
                if taking_part:
                    sends, receives = [Send(ahead, x) for x in leaving], [Receive(behind, x) for x in arriving]
                    self.plan.transport.wait(self.plan.transport.post(sends, receives, label="calibration"))

            return self.seconds(exchange, time.perf_counter) / AT_ONCE

        least = 2 * PACKED_BYTES // AT_ONCE  # smaller messages would be packed into one
        most = max(4 * least, self.sizes.message // AT_ONCE)
        few, many = send(least), send(most)
        rate = (most - least) / (many - few) if many > 1.5 * few else most / many
        return max(0.0, few - least / rate), rate

    def calls(self, launch: float) -> tuple[float, float]:
        """Return the seconds that a visit and a pass add and nothing hides, measured with calls of few tokens.

        Args:
            launch: seconds of a forward's and a backward's launch together.
        """
        alone = single_rank_plan(SMALL)
        here = self.seconds(lambda: self._call(alone)) - launch
        visit = max(0.0, here / 4)  # half of each pass is the visit, half the operator around it
        together = self.seconds(lambda: self._call(self.plan), time.perf_counter)
        return visit, max(0.0, together / 2 - self.plan.world * (visit + launch / 2))

    def _call(self, plan: Plan, heads: int = 1) -> None:
        q, k, v, dout = (self.random(1, heads, plan.length, DIM, dtype=torch.bfloat16) for _ in range(4))
        burst_attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), plan).backward(dout)


def _full(rows: int, columns: int | None = None) -> Tile:
    columns = columns or rows
    return Tile(0, rows, 0, columns, 1 - columns, rows - 1)
