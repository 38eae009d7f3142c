"""Measure the rates of these ranks, so that plans fit the machine on which they are timed."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from burst_attention import Hardware, make_plan
from burst_attention.attention.calibrate import calibrate
from burst_attention.launch.join import cores
from burst_attention.planner.rates import Rates

from ..pool import WorkerPool

PAYLOAD = 0.95  # share of a link's rate; packet headers take the rest


def calibrated(pool: WorkerPool) -> Rates:
    """Measure rates as ``burst calibrate`` does, with unlimited links.

    All ranks share one machine's cores; the rates say how many cores there are.
    """
    rates = pool.run(partial(calibrate, name="emulated", repeats=5), timeout=600)[0]
    count = cores()
    return replace(rates, overhead=replace(rates.overhead, at_once=float(count if count < pool.world else 0)))


def forget_links(folder: str) -> None:
    """Let the next plan measure this rank's links again, because their limit changed, and keep them in ``folder``."""
    os.environ["XDG_CONFIG_HOME"] = folder
    make_plan(1, hardware=Hardware(rates="preset")).transport.health.measured.clear()


def limited(rates: Rates, link: float | None) -> Rates:
    """Return the rates for links limited to ``link`` bits per second; None for no limit."""
    if link is None:
        return rates
    return replace(rates, across=replace(rates.across, bytes_per_second=PAYLOAD * link / 8, shared=True))
