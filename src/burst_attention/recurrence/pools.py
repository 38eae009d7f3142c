"""Pools: groups of neighbouring tokens of a document, of which an indexer makes one key each (GLM-5.3).

Pool j of a document holds its tokens j size to (j + 1) size - 1. The tokens behind its last pool are in none. A rank
makes the pools whose last token it holds, and the owners of their other tokens send it those. Then every rank gathers
all pools, which are few. With a cache every rank keeps them, and the tokens of a pool that is not complete yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.plan import Plan
from ..attention.unshard import reshard
from ..plan.layout import Layout
from .exchange import Past, RunExchange
from .runs import Run, Runs, runs_of


@dataclass(frozen=True, eq=False)
class Pools:
    """The pools of all documents, numbered in the order of the sequence.

    Runs behind the tokens of a cache go on with its document, which starts at 0. Its pools come first.
    """

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

    @property
    def held(self) -> int:
        """How many pools end before the first run: those of a cache."""
        return self.numbers[0].start

    @property
    def count(self) -> int:
        """How many pools there are, with those of a cache."""
        return self.numbers[-1].stop

    @cached_property
    def layout(self) -> Layout:
        """Which rank makes which pools, counted from the first that ends in a run."""
        made: list[list[range]] = [[] for _ in range(self.runs.world)]
        for run, numbers in zip(self.runs.every, self.numbers, strict=True):
            made[run.owner].append(range(numbers.start - self.held, numbers.stop - self.held))
        return Layout.of_stretches(made)

    @cached_property
    def starts(self) -> np.ndarray:
        """The position of each pool's first token, int64 [pools]."""
        counts = [len(each) for each in self.numbers]
        start = np.repeat(np.array([run.start for run in self.runs.every], np.int64), counts)
        first = np.repeat(np.array(self.first, np.int64), counts)
        made = start + self.size * (self.held + np.arange(len(start)) - first)
        return np.concatenate([self.size * np.arange(self.held), made])

    @cached_property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """(first, stop), int64 [S_local]: each own token sees the pools first to stop - 1, whose tokens all it sees."""
        first = self._of_tokens([self.first[n] for n in self.runs.own])
        return first, first + (self._places + 1) // self.size

    def tails(self) -> np.ndarray:
        """Return the positions of each own token's tail, int64 [S_local, size - 1], -1 behind them."""
        stop = self._of_tokens([self.runs.every[n].start for n in self.runs.own]) + self._places + 1
        count, at = ((self._places + 1) % self.size)[:, None], np.arange(self.size - 1)
        return np.where(at < count, stop[:, None] - count + at, -1)

    @property
    def _places(self) -> np.ndarray:
        """The own tokens' places in their documents, int64 [S_local]."""
        own = (self.runs.every[n] for n in self.runs.own)
        before = self._of_tokens([run.first - run.start - run.offset for run in own])
        return before + np.arange(len(before))

    def _of_tokens(self, values: list[int]) -> np.ndarray:
        """Repeat a value of each own run for all of its tokens: int64 [S_local]."""
        return np.repeat(np.array(values, np.int64), [self.runs.every[n].length for n in self.runs.own])

    def lead(self, run: Run) -> int:
        """Return how many tokens before a run are in the first pool that ends in it, or later."""
        return (run.first - run.start) % self.size


def pools_of(plan: Plan, size: int) -> Pools:
    """Return the pools of a plan's documents; ValueError for a layout that separates neighbouring tokens."""
    key, memo = ("pools", size), plan.schedule.memo
    if key not in memo:
        runs = runs_of(plan.schedule.layout, plan.mask.cu_seqlens, plan.rank)
        if plan.mask.cu_seqlens is None:  # one document, which a cache may have begun
            runs = replace(runs, every=tuple(replace(run, start=0) for run in runs.every))
        memo[key] = Pools(size, runs)
    pools: Pools = memo[key]
    return pools


@lru_cache(maxsize=4)
def pools_of_step(first: int, stop: int, size: int) -> Pools:
    """Return the pools of one document, whose tokens from ``first`` on are on every rank."""
    return Pools(size, Runs((Run(0, 0, first, stop - first, 0, stop),), 0, 1))


@dataclass
class PastPools(Past):
    """What an indexer keeps of all tokens so far, equal on all ranks. None before the first token.

    ``columns``: [B, C, size], the last tokens; zeros before the first. ``keys``: [B, pools, D]. It has no ``state``.
    """

    keys: Tensor | None = None

    def check(self, pools: Pools) -> None:
        """Refuse what is not of the tokens before these pools."""
        held, incomplete = 0 if self.keys is None else self.keys.shape[1], pools.lead(pools.runs.every[0])
        if held != pools.held or (incomplete and self.columns is None):
            tokens = "" if self.columns is not None else ", without the last tokens"
            raise ValueError(
                f"the cache has {held} pools of keys{tokens}, but {pools.held} pools and {incomplete} tokens come "
                "before the new tokens; call its reset() on every rank"
            )

    def join(self, keys: Tensor) -> Tensor:
        """Append the keys of new pools; return all."""
        if self.keys is None:
            self.keys = keys
        elif keys.shape[1]:
            self.keys = torch.cat([self.keys, keys], 1)
        return self.keys


def pooled(
    x: Tensor, pool: Callable[[Tensor], Tensor], pools: Pools, plan: Plan, *, past: PastPools | None = None
) -> Tensor:
    """Make a key of each pool, and gather those of all ranks: [B, pools, D]. Every rank must call it.

    Args:
        x: [B, S_local, C], of this rank's tokens. No gradient flows back to it.
        pool: makes keys [B, n, D] of the tokens of n neighbouring pools, [B, n size, C].
        past: what a cache keeps of the tokens before, to which it adds these. Their pools come first.
    """
    if past is not None:
        with plan.agreement.entering("pools of keys", once=True):
            past.check(pools)
    exchange, own = RunExchange(plan, past=past), []
    before = exchange.before(x.transpose(0, 1), pools.size - 1).movedim(2, 0) if pools.size > 1 else None
    for at in sorted(range(len(exchange.own)), key=lambda at: pools.runs.own[at]):  # in the order of the sequence
        run, numbers = pools.runs.every[pools.runs.own[at]], pools.numbers[pools.runs.own[at]]
        whole, lead = x[:, run.local], pools.lead(run)
        if lead and before is not None:
            whole = torch.cat([before[:, at, before.shape[2] - lead :], whole], 1)
        own.append(whole[:, : len(numbers) * pools.size])
    keys = pool(torch.cat(own, 1)).detach()
    if pools.layout.seqlen:
        keys = reshard("unshard", keys, 1, "slice", pools.layout, plan.transport, plan.agreement)
    return keys if past is None else past.join(keys)


def pooled_in_step(x: Tensor, pool: Callable[[Tensor], Tensor], pools: Pools, past: PastPools) -> Tensor:
    """As :func:`pooled`, of tokens x [B, n, C] that every rank has: each makes the same keys. Exchanges nothing."""
    past.check(pools)
    size, run = pools.size, pools.runs.every[0]
    columns = x.mT if past.columns is None else torch.cat([past.columns, x.mT], 2)
    whole = columns[..., columns.shape[2] - run.length - pools.lead(run) :].mT
    keys = pool(whole[:, : (pools.count - pools.held) * size])
    past.columns = F.pad(columns, (max(0, size - columns.shape[2]), 0))[..., -size:].clone()
    return past.join(keys)
