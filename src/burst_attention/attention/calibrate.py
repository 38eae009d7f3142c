"""Measures what a plan's time is predicted from: kernels, on all ranks at once, and links, by the transport."""

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
from ..plan.tile import Tile, Tiles
from ..planner.rates import Link, Rates, Speed
from .entry import burst_attention
from .hardware import shape_of, usual_rates
from .plan import Plan, lone_plan, make_plan

DIM = 128
AT_ONCE = 8  # messages: as many as a call sends in a step, more or less
SMALL = 32  # rows and columns of a tile that takes no time but its launch


@dataclass(frozen=True)
class Sizes:
    """How much is measured: rows of a large tile, its heads, bytes of messages sent at once, of which there are 512 KiB
    at least, and how often each is repeated."""

    rows: int = 1024
    heads: int = 2
    message: int = 4 << 20
    repeats: int = 7


def calibrate(
    *, group: Any = None, device: torch.device | str = "cpu", name: str = "", sizes: Sizes | None = None
) -> Rates:
    """Rates of the ranks at hand. Every rank of the group must call it, and gets the same.

    What can't be measured here is taken from the preset that is usual, and ``source`` says so: links across nodes on
    one node, or between ranks where there is one.

    Args:
        name: of the machine, in a few words.
        sizes: how much is measured; half a minute of it if None.
    """
    device = torch.device(device)
    usual = usual_rates(on_gpus=device.type == "cuda")
    plan = make_plan(64, layout="zigzag", heads=1, group=group, rates=usual)
    probe = _Probe(plan, device, sizes or Sizes())
    usual = plan.schedule.planner.rates  # rank 0's
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
    foretold = [what for what, link in links.items() if link is None]
    source = f"measured by burst calibrate on {plan.world} ranks, {device.type}, torch {torch.__version__}"
    if foretold:
        source += f"; links {' and '.join(foretold)} as foretold by {usual.name}"
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
    """What one rank measures; each figure is the same on all ranks."""

    def __init__(self, plan: Plan, device: torch.device, sizes: Sizes) -> None:
        self.plan, self.device, self.sizes = plan, device, sizes
        self.nodes = plan.schedule.planner.nodes or (0,) * plan.world
        cores = len(os.sched_getaffinity(0)) // torch.get_num_threads() if device.type == "cpu" else 0
        here = self.nodes.count(self.nodes[plan.rank])
        (self.at_once,) = self._slowest([float(cores if 0 < cores < here else 0)])
        # On cores that are shared, with other ranks or with strangers, theirs is what the processor spends on them.
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.process_time if alone else time.perf_counter

    def _slowest(self, mine: list[float]) -> list[float]:
        """Of all ranks."""
        return [max(values) for values in zip(*self.plan.exchange_small(mine), strict=True)]

    def seconds(self, call: Callable[[], Any], clock: Callable[[], float] | None = None) -> float:
        """Of a call that all ranks make at once: the slowest rank's, the least of several, for much else adds to it."""
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
        """Speed, seconds of a launch forward and backward, the block that a mask's border costs, and seconds of a row
        of one head, whatever it sees: of a forward, and half of a backward's, which has keys' too."""
        kernel = choose("auto", device=self.device, dtype=dtype, head_dims=(DIM, DIM))
        rows, heads = self.sizes.rows, self.sizes.heads
        small, narrow, full, causal = (
            self._passes(kernel, tile, dtype)
            for tile in (_full(SMALL), _full(rows, rows // 4), _full(rows), Tile(0, rows, 0, rows, 0, rows - 1))
        )
        cells = heads * rows * rows
        # What three quarters of the columns add, unless a kernel is so much quicker with few that all add up to less.
        added = [min((wide - some) / 0.75, wide - less) for wide, some, less in zip(full, narrow, small, strict=True)]
        each = [max(1e-12, seconds) / cells for seconds in added]
        rest = [max(0.0, whole - one * cells - less) for whole, one, less in zip(full, each, small, strict=True)]
        row = (rest[0] + rest[1] / 2) / 2 / (heads * rows)
        flops = 2 * 2 * DIM, 2 * 5 * DIM
        alone = [less + more for less, more in zip(small, rest, strict=True)]
        triangle = rows * (rows + 1) / 2
        border = [(x - y) / one / heads - triangle for x, y, one in zip(causal, alone, each, strict=True)]
        block = min(float(rows), max(0.0, sum(border) / rows))  # the mean of both passes, half of it lost in each row
        return Speed(forward=flops[0] / each[0], backward=flops[1] / each[1]), small[0], small[1], block, row

    def _passes(self, kernel: Kernel, tile: Tile, dtype: torch.dtype) -> list[float]:
        """Seconds of the forward and of the backward of one tile."""
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
        """Bytes per second of partial results that are merged, of which a kernel takes ``row`` seconds a row."""
        shape = 1, self.sizes.heads, 4 * self.sizes.rows
        out, part = (self.random(*shape, DIM, dtype=torch.float32) for _ in range(2))
        lse = torch.zeros(shape, device=self.device)
        merged = self.seconds(lambda: merge_(out, lse, part, lse.clone()))
        return out.nbytes / max(1e-9, merged + row * lse.numel())

    def rows(self, rates: Rates) -> float:
        """``fold`` with all that a visit does with rows, gathered, widened, added up: what a call over all ranks takes
        of the processor beyond ``rates``' work. Other clocks count what is waited for, too."""
        folded = rates.overhead.fold
        if self.plan.world == 1 or self.clock is not time.process_time:
            return folded
        plan = self.plan.with_mask(self.plan.mask, seqlen=self.sizes.rows * self.plan.world)
        sizes = {"batch": 1, "q_heads": self.sizes.heads, "kv_heads": self.sizes.heads, "head_dim": DIM}
        shape = shape_of(torch.bfloat16, **sizes)
        wire = plan.schedule.planner.wire(plan.world)

        def computed(fold: float) -> float:
            told = replace(rates, overhead=replace(rates.overhead, fold=fold))
            passes = plan.schedule.on_paper(shape, "query", WHOLE, replace(wire, rates=told))
            return sum(float(each.work().seconds.sum(1).max()) for each in passes)

        none = computed(math.inf)
        took = self.seconds(lambda: self._call(plan, self.sizes.heads))
        return min(folded, (computed(1.0) - none) / max(1e-9, took - none))

    def links(self, usual: Rates) -> tuple[Link | None, Link | None]:
        """Inside of a node, and across; None where there is no such link."""
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
        """(Seconds of a message beside those of its bytes, bytes per second), of several at once from each of ``ranks``
        to the next, as calls send them; a rank that is not one of them only waits."""
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

        least = 2 * PACKED_BYTES // AT_ONCE  # or they would go as one
        most = max(4 * least, self.sizes.message // AT_ONCE)
        few, many = send(least), send(most)
        rate = (most - least) / (many - few) if many > 1.5 * few else most / many
        return max(0.0, few - least / rate), rate

    def calls(self, launch: float) -> tuple[float, float]:
        """Seconds of a visit and of a pass that nothing hides, from calls of few tokens; ``launch`` of both passes."""
        alone = lone_plan(SMALL)
        here = self.seconds(lambda: self._call(alone)) - launch
        visit = max(0.0, here / 4)  # of each pass half is the visit, half the operator around it
        together = self.seconds(lambda: self._call(self.plan), time.perf_counter)
        return visit, max(0.0, together / 2 - self.plan.world * (visit + launch / 2))

    def _call(self, plan: Plan, heads: int = 1) -> None:
        q, k, v, dout = (self.random(1, heads, plan.length, DIM, dtype=torch.bfloat16) for _ in range(4))
        burst_attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), plan, travels="query").backward(
            dout
        )


def _full(rows: int, columns: int | None = None) -> Tile:
    columns = columns or rows
    return Tile(0, rows, 0, columns, 1 - columns, rows - 1)
