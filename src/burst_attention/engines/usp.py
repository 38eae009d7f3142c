"""Unified Sequence Parallelism (USP, arXiv 2405.07719; LoongTrain's 2-D attention, arXiv 2406.18485): a mesh of ranks.

Of W = U R ranks U neighbours exchange tokens for heads, as Ulysses does; each of them then has the tokens of all U, of
one head group, and takes them round a ring of the R ranks that have the same heads: RingAttention, by the same sweep.

The shards of U neighbours under a zigzag layout over W ranks are together a shard of zigzag over R ranks (but for the
few tokens by which shards of a length that does not divide differ), so that the ring is balanced by that layout as it
is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from burst_attention.attention.checks import check_tensors, check_types
from burst_attention.attention.derivatives import check_transforms
from burst_attention.attention.entry import burst_attention
from burst_attention.attention.plan import Plan
from burst_attention.plan.choose import HeadsOrAuto
from burst_attention.plan.groups import Groups
from burst_attention.plan.layout import Layout
from burst_attention.plan.route import ROUTES
from burst_attention.plan.slices import Slice

from .contract import Heads
from .subgroup import Subgroup
from .trade import Trade, to_heads, to_tokens, traded_bytes

CALL = "usp_attention"


@dataclass(frozen=True)
class Slices(Layout):
    """The shards of ``members`` neighbours each of the layout ``cut``, side by side by position."""

    cut: Layout = field(kw_only=True)
    members: int = field(kw_only=True)

    @classmethod
    def of(cls, cut: Layout, members: int) -> Slices:
        """Of ``cut``'s ranks, so many together."""
        return cls(cut.name, cut.seqlen, cut.world // members, cut=cut, members=members)

    def table(self, ranks: Sequence[int]) -> np.ndarray:
        return np.concatenate([self._tables[rank] for rank in ranks])

    @cached_property
    def _tables(self) -> list[np.ndarray]:
        tables = []
        for context in range(self.world):
            owners = tuple(Groups(self.members).members(context))
            table = Slice(self.cut, owners).segments(owners).copy()
            table[:, 0] = context
            tables.append(table)
        return tables

    @property
    def description(self) -> str:
        return f"{self.members} neighbours together, {self.cut.description}"


@dataclass(frozen=True, eq=False)
class _Mesh:
    """A plan's ranks as U x R.

    Attributes:
        neighbours: the U ranks that exchange tokens for heads; ``lengths``: how many tokens each has.
        ring: the plan of the R ranks with this rank's heads.
        order: where the ring's tokens are in the neighbours' shards, laid end to end; ``back``: the other way round.
    """

    neighbours: Subgroup
    lengths: tuple[int, ...]
    ring: Plan
    order: Tensor
    back: Tensor

    @classmethod
    def of(cls, plan: Plan, groups: int) -> _Mesh:
        """Of ``groups`` neighbours each."""
        cut = plan.schedule.layout
        together, context = Slices.of(cut, groups), plan.rank // groups
        members = Groups(groups).members(context)
        schedule = replace(plan.schedule, layout=together, route=ROUTES["ring-attention"], rank=context)
        across = range(plan.rank % groups, plan.world, groups)
        # All ranks agree on a call of the ring: they all make it, and what keeps one from it the others must hear of.
        ring = Plan(replace(schedule, heads=1, assignment="auto"), Subgroup(plan.transport, across), plan.agreement)
        held = np.concatenate([cut.positions(rank) for rank in members])
        by_position = np.argsort(held)
        order = by_position[np.searchsorted(held, together.positions(context), sorter=by_position)]
        lengths = tuple(cut.lengths[rank] for rank in members)
        orders = torch.from_numpy(order), torch.from_numpy(np.argsort(order))
        return cls(Subgroup(plan.transport, members), lengths, ring, *orders)


@dataclass(frozen=True, eq=False)
class UspAttention:
    """Exact attention over shards of any layout: q [B, Hq, S_local, D], k and v [B, Hkv, S_local, D] of this rank.

    Args:
        heads: U, into how many groups heads are cut; ``auto``: the most that divide the ranks and the key-value heads.
    """

    heads: HeadsOrAuto = "auto"
    _meshes: WeakKeyDictionary[Plan, dict[int, _Mesh]] = field(default_factory=WeakKeyDictionary, repr=False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor:
        """Every rank of the group must call it.

        Raises:
            TypeError, ValueError: an argument can't be used, or the ranks disagree: the same class on all of them.
        """
        with plan.agreement.entering(CALL):
            scale = check_types(q, k, v, scale, "key-value", "auto")
            check_transforms(CALL, q=q, k=k, v=v)
            check_tensors(q, k, v, plan.length)
            plan.transport.check_device(q.device)
            groups = self.groups(k.shape[1], plan.world)
            shapes = {name: [*x.shape[:2], x.shape[3]] for name, x in (("q", q), ("k", k), ("v", v))}
            fields = {**plan.schedule.description, **shapes, "dtype": str(q.dtype), "scale": scale}
            mesh = self._mesh(plan, groups)
            order, back = (x.to(q.device) for x in (mesh.order, mesh.back))
        plan.agreement.agree(CALL, fields | {"head groups": groups})
        health = plan.transport.health
        trade = Trade(CALL, mesh.neighbours, plan.agreement, mesh.lengths, health.next_call())
        q, k, v = (x.index_select(2, order) for x in to_heads(trade, q, k, v))
        out = burst_attention(q, k, v, mesh.ring, scale=scale, travels="key-value")
        return to_tokens(replace(trade, number=health.next_call()), out.index_select(2, back))

    def check(self, heads: Heads, world: int) -> None:
        """Raise ValueError if ``world`` ranks can't be so many groups of heads."""
        self.groups(heads.kv_heads, world)

    def groups(self, kv_heads: int, world: int) -> int:
        """U, of so many key-value heads and ranks.

        Raises:
            ValueError: what was asked for does not divide them.
        """
        if self.heads == "auto":
            return math.gcd(kv_heads, world)
        if kv_heads % self.heads or world % self.heads:
            raise ValueError(
                f"--engine usp with --heads {self.heads}: it must divide the {world} ranks and the {kv_heads} "
                "key-value heads; leave it out to have the greatest that does"
            )
        return self.heads

    def sent(self, plan: Plan, heads: Heads, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes that this rank sends in a forward and in a backward: the exchange of heads, and the ring."""
        groups = self.groups(heads.kv_heads, plan.world)
        mesh = self._mesh(plan, groups)
        traded = traded_bytes(plan.length, sum(mesh.lengths), groups, heads, batch, dtype)
        counts = {"q_heads": heads.q_heads // groups, "kv_heads": heads.kv_heads // groups}
        ring = mesh.ring.bytes(batch=batch, **counts, head_dim=heads.head_dim, dtype=dtype, travels="key-value")
        return traded[0] + ring.forward_sent, traded[1] + ring.backward_sent

    def _mesh(self, plan: Plan, groups: int) -> _Mesh:
        """Made once for each plan: it has the ring's programs."""
        of_plan = self._meshes.setdefault(plan, {})
        if groups not in of_plan:
            of_plan[groups] = _Mesh.of(plan, groups)
        return of_plan[groups]
