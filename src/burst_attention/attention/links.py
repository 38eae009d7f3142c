"""Measure the links between ranks with the library's own messages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..comm.transport import PACKED_BYTES, Receive, Send, Transport
from ..planner.rates import Link, Rates

AT_ONCE = 8  # messages in flight; a call sends about this many in a step
PATIENCE = 0.03  # seconds of a quick measurement: more repeats or larger messages are not worth it
STEPS_PER_DOUBLING = 3  # measured rates are rounded to this grid, so that reruns usually choose the same plan


class LinkProbe:
    """One rank's measurements of links and of calls that all ranks make at the same time.

    Args:
        transport: sends the messages.
        exchange: gathers a few numbers from all ranks, by rank.
        nodes: each rank's node.
        device: where messages are sent from.
        message: bytes of all messages sent at the same time; 512 KiB at least are sent, unless ``patience`` ends.
        repeats: how often each measurement is repeated.
        patience: seconds after which a measurement is neither repeated nor tried with larger messages.
    """

    def __init__(
        self,
        transport: Transport,
        exchange: Callable[[list[float]], list[list[float]]],
        nodes: Sequence[int],
        device: torch.device,
        *,
        message: int,
        repeats: int,
        patience: float = math.inf,
    ) -> None:
        self.transport, self._exchange, self.nodes, self.device = transport, exchange, nodes, device
        self._message, self._repeats, self._patience = message, repeats, patience
        self.clock: Callable[[], float] = time.perf_counter

    def slowest(self, mine: list[float]) -> list[float]:
        """Return the element-wise maximum over all ranks."""
        return [max(values) for values in zip(*self._exchange(mine), strict=True)]

    def seconds(self, call: Callable[[], Any], clock: Callable[[], float] | None = None) -> float:
        """Return the seconds of a call that all ranks make at the same time.

        Each repeat counts the slowest rank. The result is the fastest repeat, because disturbances only add time.
        """
        clock, took, last = clock or self.clock, list[float](), 0.0
        while True:
            took += self.slowest([last])  # the ranks start together, and stop after the same repeat
            if len(took) > 2 and (len(took) == self._repeats + 2 or sum(took) > self._patience):
                return min(took[2:])  # without the first exchange and a warm-up
            self._settle()
            began = clock()
            call()
            self._settle()
            last = clock() - began

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def links(self) -> tuple[Link | None, Link | None]:
        """Return the links inside a node and across nodes; None where there is no such link."""
        mine = [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.transport.rank]]
        every = sorted({*self.nodes})
        place, counts = mine.index(self.transport.rank), [self.nodes.count(node) for node in every]
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
        taking_part = self.transport.rank in ranks
        at = ranks.index(self.transport.rank) if taking_part else 0
        ahead, behind = ranks[(at + 1) % len(ranks)], ranks[at - 1]

        def send(size: int) -> float:
            leaving, arriving = (torch.zeros(AT_ONCE, size, dtype=torch.uint8, device=self.device) for _ in range(2))

            def exchange() -> None:
                if taking_part:
                    sends, receives = [Send(ahead, x) for x in leaving], [Receive(behind, x) for x in arriving]
                    self.transport.wait(self.transport.post(sends, receives, label="calibration"))

            return self.seconds(exchange, time.perf_counter) / AT_ONCE

        least = 2 * PACKED_BYTES // AT_ONCE  # smaller messages would be packed into one
        most = max(4 * least, self._message // AT_ONCE)
        few = many = send(least)
        size = least
        while size < most and AT_ONCE * many < self._patience:
            size = min(4 * size, most) if self._patience < math.inf else most
            many = send(size)
        rate = (size - least) / (many - few) if many > 1.5 * few else size / many
        return max(0.0, few - least / rate), rate


def measured(
    usual: Rates,
    transport: Transport,
    exchange: Callable[[list[float]], list[list[float]]],
    nodes: Sequence[int],
    device: torch.device,
) -> tuple[Rates, bool]:
    """Return ``usual`` with measured links, and whether the network is still a guess. Every rank must call it.

    It measures once per group and nodes, in about 0.1 s on fast links and 0.5 s at 50 Mbit/s. All ranks get the same
    figures, rounded to a coarse grid. A network between nodes of different sizes is not measured.
    """
    known, key = transport.health.measured, tuple(nodes)
    if key not in known:
        began = time.perf_counter()
        probe = LinkProbe(transport, exchange, nodes, device, message=4 << 20, repeats=3, patience=PATIENCE)
        inside, across = (link and _rounded(link) for link in probe.links())
        (took,) = probe.slowest([time.perf_counter() - began])
        names = " and ".join(name for name, link in (("inside of a node", inside), ("across nodes", across)) if link)
        source = (
            f"links {names} measured by make_plan in {took:.2g} s; the rest: {usual.source}" if names else usual.source
        )
        rates = replace(usual, source=source, inside=inside or usual.inside, across=across or usual.across)
        known[key] = rates, across is None
    found: tuple[Rates, bool] = known[key]
    return found


def _rounded(link: Link) -> Link:
    """Return the link with its figures on the grid."""

    def near(value: float) -> float:
        return 2.0 ** (round(STEPS_PER_DOUBLING * math.log2(value)) / STEPS_PER_DOUBLING) if value > 0 else 0.0

    return replace(link, latency=near(link.latency), bytes_per_second=near(link.bytes_per_second))
