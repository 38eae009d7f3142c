"""Indexers that choose among pools of keys (GLM-5.3's), on shards.

Such an indexer makes one key of each group of ``index_kpool`` neighbouring tokens, a pool, and chooses among the pools
that a query sees whole. To these it adds the tail: tokens up to the query that are in no such pool. Its forward runs
unchanged, as that of other indexers, but for three of its methods. One would make a mask of all pairs, and two would
count pools from the start of this rank's shard. With a cache it gets none: what it keeps are the keys of all pools, on
every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from burst_attention.attention.chosen import choose_between
from burst_attention.attention.plan import Plan
from burst_attention.recurrence.pools import PastPools, Pools, pooled, pooled_in_step, pools_of, pools_of_step

from ..running import ALONE, running_plans
from . import checks
from .dealt import Step, passed
from .indexed import Indexer
from .own_attention import Recorded, name_of, unknown


class PooledIndexer(Indexer):
    """An indexer that chooses among the pools of keys of all ranks."""

    index_kpool: int
    head_dim: int
    layer_idx: int
    past: PastPools | None = None  # of the call that runs, with a cache

    @torch.compiler.disable  # it runs under a mode of torch functions
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(plan := self._plan(), Plan):
            with plan.agreement.entering("choose_keys", once=True):
                checks.check_pools(self, plan)
                checks.mask_request(kwargs.get("attention_mask"))
        if plan is None or (name := passed(kwargs)) is None:
            return super().forward(*args, **kwargs)
        with kwargs[name].pooling(self.layer_idx) as self.past:
            try:
                return super().forward(*args, **kwargs | {name: None})
            finally:
                del self.past

    def columns(self, plan: Any) -> int:
        """Return the number of pools."""
        return self._pools(plan).count

    def choose(self, plan: Any, q: Tensor, keys: Tensor, weights: Any, **how: Any) -> Tensor:
        """Return the numbers of the best pools, int64 [B, S_local, count], -1 for none; ``keys`` are of all pools."""
        first, stop = map(torch.from_numpy, self._pools(plan).seen)
        return choose_between(q, keys, weights.float(), first, stop, how["count"], how["scale"])

    def get_visible_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Return a stand-in for which tokens each query sees."""
        stock: Any = super()
        return stock.get_visible_tokens(*args, **kwargs) if self._plan() is None else Seen(self)

    def get_pooled_states(self, packed_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys of all ranks' pools [B, n, D], their tokens' positions [B, n, size] and ones [B, n]."""
        stock: Any = super()
        if (plan := self._plan()) is None:
            alone: tuple[Tensor, Tensor, Tensor] = stock.get_pooled_states(packed_states)
            return alone

        def keys_of(states: Tensor) -> Tensor:
            keys: Tensor = stock.get_pooled_states(states)[0] if states.shape[1] else states[..., : self.head_dim]
            return keys

        pools = self._pools(plan)
        if isinstance(plan, Plan):
            keys = pooled(packed_states, keys_of, pools, plan, past=self.past)
        else:
            assert self.past is not None  # only a cache makes steps
            keys = pooled_in_step(packed_states, keys_of, pools, self.past)
        starts = torch.from_numpy(pools.starts).to(keys.device, non_blocking=True)
        tokens = starts[:, None] + torch.arange(self.index_kpool, device=keys.device)
        tokens = tokens.expand(len(keys), -1, -1)
        return keys, tokens, torch.ones(tokens.shape[:2], dtype=torch.bool, device=keys.device)

    def append_visible_tail(self, topk_indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Append the positions of each query's tail, -1 behind them: [B, S_local, chosen + size - 1]."""
        stock: Any = super()
        if (plan := self._plan()) is None:
            alone: Tensor = stock.append_visible_tail(topk_indices, *args, **kwargs)
            return alone
        tail = torch.from_numpy(self._pools(plan).tails())
        tail = tail.to(topk_indices.device, non_blocking=True).expand(len(topk_indices), -1, -1)
        return torch.cat([topk_indices, tail], -1)

    def _plan(self) -> Plan | Step | None:
        """Return the plan of the running call, or a cache's step; None if the module runs alone."""
        plans = running_plans(self)
        if plans is ALONE or isinstance(plans, Step):
            return None if plans is ALONE else plans
        return checks.choose(plans, None)

    def _pools(self, plan: Plan | Step) -> Pools:
        """Return the pools of the running call, with those of its cache."""
        if isinstance(plan, Plan):
            return pools_of(plan, self.index_kpool)
        return pools_of_step(plan.first, plan.span, self.index_kpool)


@dataclass(frozen=True, eq=False)
class Seen(Recorded):
    """Stands for which tokens each query sees, or which pools: those whose last token it sees, bool [B, S, n]."""

    module: Any
    pools: bool = False
    inverted: bool = False

    @property
    def hides(self) -> bool:
        return self.pools and self.inverted

    def gather(self, dim: int, index: Tensor) -> Any:
        """Return what is seen of pools, by their last tokens; or whether chosen pools are seen, which all are."""
        if dim != -1 or self.inverted:
            return self.changed_by(torch.gather, (self,), {})
        return index >= 0 if self.pools else replace(self, pools=True)

    def __and__(self, valid: Tensor) -> Any:
        return self if self.pools and bool(valid.all()) else self.changed_by(torch.logical_and, (self,), {})

    def __invert__(self) -> Any:
        return replace(self, inverted=not self.inverted)

    def changed_by(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Refuse all other operations."""
        raise unknown(self.module, f"applies {name_of(func)} to its mask")
