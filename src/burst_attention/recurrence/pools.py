"""Pools: groups of neighbouring tokens of a document, of which an indexer makes one key each (GLM-5.3).

Pool j of a document holds its tokens j size to (j + 1) size - 1. The tokens behind its last pool are in none. A rank
makes the pools whose last token it holds, and the owners of their other tokens send it those. Then every rank gathers
all pools, which are few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..attention.plan import Plan
from ..attention.unshard import reshard
from ..plan.layout import Layout
from .exchange import RunExchange
from .runs import Run, Runs, runs_of


@dataclass(frozen=True, eq=False)
class Pools:
    """The pools of all documents, numbered in the order of the sequence."""

    size: int
    runs: Runs

    @cached_property
    def numbers(self) -> tuple[range, ...]:
        """Which pools end in each run of ``Runs.every``."""
        found: list[range] = []
        for run, first in zip(self.runs.every, self.first, strict=True):
            at = run.first - run.start
            found.append(range(first + at // self.size, first + (at + run.length) // self.size))
        return tuple(found)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The first pool of each run's document."""
        found, before, count = [], 0, 0
        for run in self.runs.every:
            if run.begins:
                before, count = before + count, (run.stop - run.start) // self.size
            found.append(before)
        return tuple(found)

    @cached_property
    def layout(self) -> Layout:
        """Which rank makes which pools."""
        made: list[list[range]] = [[] for _ in range(self.runs.world)]
        for run, numbers in zip(self.runs.every, self.numbers, strict=True):
            made[run.owner].append(numbers)
        return Layout.of_stretches(made)

    @cached_property
    def starts(self) -> np.ndarray:
        """The position of each pool's first token, int64 [pools]."""
        counts = [len(each) for each in self.numbers]
        start = np.repeat(np.array([run.start for run in self.runs.every], np.int64), counts)
        first = np.repeat(np.array(self.first, np.int64), counts)
        return start + self.size * (np.arange(len(start)) - first)

    @cached_property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """(first, stop), int64 [S_local]: each own token sees the pools first to stop - 1, whose tokens all it sees."""
        own = [self.runs.every[n] for n in self.runs.own]
        lengths = [run.length for run in own]
        first = np.repeat(np.array([self.first[n] for n in self.runs.own], np.int64), lengths)
        before = np.repeat(np.array([run.first - run.start - run.offset for run in own], np.int64), lengths)
        return first, first + (before + np.arange(len(first)) + 1) // self.size

    def lead(self, run: Run) -> int:
        """Return how many tokens before a run are in the first pool that ends in it, or later."""
        return (run.first - run.start) % self.size


def pools_of(plan: Plan, size: int) -> Pools:
    """Return the pools of a plan's documents; ValueError for a layout that separates neighbouring tokens."""
    key, memo = ("pools", size), plan.schedule.memo
    if key not in memo:
        memo[key] = Pools(size, runs_of(plan.schedule.layout, plan.mask.cu_seqlens, plan.rank))
    pools: Pools = memo[key]
    return pools


def pooled(x: Tensor, pool: Callable[[Tensor], Tensor], pools: Pools, plan: Plan) -> Tensor:
    """Make a key of each pool, and gather those of all ranks: [B, pools, D]. Every rank must call it.

    Args:
        x: [B, S_local, C], of this rank's tokens. No gradient flows back to it.
        pool: makes keys [B, n, D] of the tokens of n neighbouring pools, [B, n size, C].
    """
    exchange, own = RunExchange(plan), []
    before = exchange.before(x.transpose(0, 1), pools.size - 1).movedim(2, 0) if pools.size > 1 else None
    for at in sorted(range(len(exchange.own)), key=lambda at: pools.runs.own[at]):  # in the order of the sequence
        run, numbers = exchange.own[at], pools.numbers[pools.runs.own[at]]
        whole, lead = x[:, run.local], pools.lead(run)
        if lead and before is not None:
            whole = torch.cat([before[:, at, before.shape[2] - lead :], whole], 1)
        own.append(whole[:, : len(numbers) * pools.size])
    keys = pool(torch.cat(own, 1)).detach()
    if not pools.layout.seqlen:
        return keys
    return reshard("unshard", keys, 1, "slice", pools.layout, plan.transport, plan.agreement)
