"""Measure links with the library's own messages, and kernels with tiles, on all ranks at the same time."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from platform import machine as machine_type
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.lines import open_lines
from ..comm.transport import PACKED_BYTES, Receive, Send, Transport
from ..kernels import choose
from ..kernels.contract import BackwardInputs
from ..plan.tile import Tile, Tiles
from ..planner.rates import Link, Rates, Speed, measured_file, read_rates, write_rates
from .plan import exchange_small

MESSAGE = 4 << 20  # bytes of the largest messages that are sent at the same time
AT_ONCE = 8  # messages in flight; a call sends about this many in a step
PATIENCE = 0.03  # seconds of a quick measurement: more repeats or larger messages are not worth it
STEPS_PER_DOUBLING = 3  # measured rates are rounded to this grid
ALIKE = 4.0  # kept figures hold while links are at most this many times faster or slower; load alone varies them by 2
MOST_SOURCE = 600  # characters of where kept rates come from, in the record that all ranks get
DIM = 128
SMALL = 32  # rows and columns of a tile whose time is its launch only
FLOPS = 2 * 2 * DIM, 2 * 5 * DIM  # of a (query, key) pair, forward and backward
PIECES = 32  # of a weight, each of which ranks multiply between two exchanges
CLEAR = 5.0  # a tile that takes this many launches tells a kernel's speed
Passes = tuple[float, float]  # seconds of a forward and of a backward


class Probe:
    """One rank's measurements of links, and of calls that all ranks make at the same time.

    ``thorough``, as for ``burst calibrate``: calls are timed one by one, and kernels choose their block sizes. Else a
    measurement is neither repeated nor tried with larger messages after :data:`PATIENCE` seconds.
    """

    def __init__(
        self,
        agreement: Agreement,
        transport: Transport,
        nodes: Sequence[int],
        device: torch.device,
        *,
        repeats: int = 3,
        thorough: bool = False,
    ) -> None:
        self.agreement, self.transport, self.nodes, self.device = agreement, transport, nodes, device
        self._repeats, self._thorough, self._patience = repeats, thorough, math.inf if thorough else PATIENCE
        self._draws = torch.Generator(device).manual_seed(0)
        self.clock: Callable[[], float] = time.perf_counter
        if device.type == "cpu" and torch.get_num_threads() == 1:  # ranks and other programs may share the cores
            self.clock = time.process_time if thorough else time.thread_time

    def exchange(self, mine: list[float]) -> list[list[float]]:
        """Return the numbers of all ranks, by rank."""
        return exchange_small(self.agreement, mine)

    def slowest(self, mine: list[float]) -> list[float]:
        """Return the element-wise maximum over all ranks."""
        return [max(values) for values in zip(*self.exchange(mine), strict=True)]

    def seconds(
        self,
        calls: Sequence[Callable[[], Any]],
        clock: Callable[[], float] | None = None,
        *,
        warm: bool = False,
        of: Callable[[Sequence[float]], float] = min,
    ) -> list[float]:
        """Return the seconds of calls that all ranks make at the same time, one call after another.

        Each repeat counts the slowest rank. The result is the fastest repeat, because disturbances only add time.
        ``warm``: each call has run before, so its first repeat counts. ``of``: another choice among repeats.
        """
        clock, took, last = clock or self.clock, list[list[float]](), [0.0] * (len(calls) + 1)
        first = 1 if warm else 2  # without the first exchange, and without a warm-up
        while True:
            took.append(self.slowest(last))  # the ranks start together, and stop after the same repeat
            spent = sum(each[-1] for each in took)
            if len(took) > first and (len(took) == self._repeats + first or spent > self._patience):
                return [of(each) for each in zip(*took[first:], strict=True)][:-1]
            began = time.perf_counter()
            last = [*(self._once(call, clock) for call in calls), time.perf_counter() - began]

    def _once(self, call: Callable[[], Any], clock: Callable[[], float]) -> float:
        wait = partial(torch.cuda.synchronize, self.device) if self.device.type == "cuda" else lambda: None
        wait()
        began = clock()
        call()
        wait()
        return clock() - began

    def links(self) -> tuple[Link | None, Link | None]:
        """Return the links inside a node and across nodes; None where there is no such link."""
        every = [[rank for rank, node in enumerate(self.nodes) if node == each] for each in sorted({*self.nodes})]
        mine, counts = next(ranks for ranks in every if self.transport.rank in ranks), {*map(len, every)}
        inside = across = None
        if min(counts) > 1:
            latency, rate = self._ring(mine)
            inside = Link(latency=latency, bytes_per_second=rate, shared=False)
        if len(every) > 1 and len(counts) == 1:
            latency, together = self._ring([ranks[mine.index(self.transport.rank)] for ranks in every])
            _, alone = self._ring([ranks[0] for ranks in every]) if len(mine) > 1 else (0.0, together)
            shared = alone > 1.5 * together
            across = Link(latency=latency, bytes_per_second=alone if shared else together, shared=shared)
        return inside, across

    def _ring(self, ranks: list[int]) -> tuple[float, float]:
        """Return a message's latency and the bytes per second if each rank sends several at once to the next."""
        taking_part = self.transport.rank in ranks
        at = ranks.index(self.transport.rank) if taking_part else 0
        ahead, behind = ranks[(at + 1) % len(ranks)], ranks[at - 1]

        least = 2 * PACKED_BYTES // AT_ONCE  # smaller messages would be packed into one

        def send(size: int) -> float:
            leaving, arriving = (torch.zeros(AT_ONCE, size, dtype=torch.uint8, device=self.device) for _ in range(2))

            def exchange() -> None:
                if taking_part:
                    sends, receives = [Send(ahead, x) for x in leaving], [Receive(behind, x) for x in arriving]
                    self.transport.wait(self.transport.post(sends, receives, label="calibration"))

            warm = size > least  # smaller messages have opened the connections
            return self.seconds([exchange], time.perf_counter, warm=warm)[0] / AT_ONCE

        most = MESSAGE // AT_ONCE
        few = many = send(least)
        size = least
        while size < most and AT_ONCE * many < self._patience:
            longer = max(4.0, self._patience / max(AT_ONCE * many, 1e-9))  # what patience allows
            size = int(min(longer * size, most))
            many = send(size)
        rate = (size - least) / (many - few) if many > 1.5 * few else size / many
        return max(0.0, few - least / rate), rate

    def busy(self, weight: Tensor, row: Tensor) -> float:
        """Return the seconds of a small message to each other rank after each product, as generation sends them.

        ``row`` [1, E] times pieces of ``weight`` [F, E]. Ranks of one host use lines, as generation does.
        """
        pieces, others = weight.chunk(PIECES), self.transport.world - 1

        def products() -> None:
            for piece in pieces:
                torch.nn.functional.linear(row, piece)

        def exchanges() -> None:
            for piece in pieces:
                parts = [row.new_empty(1, len(piece)) for _ in range(others + 1)]
                expected = self.transport.expect(parts, label="calibration")
                self.transport.gather(expected, torch.nn.functional.linear(row, piece))

        with self._lines():
            alone, both = self.seconds([products, exchanges], time.perf_counter, of=statistics.median)
        return max(0.0, both - alone) / (PIECES * others)

    @contextlib.contextmanager
    def _lines(self) -> Iterator[None]:
        """Open lines between the ranks of a host inside this context."""
        health = self.transport.health
        if health.lines is not None or not isinstance(self.transport.group, dist.ProcessGroup):
            yield
            return
        health.lines = open_lines(self.agreement)
        try:
            yield
        finally:
            health.lines.close()
            health.lines = None

    def tile(self, dtype: torch.dtype, tile: Tile, heads: int) -> list[Callable[[], Any]]:
        """Return the forward and the backward of one tile, as calls. Both have run once."""
        kernel = choose("auto", device=self.device, dtype=dtype, head_dims=(DIM, DIM))
        if not self._thorough:  # the other ranks would wait for its tuning
            kernel = kernel.untuned()
        sizes = (tile.rows, tile.columns, tile.columns, tile.rows)
        q, k, v, dout = (self.random(1, heads, n, DIM, dtype=dtype) for n in sizes)
        tiles, scale = Tiles(torch.tensor([tile]).numpy()), DIM**-0.5
        _, lse = kernel.forward(q, k, v, tiles, scale)
        inputs = BackwardInputs(dout, q, k, v, lse, torch.zeros_like(lse), tiles, scale)
        kernel.backward(inputs)
        return [partial(kernel.forward, q, k, v, tiles, scale), partial(kernel.backward, inputs)]

    def passes(self, sizes: Sequence[tuple[torch.dtype, Tile]], heads: int) -> list[Passes]:
        """Return the seconds of a forward and a backward of tiles."""
        calls = list[Callable[[], Any]]()
        with self.agreement.entering("make_plan"):
            for dtype, tile in sizes:
                calls += self.tile(dtype, tile, heads)
        if self._thorough:  # in turns, small tiles would find cold caches
            took = [self.seconds([call], warm=True)[0] for call in calls]
        else:
            took = self.seconds(calls, warm=True)
        return [*zip(took[::2], took[1::2], strict=True)]

    def speeds(self, dtypes: Sequence[torch.dtype], rows: int, heads: int) -> tuple[Passes, list[Speed]]:
        """Return the seconds of a launch in the first dtype, and the kernels' speed in each, by tiles of ``rows``."""
        times = self.passes([(dtype, full(n)) for dtype in dtypes for n in (SMALL, rows)], heads)
        speeds = [self._speed(dtype, rows, heads, *times[2 * n : 2 * n + 2]) for n, dtype in enumerate(dtypes)]
        return times[0], speeds

    def _speed(self, dtype: torch.dtype, rows: int, heads: int, launches: Passes, whole: Passes) -> Speed:
        """Return a kernel's speed; rows are doubled until a tile takes clearly longer than its launch."""
        most = 4 * rows
        while sum(whole) < CLEAR * sum(launches) and rows < most:
            rows *= 2
            (whole,) = self.passes([(dtype, full(rows))], heads)
        forward, backward = (
            flop * heads * rows * rows / max(seconds - launch, seconds / CLEAR, 1e-9)
            for flop, seconds, launch in zip(FLOPS, whole, launches, strict=True)
        )
        return Speed(forward=forward, backward=backward)

    def at_once(self) -> float:
        """Return how many ranks can compute at the same time; 0 if each has its cores for itself."""
        answers = self.exchange([machine(), float(max(1, cores_per_rank()))])
        by_machine = {name: [cores for other, cores in answers if other == name] for name, _ in answers}
        short = any(min(cores) < len(cores) for cores in by_machine.values())
        return float(sum(map(min, by_machine.values()))) if short else 0.0

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return normal values. They are not drawn from the user's generator, whose next numbers must not change."""
        return torch.randn(*shape, device=self.device, generator=self._draws).to(dtype)

    def rates(self, usual: Rates) -> tuple[Rates, bool]:
        """Measure, or read what was kept, as :func:`measured` says."""
        began, at = time.perf_counter(), self.exchange([time.time()])[0][0]
        inside, across = (
            link and replace(link, latency=near(link.latency), bytes_per_second=near(link.bytes_per_second))
            for link in self.links()
        )
        links = [name for name, link in (("inside of a node", inside), ("across nodes", across)) if link]
        rates = replace(usual, inside=inside or usual.inside, across=across or usual.across)
        name = kept_name(usual, self.nodes)
        result = self._read(name)
        if result is None or not (alike(result.inside, rates.inside) and alike(result.across, rates.across)):
            result = self.kernels(rates)
            (took,) = self.slowest([time.perf_counter() - began])
            what = f"kernels and links {' and '.join(links)}" if links else "kernels"
            when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            result = replace(result, source=f"{what} measured by make_plan in {took:.2g} s on {when}")
            result = self._keep(result, name, usual.source)
        return result, len(set(self.nodes)) > 1 and across is None

    def kernels(self, usual: Rates) -> Rates:
        """Return the rates with this machine's launches and speeds, and with the cores that ranks share.

        Double precision keeps its ratio to single precision. On GPUs both keep their ratio to half precision.
        """
        on_gpu = self.device.type == "cuda"
        dtypes, rows, heads = ([torch.bfloat16], 2048, 8) if on_gpu else ([torch.bfloat16, torch.float32], 512, 1)
        launches, speeds = self.speeds(dtypes, rows, heads)
        half, *singles = (Speed(forward=near(speed.forward), backward=near(speed.backward)) for speed in speeds)
        single = _scaled(usual.single, half, usual.half) if on_gpu else singles[0]
        double = _scaled(usual.double, single, usual.single)
        times = {"launch_forward": near(launches[0]), "launch_backward": near(launches[1])}
        overhead = replace(usual.overhead, **times, at_once=0.0 if on_gpu else self.at_once())
        return replace(usual, half=half, single=single, double=double, overhead=overhead)

    def _read(self, name: str) -> Rates | None:
        """Return the rates that rank 0 kept for such a group, on every rank; None without a file that can be read."""
        record = None
        if self.transport.rank == 0:
            with self.agreement.entering("make_plan"), contextlib.suppress(ValueError, RuntimeError):  # no home folder
                record = read_rates(measured_file(name)).as_dict(most=MOST_SOURCE)
        record = self.agreement.agree("make_plan", {}, {"kept": record})[0]["kept"]
        return None if record is None else Rates.from_dict(record)

    def _keep(self, rates: Rates, name: str, rest: str) -> Rates:
        """Keep the rates; return them with a source that says where, or why not. ``rest``: the source of the rest."""
        said = ""
        if self.transport.rank == 0:
            with self.agreement.entering("make_plan"):
                try:
                    path = measured_file(name)
                    said = _plain(f"{rates.source}, kept in {path}; the rest: {rest}")
                    write_rates(replace(rates, source=said), path)
                except (OSError, ValueError, RuntimeError) as error:
                    said = _plain(f"{rates.source}, not kept ({error}); the rest: {rest}")
        return replace(rates, source=self.agreement.agree("make_plan", {}, {"source": said})[0]["source"])


def full(rows: int, columns: int = 0) -> Tile:
    """Return a tile of this size, square by default, in which each query sees each key."""
    return Tile(0, rows, 0, columns or rows, 1 - (columns or rows), rows - 1)


def measured(
    usual: Rates,
    transport: Transport,
    agreement: Agreement,
    nodes: Sequence[int],
    device: torch.device,
) -> tuple[Rates, bool]:
    """Return ``usual`` with measured links and kernels, and whether the network is still a guess.

    Every rank must call it. Each group measures its links once. If rank 0 kept figures of such a group, and the links
    are similar, those figures are returned. So a program that runs again has the same plan. Otherwise the group
    measures kernels too, and rank 0 keeps all figures. All ranks get the same, rounded to a coarse grid, and rank 0's
    date. A network between nodes of different sizes is not measured.
    """
    cache, key = transport.health.measured, tuple(nodes)
    if key not in cache:
        counts = transport.sent, transport.received
        try:
            cache[key] = Probe(agreement, transport, nodes, device).rates(usual)
        finally:  # the counts are those of calls, to which a measurement does not belong, even if it fails
            transport.sent, transport.received = counts
    result: tuple[Rates, bool] = cache[key]
    return result


def _plain(text: str) -> str:
    """Return a text in ASCII, short enough for a record."""
    return text.encode("ascii", "replace").decode()[:MOST_SOURCE]


def kept_name(usual: Rates, nodes: Sequence[int]) -> str:
    """Return a name for groups whose figures are alike: same CPU, threads, cores, versions and ranks by node."""
    from .. import __version__  # the package imports this module before it is complete

    cpu = (cpu_name(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), cores_per_rank())
    kind = repr((usual, cpu, list(nodes), __version__))
    return f"{len(nodes)}-ranks-{hashlib.blake2b(kind.encode(), digest_size=6).hexdigest()}"


def cpu_name() -> str:
    """Return the name of this machine's CPU, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", "replace").splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), machine_type())


def alike(kept: Link, link: Link) -> bool:
    """Return whether a link's measured bandwidth is near what was kept."""
    return 1 / ALIKE <= link.bytes_per_second / kept.bytes_per_second <= ALIKE


def _scaled(usual: Speed, ours: Speed, theirs: Speed) -> Speed:
    """Return a preset's speed in one dtype times what was measured in another dtype over its preset."""
    forward, backward = ours.forward / theirs.forward, ours.backward / theirs.backward
    return Speed(forward=usual.forward * forward, backward=usual.backward * backward)


def cores_per_rank() -> int:
    """Return how often this process's threads fit on its cores; 0 if there are more threads than cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores // torch.get_num_threads()


def machine() -> float:
    """Return a number that the processes of one machine share, also in different containers and network namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.is_file() else socket.gethostname()
    return float(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()))


def near(value: float) -> float:
    """Return the nearest value of the grid."""
    return 2.0 ** (round(STEPS_PER_DOUBLING * math.log2(value)) / STEPS_PER_DOUBLING) if value > 0 else 0.0
