"""Simulate the sweep's steps on all ranks: post the next exchange, compute, wait, fold."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ..plan.groups import IN_FLIGHT
from .rates import Rates
from .traffic import PARTIAL, RELAYED, Messages


@dataclass(frozen=True, eq=False)
class Computing:
    """Work of each rank at each step, float64 [W, T]."""

    seconds: np.ndarray
    launches: np.ndarray
    visits: np.ndarray


@dataclass(frozen=True, eq=False)
class Wire:
    """The ports that messages use, and the seconds that they take."""

    rates: Rates
    nodes: np.ndarray  # node of each rank, from 0

    @property
    def shares_cores(self) -> bool:
        """Whether fewer ranks can compute at the same time than there are."""
        return 0 < self.rates.overhead.at_once < len(self.nodes)

    @cached_property
    def ports(self) -> np.ndarray:
        """Port by which each rank sends inside of its node, and across nodes, int64 [2, W]."""
        world, links = len(self.nodes), (self.rates.inside, self.rates.across)
        owners = [self.nodes if link.shared else np.arange(world) for link in links]
        return np.stack([n * world + ports for n, ports in enumerate(owners)])

    def across(self, messages: Messages) -> np.ndarray:
        """Return 1 for messages between two nodes and 0 for others, int64 [N]."""
        return (self.nodes[messages.source] != self.nodes[messages.target]).astype(np.int64)

    def moved(self, messages: Messages) -> tuple[int, int]:
        """Return the bytes inside of a node, and across nodes, of the rank that sends or receives the most."""
        kind, ends = self.across(messages), (messages.source, messages.target)
        inside, across = (
            max(int(np.bincount(end, messages.size * (kind == n), 1).max()) for end in ends) for n in (0, 1)
        )
        return inside, across

    def ends(self, messages: Messages) -> np.ndarray:
        """Return each message's sending and receiving port, int64 [2, N]."""
        return self.ports[self.across(messages), np.stack([messages.source, messages.target])]

    def seconds(self, messages: Messages) -> np.ndarray:
        """Return the seconds of each message on either port, float64 [N]."""
        kind, links = self.across(messages), (self.rates.inside, self.rates.across)
        latency, rate = (np.array([getattr(x, name) for x in links]) for name in ("latency", "bytes_per_second"))
        took: np.ndarray = latency[kind] + messages.size / rate[kind]
        return took

    def per_port(self, messages: Messages) -> np.ndarray:
        """Return the seconds of all messages by port, of the busier direction, float64 [2 W]."""
        took = self.seconds(messages)
        return np.maximum(*(np.bincount(port, took, 2 * len(self.nodes)) for port in self.ends(messages)))

    def busy(self, messages: Messages, rank: int) -> float:
        """Return the seconds that a rank's ports need for all their messages."""
        return float(self.per_port(messages)[self.ports[:, rank]].sum())

    def least(self, messages: Messages) -> float:
        """Return a lower bound of the exchange: the seconds of the busiest port."""
        return float(self.per_port(messages).max(initial=0.0))


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The predicted figures of one pass."""

    seconds: float  # until the last rank is done; of calls that overlap, the mean
    computing: float  # seconds in which that rank computes, or waits for cores that ranks share
    visits: float  # of the rank with the most
    launches: float  # of the rank with the most
    inside: float  # bytes inside of a node, of the rank that sends or receives the most
    across: float  # bytes across nodes, of the rank that sends or receives the most
    mean_inside: float = 0.0  # bytes that a rank sends inside of its node, mean over ranks
    mean_across: float = 0.0  # bytes that a rank sends across nodes, mean over ranks

    @property
    def exposed(self) -> float:
        """Seconds of exchange that no computation hides."""
        return self.seconds - self.computing

    def __add__(self, other: Timed) -> Timed:
        """Return the figures of two passes, one after the other."""
        return Timed(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


def timed(messages: Messages, work: Computing, wire: Wire, *, calls: int = 1, in_flight: int = IN_FLIGHT) -> Timed:
    """Simulate a pass of all ranks together; ``in_flight`` exchanges may be posted and not yet waited for.

    Of ``calls`` equal calls in a row, each posts its first exchange before its predecessor computes, and waits for its
    last one after its successor has begun. These waits occur once, as far as other work can fill them.
    """
    ends, computed, outer = _run(messages, work.seconds, wire, in_flight)
    slowest, extra = int(ends.argmax()) if len(ends) else 0, wire.rates.overhead
    alone, busy, shared = float(ends[slowest]), float(computed[slowest]), 0.0
    if wire.shares_cores:  # what its ports don't need, it waits for cores
        busy, shared = max(busy, alone - wire.busy(messages, slowest)), computed.sum() / extra.at_once
    if calls > 1:
        least = max(float(computed.max()), float(shared), wire.least(messages))
        alone -= max(0.0, min(float(outer[slowest]), alone - least)) * (1 - 1 / calls)
    inside, across = wire.moved(messages)
    sent = np.bincount(wire.across(messages), messages.size, 2) / len(wire.nodes)
    return Timed(
        seconds=alone + extra.call,
        computing=min(busy, alone) + extra.call,
        visits=float(work.visits.sum(1).max()),
        launches=float(work.launches.sum(1).max()),
        inside=inside,
        across=across,
        mean_inside=float(sent[0]),
        mean_across=float(sent[1]),
    )


def _run(
    messages: Messages, seconds: np.ndarray, wire: Wire, in_flight: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the time at which each rank is done, its seconds of computation, and those of the first and last wait."""
    world, extra, ports = len(wire.nodes), wire.rates.overhead, 2 * len(wire.nodes)
    order = np.argsort(messages.step, kind="stable")
    step, kind = messages.step[order], messages.kind[order]
    columns = np.stack([messages.source, messages.target, *wire.ends(messages)])[:, order]
    took = wire.seconds(messages)[order]
    folding = np.where(kind & PARTIAL, messages.size[order] / extra.fold, 0.0)
    last = max(seconds.shape[1], int(step.max(initial=0)) + 1)
    cuts = np.searchsorted(step, np.arange(last + 1))
    free = np.zeros((2, ports))  # when each port, out and in, becomes free
    now, posted, waited, computed = (np.zeros(world) for _ in range(4))
    done: list[np.ndarray] = []  # after the visits of each step
    waits: list[np.ndarray] = []  # of each exchange
    for t in range(last):
        at = slice(cuts[t], cuts[t + 1])
        if at.start < at.stop:
            source, target, out, into = columns[:, at]
            posted = np.maximum(posted, done[t - in_flight] if t >= in_flight else 0.0)
            relayed = source[(kind[at] & RELAYED) > 0]
            posted[relayed] = np.maximum(posted[relayed], waited[relayed])
            begin = np.maximum.reduce([posted[source], posted[target], free[0, out], free[1, into]])
            # Messages on one port share its bandwidth.
            end = begin + np.maximum(*(np.bincount(port, took[at], ports)[port] for port in (out, into)))
            for latest, places in ((waited, source), (waited, target), (free[0], out), (free[1], into)):
                np.maximum.at(latest, places, end)
            waits.append(np.maximum(0.0, waited - now))
            fold = np.bincount(target, folding[at], world)
            now, computed = np.maximum(now, waited) + fold, computed + fold
        if t < seconds.shape[1]:
            now, computed = _share(now, seconds[:, t], extra.at_once), computed + seconds[:, t]
        if wire.shares_cores:  # ranks at different steps also share the cores
            now = now + max(0.0, computed.sum() / extra.at_once - now.max())
        done.append(now)
    return now, computed, sum(waits[1:][-1:], waits[0] if waits else np.zeros(world))


def _share(begin: np.ndarray, seconds: np.ndarray, at_once: float) -> np.ndarray:
    """Return when each rank ends a step that it begins at ``begin``, if ``at_once`` ranks run at full speed."""
    if not 0 < at_once < len(begin):
        return begin + seconds
    end, computing = begin.copy(), list[tuple[float, int]]()
    now = served = 0.0  # the time, and the core seconds until then of a rank that always computes
    for rank in [*np.argsort(begin, kind="stable").tolist(), None]:
        until = float("inf") if rank is None else float(begin[rank])
        while computing:
            pace = min(1.0, at_once / len(computing))
            done = now + (computing[0][0] - served) / pace
            if done > until:
                served += (until - now) * pace
                break
            now, served = done, computing[0][0]
            end[heapq.heappop(computing)[1]] = done
        now = until
        if rank is not None:
            heapq.heappush(computing, (served + float(seconds[rank]), rank))
    return end
