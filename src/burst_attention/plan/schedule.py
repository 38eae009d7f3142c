"""The immutable schedule: layout, mask and route, and the programs that follow from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np

from . import cost
from .assignment import TRAVELS, Assignment, Cube, heads
from .band import band_area
from .build import build_program
from .groups import WHOLE, Groups, divisors
from .layout import Layout, digest
from .mask import Mask
from .program import Program
from .route import ROUTES, Route
from .rows import Direction, Side
from .tally import moved, rows_sent_directly, rows_sent_round
from .tile import Tiles, foreign_rows, meeting, pair_tiles, wanted_tiles
from .uses import Work
from .workload import work_by_rank

MOST_TILES = 1 << 17  # for choosing: of more, some documents stand for all
MOST_DERIVED = 4  # schedules of other masks that one keeps
MOST_RANKS = 256  # likewise; what is chosen for more is what is best over so many

HeadsOrAuto = int | Literal["auto"]
KeepOrAuto = bool | Literal["auto"]


@dataclass(frozen=True)
class Schedule:
    """One sequence over ``layout.world`` ranks as ``rank`` sees it. Integers only: needs no process group."""

    layout: Layout
    mask: Mask
    route: Route
    rank: int
    heads: HeadsOrAuto = 1
    keep: KeepOrAuto = "auto"

    def __post_init__(self) -> None:
        self._check_heads()
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask={self.mask!r} must be a burst_attention.Mask")
        if not 0 <= self.rank < self.layout.world:
            raise ValueError(f"rank={self.rank} is outside of world={self.layout.world}")
        self.mask.check(self.layout.seqlen)

    def _check_heads(self) -> None:
        if self.keep != "auto" and not isinstance(self.keep, bool):
            raise ValueError(f"keep={self.keep!r} must be True, False or 'auto'")
        if self.heads == "auto":
            return
        if isinstance(self.heads, bool) or not isinstance(self.heads, int) or self.heads < 1:
            raise ValueError(f"heads={self.heads!r} must be a number of head groups, at least 1, or 'auto'")
        if self.layout.world % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide the {self.layout.world} ranks of the group; choose a divisor, or "
                "'auto'"
            )
        if self.heads > 1 and not self.route.direct:
            raise ValueError(
                f"route={self.route.name!r} passes shards on along the ring, and heads={self.heads} has other heads at "
                "the next rank; use route='direct', or heads=1"
            )

    def with_mask(self, mask: Mask, *, seqlen: int | None = None) -> Schedule:
        """The same layout and route under another mask; with ``seqlen`` the tokens are cut anew, over so many.

        The last few are kept, with their programs.
        """
        known = (mask, seqlen) if isinstance(mask, Mask) else None
        if known not in self._derived:
            layout = self.layout if seqlen is None else self.layout.cut_for(mask, seqlen)
            self._derived[known] = replace(self, mask=mask, layout=layout)
        self._derived.move_to_end(known)
        while len(self._derived) > MOST_DERIVED:
            self._derived.popitem(last=False)
        return self._derived[known]

    @cached_property
    def _derived(self) -> OrderedDict[tuple[Mask, int | None] | None, Schedule]:
        return OrderedDict()

    @cached_property
    def description(self) -> dict[str, object]:
        """What must be equal on all ranks, in words: short, yet equal on two ranks iff it is the same schedule."""
        return {
            "seqlen": self.layout.seqlen,
            "layout": self.layout.description,
            "route": self.route.name,
            "mask": f"{self.mask!r}" + (f" (digest {digest(self.mask)})" if self.mask.cu_seqlens else ""),
            "heads": self.heads,
            "keep": self.keep,
        }

    @cached_property
    def regions(self) -> np.ndarray:
        return self.mask.regions(self.layout.seqlen)

    def pairs(self) -> dict[tuple[int, int], Tiles]:
        """The tiles of all pairs that have any."""
        ranks = range(self.layout.world)
        return pair_tiles(self.layout, self.layout, self.regions, ranks, ranks)

    def program(self, travels: str, direction: Direction, groups: Groups = WHOLE) -> Program:
        """This rank's program for one pass of a call in whose backward ``travels``, of :data:`TRAVELS`, moves."""
        key = travels, direction, groups
        if key not in self._programs:
            self._programs[key] = build_program(self.work(travels, direction, groups), self.rank)
        return self._programs[key]

    def work(self, travels: str, direction: Direction, groups: Groups = WHOLE) -> Work:
        """One pass of such a call, of all ranks."""
        contexts = self.layout.world // groups.query
        cube = heads(groups, TRAVELS[travels](contexts)[direction])
        return Work(self.layout, self.regions, cube, groups, self.route, direction, self._tables)

    def assigned(self, assign: Assignment, direction: Direction) -> Program:
        """This rank's program for any assignment of pairs to ranks."""
        return self.assigned_cube(heads(WHOLE, assign), direction, WHOLE)

    def assigned_cube(self, cube: Cube, direction: Direction, groups: Groups) -> Program:
        """This rank's program for any assignment of cells to ranks."""
        work = Work(self.layout, self.regions, cube, groups, self.route, direction, self._tables)
        return build_program(work, self.rank)

    @cached_property
    def _programs(self) -> dict[tuple[str, Direction, Groups], Program]:
        return {}

    @cached_property
    def _tables(self) -> dict[bytes, np.ndarray]:
        return {}

    @cached_property
    def _rows_needed(self) -> dict[Side, int]:
        """For each side: rows of other ranks' shards that the ranks' pairs need, all together, in :attr:`_sample`."""
        return foreign_rows(self._sampled_tiles, self.layout.world)

    def choose_groups(self, shape: cost.Shape, travels: str) -> Groups:
        """How heads had best be cut, if it is not said, and whether to keep what a forward fetches.

        What needs the fewest bytes of the busiest rank, in one forward and backward; the fewest groups on a tie.

        Args:
            travels: a name of :data:`TRAVELS`, or ``auto``.

        Raises:
            ValueError: these heads can't be cut into as many groups as were asked for.
        """
        if self.heads == 1 or self.layout.world == 1:
            return WHOLE
        known = shape, travels
        if known not in self._groups:
            candidates = self._candidates(shape)
            self._groups[known] = min(candidates, key=lambda each: self._moved_in_sample(shape, travels, each).max())
        return self._groups[known]

    def _candidates(self, shape: cost.Shape) -> list[Groups]:
        of = partial(Groups.of, q_heads=shape.q_heads, kv_heads=shape.kv_heads)
        divide = partial(Groups.divide, q_heads=shape.q_heads, kv_heads=shape.kv_heads)
        keeps = [False, True] if self.keep == "auto" else [self.keep]
        if self.heads != "auto":
            cut = [of(self.heads)]
        elif self.route.direct:
            cut = [of(n) for n in divisors(self.layout.world) if divide(n)]
        else:
            cut = [WHOLE]
        return [replace(each, keep=keep and each.query > 1) for each in cut for keep in keeps]

    @cached_property
    def _groups(self) -> dict[tuple[cost.Shape, str], Groups]:
        return {}

    def slice_length(self, groups: Groups) -> int:
        """Tokens of this rank's context slice."""
        return sum(self.layout.lengths[owner] for owner in groups.members(groups.context(self.rank)))

    def bytes_moved(self, shape: cost.Shape, travels: str, groups: Groups) -> np.ndarray:
        """int64 [2, W]: what each rank sends, and receives, in one forward and backward over direct routes."""
        if travels == "auto":
            travels = self.choose_travels(shape, groups)
        assignments = TRAVELS[travels](self.layout.world // groups.query)
        tiles = wanted_tiles(self.layout, self.regions, np.ones((self.layout.world, self.layout.world), bool))
        return moved(tiles, np.array(self.layout.lengths), shape, assignments, groups)

    def _moved_in_sample(self, shape: cost.Shape, travels: str, groups: Groups) -> np.ndarray:
        """As :meth:`bytes_moved`, of :attr:`_sample`: for choosing."""
        if travels == "auto":
            travels = self.choose_travels(shape, groups)
        assignments = TRAVELS[travels](self.layout.world // groups.query)
        lengths = np.array(self.layout.lengths)
        if len(self._sample) < len(self.regions):
            lengths = lengths * int(np.diff(self._sample[:, :2]).sum()) // self.layout.seqlen
        return moved(self._sampled_tiles, lengths, shape, assignments, groups)

    @cached_property
    def _sample(self) -> np.ndarray:
        """Regions of which what is best is best of all: every n-th document, where all have millions of tiles."""
        segments, regions = self.layout.table(range(self.layout.world)), self.regions
        if len(segments) * len(segments) * len(regions) <= MOST_TILES:
            return regions
        region, _ = meeting(segments, regions[:, 0], regions[:, 1])
        tiles = int((np.bincount(region, minlength=1) ** 2).sum())
        every = min(-(-tiles // MOST_TILES), len(regions)) if self.mask.prefix is None else 1
        return regions[every // 2 :: every] if every > 1 else regions

    @cached_property
    def _sampled_tiles(self) -> np.ndarray:
        return wanted_tiles(self.layout, self._sample, np.ones((self.layout.world, self.layout.world), bool))

    def choose_travels(self, shape: cost.Shape, groups: Groups = WHOLE) -> str:
        """What had best travel.

        Either, where that leaves the busiest rank markedly less to compute: a contiguous layout under a causal mask.
        Else what needs fewer bytes in the backward, the query side on a tie. Counted as if each shard went straight to
        its users and partial results straight home, whatever the route. With heads cut it is context slices that
        travel, in blocks too, by the bytes of both passes.
        """
        if (shape, groups) not in self._travels:
            self._travels[shape, groups] = self._choose_travels(shape, groups)
        return self._travels[shape, groups]

    @cached_property
    def _travels(self) -> dict[tuple[cost.Shape, Groups], str]:
        return {}

    def _choose_travels(self, shape: cost.Shape, groups: Groups) -> str:
        if groups.query == self.layout.world > 1:  # one context slice: nothing travels between slices
            return "query"
        if groups.query == 1 and self.layout.world > MOST_RANKS:
            return self._over_fewer.choose_travels(shape)
        busiest = {travels: self._busiest(travels, groups) for travels in ("query", "key-value")}
        mean = 3.5 * int(self._work[Side.QUERY].sum()) / (self.layout.world // groups.query)
        if mean < 0.95 * min(busiest.values()) and self._busiest("either", groups) < 0.95 * min(busiest.values()):
            return "either"
        if groups.query > 1:
            busiest |= {travels: self._busiest(travels, groups) for travels in ("either", "blocks")}
            least = 1.05 * min(busiest.values())
            balanced = [travels for travels in ("query", "key-value", "blocks") if busiest[travels] <= least]
            return min(balanced or ["query"], key=lambda travels: self._moved_in_sample(shape, travels, groups).sum())
        totals = {}
        for name, side in (("query", Side.QUERY), ("key-value", Side.KEY)):
            partials = shape.accumulate if self.route.exact else shape.partial
            out, home = (shape.side_bytes(side, Direction.BACKWARD, wide=wide) for wide in (None, partials))
            totals[name] = self._rows_needed[side] * (out + home)
        return min(totals, key=totals.__getitem__)

    @cached_property
    def _over_fewer(self) -> Schedule:
        """The same over :data:`MOST_RANKS`: what is chosen hardly depends on how many, and pairs are their square."""
        layout = replace(self.layout, world=MOST_RANKS)
        return replace(self, layout=layout, rank=0)

    def _busiest(self, travels: str, groups: Groups) -> float:
        """(Query, key) pairs that the rank with most of them computes, pass by pass; a backward's count more."""
        if travels in ("query", "key-value"):
            most = {side: int(work.reshape(-1, groups.query).sum(1).max()) for side, work in self._work.items()}
            return most[Side.QUERY] + 2.5 * most[Side.KEY if travels == "query" else Side.QUERY]
        assignments = TRAVELS[travels](self.layout.world // groups.query)
        seen = self._sampled_tiles
        share = max(1, int(band_area(*_rectangles(seen)).sum())) / max(1, int(self._work[Side.QUERY].sum()))
        i, j = (groups.context(seen[:, column]) for column in (0, 1))
        area = band_area(*_rectangles(seen)) / share
        most_of = {d: np.bincount(assign(i, j), area, minlength=1).max() for d, assign in assignments.items()}
        return float(most_of[Direction.FORWARD] + 2.5 * most_of[Direction.BACKWARD])

    @cached_property
    def _work(self) -> dict[Side, np.ndarray]:
        """(Query, key) pairs by the rank of their query, and of their key."""
        return {side: work_by_rank(self.layout, self.regions, side) for side in Side}

    def traffic(self, shape: cost.Shape, travels: str, groups: Groups = WHOLE) -> cost.Traffic:
        """What this rank sends and receives in one forward and one backward."""
        passes = ((self.program(travels, direction, groups).edges, direction) for direction in Direction)
        return cost.Traffic(
            *(n for edges, d in passes for n in cost.sent_and_received(edges, self.rank, shape, d, groups))
        )


def make_schedule(
    seqlen: int,
    *,
    mask: Mask,
    layout: str,
    route: str,
    rank: int,
    world: int,
    hosts: Sequence[int] | None = None,
    heads: HeadsOrAuto = 1,
    keep: KeepOrAuto = "auto",
) -> Schedule:
    """Check the arguments and choose the route.

    Args:
        route: a name of :data:`ROUTES`, or ``auto``: direct on one host; with several ranks on each of several hosts
            the route that moves fewer rows through the busiest host's link.
        hosts: for each rank the number of its host; None if all share one.
        heads, keep: as for :func:`burst_attention.make_plan`.
    """
    if route != "auto" and route not in ROUTES:
        raise ValueError(f"route={route!r} is unknown; choose one of auto, {', '.join(ROUTES)}")
    shape = Layout(layout, seqlen, world)
    if shape.by_mask and isinstance(mask, Mask):
        shape = shape.cut_for(mask, seqlen)
    direct = Schedule(shape, mask, ROUTES["direct"], rank, heads, keep)
    if heads not in (1, "auto") and route == "auto":
        return direct
    if route != "auto":
        return replace(direct, route=ROUTES[route])
    if hosts is None or len(set(hosts)) in (1, world):
        return direct
    if len(direct.regions) > 16 * len(
        direct._sample
    ):  # along a ring a rank has to know the tiles of all that passes by
        return direct
    if world > MOST_RANKS:  # as the first of them would
        fewer = replace(direct, layout=replace(direct.layout, world=MOST_RANKS), rank=0)
        return replace(direct, route=ROUTES[_quieter_route(fewer, hosts[:MOST_RANKS])])
    return replace(direct, route=ROUTES[_quieter_route(direct, hosts)])


def _quieter_route(schedule: Schedule, hosts: Sequence[int]) -> str:
    """Direct, or the ring where fewer rows leave the busiest host in a forward."""
    tiles, host = schedule._sampled_tiles, np.array(hosts)
    leaving = {"direct": rows_sent_directly(tiles, host), "ring": rows_sent_round(tiles, host)}
    return min(leaving, key=leaving.__getitem__)


def _rectangles(tiles: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rows, columns and band of tiles as :func:`~burst_attention.plan.tile.wanted_tiles` gives them."""
    _, _, q0, q1, k0, k1, lo, hi = tiles.T
    return q1 - q0, k1 - k0, lo, hi
