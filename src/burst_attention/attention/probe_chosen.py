"""Measure the kernels of indexed attention, on all ranks at the same time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import chosen
from ..plan.tile import Tiles
from ..planner.rates import ChosenKernels
from .probe import Probe, full

ROWS, KEYS, COUNT = 256, 2048, 128  # queries, keys of a shard, and those that each query has chosen there
HEADS, DIM, ONE = 8, 64, 1  # of an indexer; with a single head, what does not depend on heads is left
WIDTH, VALUES, GROUP = 160, 128, 16  # numbers of a latent row, those that are its value, and query heads
BLOCK = 32  # keys of a block
ELEMENT = 4  # bytes: kernels widen rows to fp32


def chosen_kernels(probe: Probe) -> ChosenKernels:
    """Return the rates of :mod:`burst_attention.kernels.chosen`.

    Two numbers of heads tell apart what grows with them: an indexer's scores from keeping the best, and products from
    the gather of rows.
    """
    calls = _calls(probe)
    took = dict(zip(calls, (probe.seconds([call])[0] for call in calls.values()), strict=True))
    pairs, rows = ROWS * KEYS, ROWS * COUNT
    a_head = _positive(took["choose, many"] - took["choose, one"], took["choose, many"]) / (HEADS - ONE)
    kept = _positive(took["choose, one"] - a_head, took["choose, one"])
    pooled = _positive(took["blocks"] - HEADS * a_head, took["blocks"])
    rates = {"score": pairs * 2 * DIM / a_head, "keep": pairs / kept, "pool": pairs * HEADS / pooled}
    rates["look"] = ROWS * 2 * COUNT / took["look"]
    for way, products in (("forward", (1, 1)), ("backward", (3, 2))):
        flops = 2 * (products[0] * WIDTH + products[1] * VALUES)
        many, one = took[f"{way}, many"], took[f"{way}, one"]
        each = _positive(many - one, many) / (GROUP - ONE)
        rates[f"rows_{way}"] = rows * flops / each
        rates[f"gather_{way}"] = rows * WIDTH * ELEMENT / _positive(one - each, one)
        rates[f"dense_{way}"] = pairs * GROUP * flops / took[f"{way}, dense"]
    return ChosenKernels(**rates)


def _positive(difference: float, whole: float) -> float:
    """Return a difference of two times, at least a small part of the greater: clocks are not exact."""
    return max(difference, whole / 20, 1e-9)


def _calls(probe: Probe) -> dict[str, Callable[[], Any]]:
    """Return the calls to time, by name."""
    tiles, positions = full(ROWS, KEYS), torch.arange(2 * KEYS, device=probe.device)
    places, seen = positions[:KEYS], Tiles(torch.tensor([tiles]).numpy())

    def random(*shape: int) -> Tensor:
        return probe.random(1, *shape, dtype=torch.float32)

    key, calls = random(1, KEYS, DIM), dict[str, Callable[[], Any]]()
    for name, heads in (("many", HEADS), ("one", ONE)):
        q, weights = random(heads, ROWS, DIM), random(heads, ROWS)
        calls[f"choose, {name}"] = partial(chosen.choose, q, key, weights, places, seen, COUNT, 1.0)
    q, own = random(HEADS, ROWS, DIM), torch.full((ROWS,), KEYS, device=probe.device)
    calls["blocks"] = partial(chosen.choose_blocks, q, key, own, places, seen, COUNT // BLOCK, BLOCK, 1)
    among = random(1, ROWS, 2 * KEYS).argsort(-1)[..., : 2 * COUNT]  # half of them are in this shard
    calls["look"] = partial(chosen.rows_of, among, places, seen, 2 * KEYS)
    at, rows = random(1, ROWS, KEYS).argsort(-1)[..., :COUNT], random(1, KEYS, WIDTH)
    for name, heads, dense in (("many", GROUP, False), ("one", ONE, False), ("dense", GROUP, True)):
        q, dout, delta = random(heads, ROWS, WIDTH), random(heads, ROWS, VALUES), random(heads, ROWS)
        _, lse = chosen.forward(q, rows, VALUES, at, 1.0, dense=dense)
        calls[f"forward, {name}"] = partial(chosen.forward, q, rows, VALUES, at, 1.0, dense=dense)
        stats = lse, delta
        calls[f"backward, {name}"] = partial(chosen.backward, dout, q, rows, VALUES, *stats, at, 1.0, dense=dense)
    return calls
