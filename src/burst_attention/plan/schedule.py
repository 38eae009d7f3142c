"""The immutable schedule: layout, mask and route, and the programs that follow from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from . import cost
from .assignment import TRAVELS, Assignment, Cube, heads
from .build import Builder
from .choose import (
    LAYOUTS_TRIED,
    HeadsOrAuto,
    KeepOrAuto,
    Planner,
    Prediction,
    WavesOrAuto,
    by_work_and_bytes,
    candidates,
    cuts,
    in_all_waves,
    least_regret,
    predict,
    representative,
)
from .groups import WHOLE, Groups
from .layout import BALANCED, Layout, digest
from .mask import Mask
from .program import Program
from .route import ROUTES, Route
from .rows import Direction
from .tally import Tally, edge_messages, rows_sent_by_nodes, rows_sent_directly, rows_sent_round
from .tile import Tiles, pair_tiles, wanted_tiles
from .timing import OnPaper, Timed, Wire, on_paper
from .uses import Work

MOST_FOR_A_RING = 32  # ranks up to which it is predicted whether a ring is faster: edge by edge
MOST_DOCUMENTS = 64  # that are looked at one by one to choose what travels
MOST_DERIVED = 4  # schedules of other masks that one keeps
MOST_WAVES = 64
MOST_RANKS = 256  # whose pairs are looked at to choose; what is chosen for more is what is best over so many


@dataclass(frozen=True)
class Schedule:
    """One sequence over ``layout.world`` ranks as ``rank`` sees it. Integers only: needs no process group."""

    layout: Layout
    mask: Mask
    route: Route
    rank: int
    heads: HeadsOrAuto = 1
    keep: KeepOrAuto = "auto"
    assignment: str = "auto"
    waves: WavesOrAuto = "auto"
    planner: Planner = field(default_factory=Planner, compare=False, repr=False)
    layout_left: bool = field(default=False, repr=False)  # was it left open?
    builder: type[Builder] = field(default=Builder, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check_heads()
        if self.assignment != "auto" and self.assignment not in TRAVELS:
            raise ValueError(f"assignment={self.assignment!r} is unknown; choose one of auto, {', '.join(TRAVELS)}")
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask={self.mask!r} must be a burst_attention.Mask")
        if not 0 <= self.rank < self.layout.world:
            raise ValueError(f"rank={self.rank} is outside of world={self.layout.world}")
        self.mask.check(self.layout.seqlen)

    def _check_heads(self) -> None:
        if self.keep != "auto" and not isinstance(self.keep, bool):
            raise ValueError(f"keep={self.keep!r} must be True, False or 'auto'")
        self._check_waves()
        if self.heads == "auto":
            return
        if isinstance(self.heads, bool) or not isinstance(self.heads, int) or self.heads < 1:
            raise ValueError(f"heads={self.heads!r} must be a number of head groups, at least 1, or 'auto'")
        if self.layout.world % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide the {self.layout.world} ranks of the group; choose a divisor, or "
                "'auto'"
            )
        if self.heads > 1 and self.route.ring:
            raise ValueError(
                f"route={self.route.name!r} passes shards on along the ring, and heads={self.heads} has other heads at "
                "the next rank; use route='direct', or heads=1"
            )

    def _check_waves(self) -> None:
        waves = self.waves
        if waves == "auto":
            return
        if isinstance(waves, bool) or not isinstance(waves, int) or not 0 <= waves <= MOST_WAVES:
            raise ValueError(f"waves={waves!r} must be a number of waves, 0 to {MOST_WAVES}, or 'auto'")
        if waves and not self.route.direct:
            raise ValueError(
                f"route={self.route.name!r} passes on what came from one owner, and waves={waves} sends all owners' at "
                "once; use route='direct', or waves=0"
            )

    def with_mask(self, mask: Mask, *, seqlen: int | None = None) -> Schedule:
        """The same layout and route under another mask; with ``seqlen`` the tokens are cut anew, over so many, by a
        layout that is chosen anew if it was left open.

        The last few are kept, with their programs.
        """
        known = (mask, seqlen) if isinstance(mask, Mask) else None
        if known not in self._derived:
            layout = self.layout if seqlen is None else self.layout.cut_for(mask, seqlen)
            derived = replace(self, mask=mask, layout=layout)
            self._derived[known] = derived if seqlen is None else derived.laid_out()
        self._derived.move_to_end(known)
        while len(self._derived) > MOST_DERIVED:
            self._derived.popitem(last=False)
        return self._derived[known]

    @cached_property
    def _derived(self) -> OrderedDict[tuple[Mask, int | None] | None, Schedule]:
        return OrderedDict()

    def laid_out(self, *, alike: bool = True) -> Schedule:
        """By the layout that is predicted to be fastest for the calls known to come, if it was left open.

        Args:
            alike: the choice is shared by masks that are alike; else few documents are looked at as they are.
        """
        known = self.planner.known
        if not self.layout_left or known is None or self.layout.world == 1 or not self.route.direct:
            return self
        documents = self.mask.cu_seqlens
        names = (*LAYOUTS_TRIED, BALANCED) if documents is not None else LAYOUTS_TRIED
        layouts = [replace(self.layout, name=name).cut_for(self.mask, self.layout.seqlen) for name in names]
        tried = [replace(self, layout=layout) for layout in layouts]
        alike = alike or len(documents or ()) > MOST_DOCUMENTS
        found = [schedule.on_all_wires(known, "auto", alike=alike) for schedule in tried]
        chosen = least_regret([[one for each in on for one in each] for on in zip(*found, strict=True)])
        return tried[int(np.searchsorted(np.cumsum([len(each[0]) for each in found]), chosen, side="right"))]

    @cached_property
    def description(self) -> dict[str, object]:
        """What must be equal on all ranks, in words: short, yet equal on two ranks iff it is the same schedule."""
        return {
            "seqlen": self.layout.seqlen,
            "layout": self.layout.description,
            "route": self.route.description,
            "mask": f"{self.mask!r}" + (f" (digest {digest(self.mask)})" if self.mask.cu_seqlens else ""),
            "heads": self.heads,
            "keep": self.keep,
            "assignment": self.assignment,
            "waves": self.waves,
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
            self._programs[key] = self.builder(self.work(travels, direction, groups), self.rank).program()
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
        return self.builder(work, self.rank).program()

    @cached_property
    def _programs(self) -> dict[tuple[str, Direction, Groups], Program]:
        return {}

    @cached_property
    def _tables(self) -> dict[bytes, np.ndarray]:
        return {}

    def choose_groups(self, shape: cost.Shape, travels: str) -> Groups:
        """How heads had best be cut, if it is not said, and whether to keep what a forward fetches: :meth:`choose`.

        Args:
            travels: a name of :data:`TRAVELS`, or ``auto``.

        Raises:
            ValueError: these heads can't be cut into as many groups as were asked for.
        """
        if not self._cut_by_choice:
            return WHOLE
        return self.choose(shape, travels).candidate.groups

    @property
    def _cut_by_choice(self) -> bool:
        """Does the planner say how heads are cut?"""
        return not (self.heads == 1 or self.layout.world == 1 or self.route.ring)

    def choose(self, shape: cost.Shape, travels: str = "auto", groups: Groups | None = None) -> Prediction:
        """What is predicted to be fastest, over direct routes, for one row of a batch, of all that was left open.

        Args:
            shape: whatever its batch is, the choice is the same: a compiler may not know it.
            travels: a name of :data:`TRAVELS`, or ``auto``.
            groups: how heads are cut; None to choose it.
        """
        return self._best(shape, travels, None if groups is None else [groups])

    def _best(self, shape: cost.Shape, travels: str, given: Sequence[Groups] | None) -> Prediction:
        found = self.on_all_wires(shape, travels, given)
        return found[0][least_regret(found)]

    def predicted(self, shape: cost.Shape) -> float:
        """Seconds of a step of one row of a batch: a backward, and the forward as often as it runs."""
        shape = replace(shape, batch=1)
        if self.route.direct:
            return self.choose(shape).seconds
        forward, backward = self.timed(shape, self.choose_travels(shape), WHOLE)
        return self.planner.forwards * forward.seconds + backward.seconds

    def timed(self, shape: cost.Shape, travels: str, groups: Groups) -> list[Timed]:
        """A forward and a backward on any route, foretold from the edges themselves."""
        both = self.on_paper(shape, travels, groups, self.planner.wire(self.layout.world))
        if self.route.direct:
            return [one.run() for one in both]
        return [one.run(edge_messages(self.work(travels, one.direction, groups), shape)) for one in both]

    @property
    def _waves(self) -> WavesOrAuto:
        return self.waves if self.route.direct else 0

    def on_paper(self, shape: cost.Shape, travels: str, groups: Groups, wire: Wire) -> list[OnPaper]:
        """A forward and a backward, to be run on paper."""
        return on_paper(self.tally, shape, travels, groups, wire)

    def predictions(self, shape: cost.Shape, travels: str, given: Sequence[Groups] | None = None) -> list[Prediction]:
        """Of all that was left open, the simplest first; arguments are those of :meth:`choose`, of several groups."""
        return self.on_all_wires(shape, travels, given)[0]

    def on_all_wires(
        self, shape: cost.Shape, travels: str, given: Sequence[Groups] | None = None, *, alike: bool = True
    ) -> list[list[Prediction]]:
        """:meth:`predictions`, and where rates are guessed the same on slower links.

        Args:
            alike: for the mask's :func:`representative`, so that others like it share what is found.
        """
        world, shape = self.layout.world, replace(shape, batch=1)
        travels = self.assignment if travels == "auto" else travels
        if given is None:
            given = [*cuts(self.layout, shape, self.heads, self.keep, self._waves)]
        layout, mask = representative(self.layout, self.mask) if alike else (self.layout, self.mask)

        def predicted() -> list[list[Prediction]]:
            tally = Tally(layout, mask.regions(layout.seqlen))
            ways = candidates(tally, shape, given, travels, by_rule=self.heads == 1, partial_bytes=shape.partial)
            return predict(tally, shape, ways, self.planner.wires(world), forwards=self.planner.forwards)

        return self.planner.remember((layout, mask, shape, travels, self.heads == 1, *given), predicted)

    def slice_length(self, groups: Groups) -> int:
        """Tokens of this rank's context slice."""
        return sum(self.layout.lengths[owner] for owner in groups.members(groups.context(self.rank)))

    def bytes_moved(self, shape: cost.Shape, travels: str, groups: Groups) -> np.ndarray:
        """int64 [2, W]: what each rank sends, and receives, in one forward and backward over direct routes."""
        if travels == "auto":
            travels = self.choose_travels(shape, groups)
        assignments = TRAVELS[travels](self.layout.world // groups.query)
        return self.tally.moved(shape, assignments, groups)

    @cached_property
    def tally(self) -> Tally:
        """What all ranks move and compute, by arrays."""
        return Tally(self.layout, self.regions)

    @cached_property
    def _tally_to_choose(self) -> Tally:
        """Of many documents fewer stand for all; what is chosen hardly depends on how many ranks there are."""
        documents = self.mask.cu_seqlens
        few = documents is None or (len(documents) <= MOST_DOCUMENTS and not self.layout.spreads_documents)
        if few and self.layout.world <= MOST_RANKS:
            return self.tally
        layout, mask = representative(self.layout, self.mask)
        if layout.spreads_documents and mask.cu_seqlens is not None:  # one is as good as so many alike
            length, mask = mask.cu_seqlens[1], replace(mask, cu_seqlens=None)
            layout = layout.cut_for(mask, length)
        return Tally(replace(layout, world=min(layout.world, MOST_RANKS)), mask.regions(layout.seqlen))

    def choose_travels(self, shape: cost.Shape, groups: Groups = WHOLE) -> str:
        """What had best travel with heads cut so: what was asked of the plan, else :meth:`choose`.

        With ``heads=1`` asked for it is a rule, whatever the rates: :func:`by_work_and_bytes`.
        """
        if self.assignment != "auto":
            return self.assignment
        if groups.query == self.layout.world > 1:  # one context slice: nothing travels between slices
            return "query"
        if groups == WHOLE and (self.heads == 1 or self.layout.world == 1 or not self.route.direct):
            partial_bytes = shape.accumulate if self.route.exact else shape.partial
            return by_work_and_bytes(self._tally_to_choose, shape, partial_bytes)
        return self.choose(shape, groups=groups).candidate.travels

    def decide(self, shape: cost.Shape, travels: str) -> tuple[Groups, str]:
        """How a call of this shape is computed: all that a sweep's programs need to know."""
        return self.settle(shape, travels, replace(self.choose_groups(shape, travels), waves=0))

    def settle(self, shape: cost.Shape, travels: str, groups: Groups) -> tuple[Groups, str]:
        """Heads being cut so, by what :meth:`choose_groups` says: in how many waves shards come, and what travels.

        What was chosen with them; chosen anew only for others, and on routes where what travels is a rule.
        """
        if self._cut_by_choice and self.route.direct:
            found = self.choose(shape, travels).candidate
            if replace(found.groups, waves=groups.waves) == groups:
                return found.groups, found.travels
        ways = [*in_all_waves(self.layout, groups, self._waves)]
        if len(ways) > 1:
            found = self._best(shape, travels, ways).candidate
            return found.groups, found.travels
        return ways[0], self.choose_travels(shape, ways[0]) if travels == "auto" else travels

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
    heads: HeadsOrAuto = 1,
    keep: KeepOrAuto = "auto",
    assignment: str = "auto",
    waves: WavesOrAuto = "auto",
    planner: Planner | None = None,
) -> Schedule:
    """Check the arguments, and choose the layout and the route where they were left open.

    Args:
        layout: a name, or ``auto``: that of which a call like ``planner.known`` is predicted to be faster, of packed
            documents balanced too; zigzag if that is not known.
        route: a name of :data:`ROUTES`, or ``auto``: direct on one host. With several ranks on each of several hosts
            by nodes or the ring, where heads are not to be cut and it moves fewer rows through the busiest host's link,
            or where a call like ``planner.known`` is predicted to be faster.
        heads, keep, assignment, waves: as for :func:`burst_attention.make_plan`.
        planner: rates and nodes, and what is known of the calls to come.
    """
    if route != "auto" and route not in ROUTES:
        raise ValueError(f"route={route!r} is unknown; choose one of auto, {', '.join(ROUTES)}")
    planner = Planner() if planner is None else planner
    left = layout == "auto"
    shape = Layout(LAYOUTS_TRIED[0] if left else layout, seqlen, world)
    if shape.by_mask and isinstance(mask, Mask):
        shape = shape.cut_for(mask, seqlen)
    nodes, known = planner.nodes, planner.known
    over = ROUTES["direct" if route == "auto" else route]
    over = replace(over, nodes=nodes or ()) if over.by_nodes else over
    given = Schedule(shape, mask, over, rank, heads, keep, assignment, waves, planner)
    direct = replace(given, layout_left=left).laid_out(alike=False)
    if route != "auto" or nodes is None or len(set(nodes)) in (1, world) or heads not in (1, "auto"):
        return direct
    others = [replace(direct, route=replace(ROUTES["nodes"], nodes=nodes))]
    if len(mask.cu_seqlens or ()) <= MOST_DOCUMENTS:  # along a ring a rank has to know the tiles of all that passes by
        others.append(replace(direct, route=ROUTES["ring"]))
    if heads == 1:
        leaving = _rows_leaving(direct, nodes)
        return min((direct, *others), key=lambda schedule: leaving[schedule.route.name])
    if known is None or world > MOST_FOR_A_RING:
        return direct
    return min((direct, *others), key=lambda schedule: schedule.predicted(known))


def _rows_leaving(schedule: Schedule, nodes: Sequence[int]) -> dict[str, int]:
    """By route, the key rows that leave the busiest node in a forward; of many ranks' those of the first."""
    layout, mask = representative(schedule.layout, schedule.mask)
    world = min(layout.world, MOST_RANKS)
    if world < layout.world:
        layout = replace(layout, world=world)
    tiles = wanted_tiles(layout, mask.regions(layout.seqlen), np.ones((world, world), bool))
    count = {"direct": rows_sent_directly, "nodes": rows_sent_by_nodes, "ring": rows_sent_round}
    return {name: rows(tiles, np.array(nodes[:world])) for name, rows in count.items()}
