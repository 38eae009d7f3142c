"""Rates of the ranks at hand: what plans by predicted time shall plan for the machine that it is measured on."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from burst_attention.attention.calibrate import Sizes, calibrate
from burst_attention.planner.rates import Link, Rates
from burst_attention.testing import WorkerPool

SIZES = Sizes(repeats=5)
PAYLOAD = 0.95  # of what a bucket lets through: the rest is headers of packets


def calibrated(pool: WorkerPool) -> Rates:
    """By ``burst calibrate``'s own measurements, at links without a limit; all ranks share one machine's cores."""
    rates = pool.run(partial(calibrate, name="emulated", sizes=SIZES), timeout=600)[0]
    cores = len(os.sched_getaffinity(0))
    return replace(rates, overhead=replace(rates.overhead, at_once=float(cores if cores < pool.world else 0)))


def limited(rates: Rates, link: float | None) -> Rates:
    """The same where each node's link has a limit, in bits per second; None for no limit."""
    if link is None:
        return rates
    across = Link(latency=rates.across.latency, bytes_per_second=PAYLOAD * link / 8, shared=True)
    return replace(rates, across=across)
