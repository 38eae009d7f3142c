"""Unified Sequence Parallelism (USP, arXiv 2405.07719; LoongTrain's 2-D attention, arXiv 2406.18485): a mesh of ranks.

The W = U R ranks form a mesh. U neighbours exchange tokens for heads, as in Ulysses. Each of them then has the tokens
of all U for one head group. The R ranks with the same heads form a ring and run RingAttention, by the same sweep.

Under a zigzag layout over W ranks, the shards of U neighbours together are a shard of zigzag over R ranks. They differ
in a few tokens if the shards' lengths differ. So the zigzag layout balances the ring without a change.
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
from burst_attention.plan.groups import Groups
from burst_attention.plan.layout import Layout
from burst_attention.plan.route import ROUTES
from burst_attention.plan.slices import Slice
from burst_attention.plan.strategy import Strategy

from .contract import Heads
from .subgroup import Subgroup
from .trade import Trade, to_heads, to_tokens, traded_bytes

CALL = "usp_attention"


@dataclass(frozen=True)
class Slices(Layout):
    """A layout whose shards join those of ``members`` neighbours in the layout ``cut``, ordered by position."""

    cut: Layout = field(kw_only=True)
    members: int = field(kw_only=True)

    @classmethod
    def of(cls, cut: Layout, members: int) -> Slices:
        """Join each ``members`` neighbouring ranks of ``cut``."""
        return cls(cut.name, cut.seqlen, cut.world // members, cut=cut, members=members)

    def table(self, ranks: Sequence[int]) -> np.ndarray:
        """Return the segments of ``ranks``."""
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
        """The layout in a few words."""
        return f"{self.members} neighbours together, {self.cut.description}"


@dataclass(frozen=True, eq=False)
class _Mesh:
    """A plan's ranks as a U x R mesh.

    Attributes:
        neighbours: the U ranks that exchange tokens for heads.
        lengths: number of tokens of each of them.
        ring: the plan of the R ranks with this rank's heads.
        order: indices of the ring's tokens in the neighbours' concatenated shards.
        back: the inverse permutation of ``order``.
    """

    neighbours: Subgroup
    lengths: tuple[int, ...]
    ring: Plan
    order: Tensor
    back: Tensor

    @classmethod
    def of(cls, plan: Plan, groups: int) -> _Mesh:
        """Make the mesh of a plan with ``groups`` neighbours each."""
        cut = plan.schedule.layout
        together, context = Slices.of(cut, groups), plan.rank // groups
        members = Groups(groups).members(context)
        ring_strategy = Strategy(ulysses_degree=1, circulate="key-value")
        route = ROUTES["ring-attention"]
        schedule = replace(plan.schedule, layout=together, route=route, rank=context, strategy=ring_strategy)
        across = range(plan.rank % groups, plan.world, groups)
        # The ring uses the agreement of all ranks: all make the call, so all must learn of one rank's failure.
        ring = Plan(schedule, plan.planner, Subgroup(plan.transport, across), plan.agreement)
        held = np.concatenate([cut.positions(rank) for rank in members])
        by_position = np.argsort(held)
        order = by_position[np.searchsorted(held, together.positions(context), sorter=by_position)]
        lengths = tuple(cut.lengths[rank] for rank in members)
        orders = torch.from_numpy(order), torch.from_numpy(np.argsort(order))
        return cls(Subgroup(plan.transport, members), lengths, ring, *orders)


@dataclass(frozen=True, eq=False)
class UspAttention:
    """Exact attention over shards of any layout.

    It takes this rank's q [B, Hq, S_local, D], and k and v [B, Hkv, S_local, D].

    Args:
        degree: U, the Ulysses degree. None: the greatest common divisor of ranks and key-value heads.
    """

    degree: int | None = None
    _meshes: WeakKeyDictionary[Plan, dict[int, _Mesh]] = field(default_factory=WeakKeyDictionary, repr=False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor:
        """Compute the attention; every rank of the group must call it.

        Raises:
            TypeError, ValueError: an argument is invalid, or the ranks disagree; the same class on all ranks.
        """
        with plan.agreement.entering(CALL):
            scale, _ = check_types(q, k, v, scale, "auto")
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
        out = burst_attention(q, k, v, mesh.ring, scale=scale)
        return to_tokens(replace(trade, number=health.next_call()), out.index_select(2, back))

    def check(self, heads: Heads, world: int) -> None:
        """Raise ValueError if the Ulysses degree does not divide ``world`` ranks and the heads."""
        self.groups(heads.kv_heads, world)

    def groups(self, kv_heads: int, world: int) -> int:
        """Return U, the Ulysses degree, for these key-value heads and ranks.

        Raises:
            ValueError: the given degree does not divide them.
        """
        if self.degree is None:
            return math.gcd(kv_heads, world)
        if kv_heads % self.degree or world % self.degree:
            raise ValueError(
                f"--engine usp with --ulysses-degree {self.degree}: it must divide the {world} ranks and the "
                f"{kv_heads} key-value heads; leave it out to take the largest that does"
            )
        return self.degree

    def sent(self, plan: Plan, heads: Heads, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        """Return the bytes that this rank sends in (forward, backward), in the all-to-alls and the ring."""
        groups = self.groups(heads.kv_heads, plan.world)
        mesh = self._mesh(plan, groups)
        traded = traded_bytes(plan.length, sum(mesh.lengths), groups, heads, batch, dtype)
        q_heads, kv_heads = heads.q_heads // groups, heads.kv_heads // groups
        ring = mesh.ring.bytes(batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=heads.head_dim, dtype=dtype)
        return traded[0] + ring.forward_sent, traded[1] + ring.backward_sent

    def _mesh(self, plan: Plan, groups: int) -> _Mesh:
        """Return the mesh of a plan; it is cached, because it holds the ring's programs."""
        of_plan = self._meshes.setdefault(plan, {})
        if groups not in of_plan:
            of_plan[groups] = _Mesh.of(plan, groups)
        return of_plan[groups]
