"""The immutable schedule: layout, mask and route, and the programs that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from . import cost
from .assignment import TRAVELS, Assignment, rows
from .layout import Layout, digest
from .mask import Mask
from .program import Pairs, Program, all_edges, build_program, touched_pairs
from .route import ROUTES, Route
from .rows import Direction, Side
from .tile import Tiles, foreign_rows, pair_areas, pair_tiles


@dataclass(frozen=True)
class Schedule:
    """One sequence over ``layout.world`` ranks as ``rank`` sees it. Integers only: needs no process group."""

    layout: Layout
    mask: Mask
    route: Route
    rank: int

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask={self.mask!r} must be a burst_attention.Mask")
        if not 0 <= self.rank < self.layout.world:
            raise ValueError(f"rank={self.rank} is outside of world={self.layout.world}")
        self.mask.check(self.layout.seqlen)

    def with_mask(self, mask: Mask, *, seqlen: int | None = None) -> Schedule:
        """The same layout and route under another mask; with ``seqlen`` the tokens are cut anew, over so many."""
        if seqlen is None:
            return replace(self, mask=mask)
        documents = tuple(mask.cu_seqlens) if self.layout.per_document and mask.cu_seqlens else None
        return replace(self, mask=mask, layout=replace(self.layout, seqlen=seqlen, documents=documents))

    @cached_property
    def description(self) -> dict[str, object]:
        """What must be equal on all ranks, in words: short, yet equal on two ranks iff it is the same schedule."""
        return {
            "seqlen": self.layout.seqlen,
            "layout": self.layout.description,
            "route": self.route.name,
            "mask": f"{self.mask!r}" + (f" (digest {digest(self.mask)})" if self.mask.cu_seqlens else ""),
        }

    @cached_property
    def regions(self) -> np.ndarray:
        return self.mask.regions(self.layout.seqlen)

    def pairs(self, wanted: np.ndarray | None = None) -> Pairs:
        """The tiles of the pairs ``wanted`` (int [N, 2]; default: of all pairs)."""
        ranks = tuple(range(self.layout.world))
        if wanted is None:
            return pair_tiles(self.layout, self.layout, self.regions, ranks, ranks)
        owners: dict[tuple[int, ...], list[int]] = {}  # key owners wanted -> the query owners that want just those
        for i in ranks:
            owners.setdefault(tuple(wanted[wanted[:, 0] == i, 1].tolist()), []).append(i)
        tiles: dict[tuple[int, int], Tiles] = {}
        for k_owners, q_owners in owners.items():
            tiles |= pair_tiles(self.layout, self.layout, self.regions, q_owners, k_owners)
        return tiles

    def program(self, travels: str, direction: Direction) -> Program:
        """This rank's program for one pass of a call in whose backward ``travels``, of :data:`TRAVELS`, moves."""
        key = travels, direction
        if key not in self._programs:
            self._programs[key] = self.assigned(TRAVELS[travels](self.layout.world)[direction], direction)
        return self._programs[key]

    def assigned(self, assign: Assignment, direction: Direction) -> Program:
        """This rank's program for any assignment of pairs to ranks."""
        pairs = self.pairs(touched_pairs(assign, self.route, self.rank, self.layout.world))
        return build_program(pairs, assign, self.route, direction, self.layout, self.rank)

    @cached_property
    def _programs(self) -> dict[tuple[str, Direction], Program]:
        return {}

    @cached_property
    def _rows_needed(self) -> dict[Side, int]:
        """For each side: rows of other ranks' shards that the ranks' pairs need, all together."""
        ranks = range(self.layout.world)
        return foreign_rows(self.layout, self.layout, self.regions, ranks)

    def choose_travels(self, shape: cost.Shape) -> str:
        """What had best travel.

        Either, where that leaves the busiest rank markedly less to compute: a contiguous layout under a causal mask.
        Else what needs fewer bytes in the backward, the query side on a tie. Counted as if each shard went straight to
        its users and partial results straight home, whatever the route.
        """
        if self._busiest("either") < 0.95 * min(self._busiest("query"), self._busiest("key-value")):
            return "either"
        totals = {}
        for name, side in (("query", Side.QUERY), ("key-value", Side.KEY)):
            out, home = (
                shape.side_bytes(side, Direction.BACKWARD, partial=partial, exact=self.route.exact)
                for partial in (False, True)
            )
            totals[name] = self._rows_needed[side] * (out + home)
        return min(totals, key=totals.__getitem__)

    def _busiest(self, travels: str) -> float:
        """(Query, key) pairs that the rank with most of them computes, pass by pass; a backward's count more."""
        world = self.layout.world
        most = {direction: self._areas_by(assign) for direction, assign in TRAVELS[travels](world).items()}
        return most[Direction.FORWARD] + 2.5 * most[Direction.BACKWARD]

    def _areas_by(self, assign: Assignment) -> int:
        i, j, area = self._areas
        return int(np.bincount(assign(i, j), area, minlength=1).max(initial=0))

    @cached_property
    def _areas(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ranks = range(self.layout.world)
        return pair_areas(self.layout, self.layout, self.regions, ranks)

    def traffic(self, shape: cost.Shape, travels: str) -> cost.Traffic:
        """What this rank sends and receives in one forward and one backward."""
        passes = ((self.program(travels, direction), direction) for direction in Direction)
        return cost.Traffic(
            *(n for p, direction in passes for n in cost.sent_and_received(p.edges, self.rank, shape, direction))
        )


def make_schedule(
    seqlen: int, *, mask: Mask, layout: str, route: str, rank: int, world: int, hosts: Sequence[int] | None = None
) -> Schedule:
    """Check the arguments and choose the route.

    Args:
        route: a name of :data:`ROUTES`, or ``auto``: direct on one host; with several ranks on each of several hosts
            the route that moves fewer rows through the busiest host's link.
        hosts: for each rank the number of its host; None if all share one.
    """
    if route != "auto" and route not in ROUTES:
        raise ValueError(f"route={route!r} is unknown; choose one of auto, {', '.join(ROUTES)}")
    shape = Layout(layout, seqlen, world)
    if shape.per_document and isinstance(mask, Mask) and mask.cu_seqlens is not None:
        shape = replace(shape, documents=tuple(mask.cu_seqlens))
    direct = Schedule(shape, mask, ROUTES["direct"], rank)
    if route != "auto":
        return replace(direct, route=ROUTES[route])
    if hosts is None or len(set(hosts)) in (1, world):
        return direct
    candidates = [direct, replace(direct, route=ROUTES["ring"])]
    return min(candidates, key=lambda schedule: _busiest_link(schedule, hosts))


def _busiest_link(schedule: Schedule, hosts: Sequence[int]) -> int:
    """Rows that leave the busiest host in a forward."""
    leaving: dict[int, int] = dict.fromkeys(hosts, 0)
    edges = all_edges(schedule.pairs(), rows, schedule.route, Direction.FORWARD, schedule.layout)
    for edge in edges:
        if hosts[edge.source] != hosts[edge.target]:
            leaving[hosts[edge.source]] += edge.rows.count
    return max(leaving.values())
