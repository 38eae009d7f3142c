"""The planner: it chooses the open fields of a strategy by predicted time, the same way on all ranks.

A choice depends only on values that all ranks share: lengths, the kind of mask, a call's heads and dtype, rank 0's
rates, and nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ..plan.assignment import KEYS_CIRCULATE
from ..plan.cost import Shape
from ..plan.groups import WHOLE, Groups
from ..plan.indexed import Indexed
from ..plan.layout import BALANCED, Layout
from ..plan.mask import Mask
from ..plan.route import ROUTES
from ..plan.schedule import Schedule
from ..plan.strategy import Strategy
from .choice import (
    GUESSED,
    LAYOUTS_TRIED,
    Candidate,
    Prediction,
    Share,
    by_work_and_bytes,
    candidates,
    chunkings,
    cuts,
    fixed_circulation,
    least_regret,
    predict,
    remembered,
)
from .indexed import indexed_passes
from .passes import PassModel, passes
from .presets import preset
from .rates import Rates
from .standing import (
    MOST_BY_EDGES,
    MOST_ON_PAPER,
    STANDING,
    extrapolated,
    few_nodes,
    representative,
    shortened,
    stand_in,
    two_worlds,
)
from .timing import Timed, Wire
from .traffic import TrafficModel, edge_messages

Remat = Literal["none", "layer", "keep-attention"]
MOST_DOCUMENTS = 64  # with more documents, equal ones represent them
MOST_DERIVED = 4  # how many schedules of other masks a schedule caches
MOST_SIMULATED = 256  # ranks; with more, use the best choice for this many


@dataclass(eq=False)
class Planner:
    """Chooses schedules, and how each call runs. A plan and all plans derived from it share one planner.

    With ``guessed`` rates, which were neither given nor measured, the choice minimises the worst-case slowdown over
    several link speeds.
    """

    rates: Rates = field(default_factory=partial(preset, "cpu"))
    nodes: tuple[int, ...] | None = None  # of each rank; None if all share one
    call_shape: Shape | None = None  # of the expected calls; the planner chooses an open layout for them
    guessed: bool = False  # the link rates are a preset's
    remat: Remat = "none"  # which part of a layer the backward recomputes
    calls: int = 1  # chunks of heads of a layer: calls in a row, which overlap and cache nothing
    grad: bool = True  # calls have a backward
    _remembered: OrderedDict[Hashable, list[list[Prediction]]] = field(
        default_factory=OrderedDict, repr=False, init=False
    )

    @property
    def times(self) -> tuple[int, int]:
        """How often a call's forward and its backward run in a step; a recomputed layer's forward runs twice."""
        return 1 + (self.remat == "layer" and self.grad), int(self.grad)

    def wires(self, world: int) -> list[Wire]:
        """Return the ports of ``world`` ranks; if the rates are guesses, also slower ones."""
        at = np.unique(self.nodes or [0] * world, return_inverse=True)[1]
        return [Wire(self.rates.slowed(part), at) for part in (GUESSED if self.guessed else GUESSED[:1])]

    # Schedules

    def choose(
        self,
        seqlen: int,
        *,
        mask: Mask,
        strategy: Strategy,
        rank: int,
        world: int,
        keys: Layout | None = None,
        query_offset: int = 0,
        share: Share | None = None,
    ) -> Schedule:
        """Return the schedule of a rank; choose the layout and the route if the strategy leaves them open.

        The layout is the one predicted to be fastest for the expected calls, or zigzag if none are known. The route is
        direct on one node. Over several nodes with several ranks each, ``nodes`` may win. With whole heads the route
        with the fewest rows over the busiest node's link wins; otherwise the predicted fastest. With ``keys`` it is
        direct. With ``share`` all ranks call this together, and divide the simulations for the layout among them.
        Raise TypeError or ValueError if the arguments don't fit each other.
        """
        nodes, route = self.nodes, strategy.route
        name = LAYOUTS_TRIED[0] if strategy.layout == "auto" else strategy.layout
        layout = Layout(name, seqlen, world, start=query_offset)
        if layout.by_mask and isinstance(mask, Mask):
            layout = layout.cut_for(mask, seqlen)
        over = ROUTES["direct" if route == "auto" else route]
        over = replace(over, nodes=nodes or ()) if over.by_nodes else over
        schedule = Schedule(layout, mask, over, rank, strategy, keys=keys)
        direct = self._laid_out(schedule, alike=False, share=share)
        degree = schedule.strategy.ulysses_degree
        if route != "auto" or nodes is None or len(set(nodes)) in (1, world) or degree not in (1, "auto"):
            return direct
        if keys is not None or strategy.chunks not in (0, "auto"):  # routes that forward shards send them one by one
            return direct
        by_nodes = replace(direct, route=replace(ROUTES["nodes"], nodes=nodes))
        if degree == 1:
            straight, once = _rows_leaving(direct, nodes)
            return by_nodes if once < straight else direct
        shape = self.call_shape
        if shape is None or world > MOST_BY_EDGES:
            return direct
        return min((direct, by_nodes), key=lambda schedule: self.predicted(schedule, shape))

    def with_mask(self, schedule: Schedule, mask: Mask, *, seqlen: int | None = None) -> Schedule:
        """Return the same schedule under another mask. The last few are cached with their programs.

        With ``seqlen``, the length of another sequence, tokens are laid out again, and an open layout is chosen again.
        """
        derived: OrderedDict[Hashable, Schedule] = schedule.memo.setdefault("derived", OrderedDict())
        key = (mask, seqlen) if isinstance(mask, Mask) else None

        def made() -> Schedule:
            layout = schedule.layout if seqlen is None else schedule.layout.cut_for(mask, seqlen)
            other = replace(schedule, mask=mask, layout=layout)
            return other if seqlen is None else self._laid_out(other)

        return remembered(derived, key, made, most=MOST_DERIVED)

    def _laid_out(self, schedule: Schedule, *, alike: bool = True, share: Share | None = None) -> Schedule:
        """Choose the layout that is predicted to be fastest for the expected calls, if it was left open.

        ``alike``: masks of one kind share the choice. Else up to :data:`MOST_DOCUMENTS` documents are used as they are.
        """
        shape, strategy = self.call_shape, schedule.strategy
        if strategy.layout != "auto" or shape is None or schedule.layout.world == 1 or not schedule.route.direct:
            return schedule
        documents, keys = schedule.mask.cu_seqlens, schedule.keys
        names = (*LAYOUTS_TRIED, BALANCED) if documents is not None and keys is None else LAYOUTS_TRIED
        seqlen = schedule.layout.seqlen
        layouts = [replace(schedule.layout, name=name).cut_for(schedule.mask, seqlen) for name in names]
        tried = [replace(schedule, layout=layout) for layout in layouts]
        alike = alike or len(documents or ()) > MOST_DOCUMENTS
        # With many ranks, look for ranks without tokens only in the chosen layout: placing all documents is slow.
        even = schedule.layout.world > MOST_ON_PAPER and keys is None
        ways = {BALANCED: [*cuts(layouts[0], shape, strategy)]} if even else {}
        predictions = [
            self.predict_for_links(case, shape, ways.get(case.layout.name), alike=alike, share=share) for case in tried
        ]
        chosen = least_regret([[one for each in on for one in each] for on in zip(*predictions, strict=True)])
        return tried[int(np.searchsorted(np.cumsum([len(each[0]) for each in predictions]), chosen, side="right"))]

    # Calls

    def decide(self, schedule: Schedule, shape: Shape, *, caches: bool = True, lse: bool = False) -> Candidate:
        """Choose how a call of this shape is computed: everything on which a sweep's programs depend.

        Args:
            caches: whether the call may cache q, k and v; attention in chunks of heads does not.
            lse: whether the call returns lse or has sinks. It then caches no results.
        """
        groups = self.choose_groups(schedule, shape)
        keep, results = groups.keep and caches, groups.results and caches and not lse
        return self.settle(schedule, shape, replace(groups, chunks=0, keep=keep, results=results))

    def choose_groups(self, schedule: Schedule, shape: Shape) -> Groups:
        """Choose how heads are split, and whether q, k and v are cached. Raise ValueError if they can't be split so."""
        if not _splits_by_choice(schedule):
            return Groups(gather=True) if schedule.strategy.gather_kv is True else WHOLE
        return self.choose_call(schedule, shape).candidate.groups

    def settle(self, schedule: Schedule, shape: Shape, groups: Groups) -> Candidate:
        """Choose the chunks of a call that :meth:`choose_groups` split, whether it gathers, and what circulates."""
        if _splits_by_choice(schedule) and schedule.route.direct:
            candidate = self.choose_call(schedule, shape).candidate
            candidate = candidate._replace(groups=replace(candidate.groups, results=groups.results))
            if replace(candidate.groups, chunks=groups.chunks, gather=groups.gather) == groups:
                return candidate
        groups = replace(groups, gather=schedule.strategy.gather_kv is True)
        ways = [*chunkings(schedule.layout, groups, self._open(schedule).chunks)]
        if len(ways) > 1:
            return self.choose_call(schedule, shape, ways).candidate
        return Candidate(ways[0], self.choose_circulation(schedule, shape, ways[0]))

    def choose_circulation(self, schedule: Schedule, shape: Shape, groups: Groups = WHOLE) -> str:
        """Choose what circulates for this split of heads; with ``ulysses_degree=1`` by :func:`by_work_and_bytes`."""
        strategy, world = schedule.strategy, schedule.layout.world
        if fixed := fixed_circulation(strategy.circulate, groups, world):
            return fixed
        if groups == WHOLE and (strategy.ulysses_degree == 1 or world == 1 or not schedule.route.direct):
            partial_bytes = shape.accumulate if schedule.route.ring else shape.partial
            return by_work_and_bytes(_smaller_traffic_model(schedule), shape, partial_bytes, grad=self.grad)
        return self.choose_call(schedule, shape, [groups]).candidate.circulate

    def choose_call(self, schedule: Schedule, shape: Shape, splits: Sequence[Groups] | None = None) -> Prediction:
        """Return the fastest candidate over direct routes, for one row of a batch: a compiler may not know its size."""
        predictions = self.predict_for_links(schedule, shape, splits)
        return predictions[0][least_regret(predictions)]

    # Predictions

    def predicted(self, schedule: Schedule, shape: Shape) -> float:
        """Predict the seconds of the backward and all forwards of a step, for one row of a batch."""
        shape = replace(shape, batch=1)
        if schedule.route.direct:
            return self.choose_call(schedule, shape).seconds
        forward, backward = self.timed(schedule, shape, self.choose_circulation(schedule, shape), WHOLE)
        return self.times[0] * forward.seconds + self.times[1] * backward.seconds

    def timed(self, schedule: Schedule, shape: Shape, circulate: str, groups: Groups) -> list[Timed]:
        """Predict a forward and a backward on any route; many ranks are extrapolated from two smaller worlds."""
        world, most = schedule.layout.world, MOST_ON_PAPER if schedule.route.direct else MOST_BY_EDGES
        if world <= max(most, groups.query) or schedule.keys is not None:
            return self.simulated(schedule, shape, circulate, groups)

        def smaller(ranks: int) -> list[Timed]:
            planner, representing = self._over(schedule, ranks)
            return planner.timed(representing, shape, circulate, groups)

        worlds = *two_worlds(groups, circulate, min(most, STANDING)), world
        return extrapolated(smaller, worlds, groups, circulate)

    def simulated(self, schedule: Schedule, shape: Shape, circulate: str, groups: Groups) -> list[Timed]:
        """Simulate all ranks in a forward and a backward on any route."""
        direct = schedule.route.direct
        return [
            cost.run(None if direct else edge_messages(schedule.work(circulate, cost.direction, groups), shape))
            for cost in self.passes(schedule, shape, circulate, groups)
        ]

    def simulated_indexed(self, schedule: Schedule, call: Indexed, like: Shape) -> list[Timed]:
        """Simulate the forward of an indexed attention, with its choice, and its backward, on all ranks.

        ValueError: the rates don't have those of the kernels.
        """
        wire, *_ = self.wires(schedule.layout.world)
        runs = []
        for cost in indexed_passes(traffic_model_of(schedule), call, like, wire):
            edges = None if schedule.route.direct else schedule.work(KEYS_CIRCULATE, cost.direction)
            runs.append(cost.run(None if edges is None else edge_messages(edges, cost.shape)))
        *choice, forward, backward = runs
        return [sum(choice, forward), backward]

    def _over(self, schedule: Schedule, ranks: int) -> tuple[Planner, Schedule]:
        """Return the planner and rank 0's schedule of a smaller world that represents this one."""
        layout, mask = shortened(*_representative_of(schedule), ranks)
        nodes = few_nodes(self.nodes, ranks)
        route = replace(schedule.route, nodes=(nodes or ()) if schedule.route.nodes else ())
        strategy = replace(schedule.strategy, ulysses_degree="auto")
        other = replace(schedule, layout=layout, mask=mask, route=route, rank=0, strategy=strategy)
        return replace(self, nodes=nodes), other

    def passes(self, schedule: Schedule, shape: Shape, circulate: str, groups: Groups) -> list[PassModel]:
        """Return a forward and a backward over direct routes."""
        wire, *_ = self.wires(schedule.layout.world)
        return passes(traffic_model_of(schedule), shape, circulate, groups, wire, calls=self.calls)

    def predict_for_links(
        self,
        schedule: Schedule,
        shape: Shape,
        splits: Sequence[Groups] | None = None,
        *,
        alike: bool = True,
        share: Share | None = None,
    ) -> list[list[Prediction]]:
        """Predict all candidates, the simplest first, for each of :meth:`wires`; ``splits``: of heads, to try.

        ``alike``: predict for the mask's :func:`representative`, so that similar masks share the result. ``share``: all
        ranks call this together, and divide the simulations among them.
        """
        shape = replace(shape, batch=1)

        def predictions() -> list[list[Prediction]]:
            planner, strategy, keys = self, schedule.strategy, schedule.keys
            layout, mask, world = schedule.layout, schedule.mask, schedule.layout.world
            ways = [*cuts(layout, shape, self._open(schedule), keys=keys)] if splits is None else splits
            if keys is None and world > MOST_ON_PAPER:  # no shorter sequence represents two layouts
                ranks, ways = stand_in(ways, world)
                planner, smaller = self._over(schedule, ranks)
                layout, mask = smaller.layout, smaller.mask
            elif keys is None and alike:
                layout, mask = _representative_of(schedule)
            circulate, by_rule = strategy.circulate, strategy.ulysses_degree == 1

            def predicted() -> list[list[Prediction]]:
                regions = mask.regions(layout.seqlen) if keys is None else schedule.regions
                traffic = TrafficModel(layout, regions, keys=keys)
                tried = candidates(traffic, shape, ways, circulate, by_rule=by_rule, grad=planner.grad)
                wires = planner.wires(layout.world)
                return predict(traffic, shape, tried, wires, times=planner.times, calls=planner.calls, share=share)

            return remembered(self._remembered, (layout, keys, mask, shape, circulate, by_rule, *ways), predicted)

        # Cache with the schedule under a short key: the planner's own keys may hold thousands of documents.
        kept: OrderedDict[Hashable, list[list[Prediction]]] = schedule.memo.setdefault(self, OrderedDict())
        return remembered(kept, (shape, None if splits is None else tuple(splits), alike), predictions)

    def _open(self, schedule: Schedule) -> Strategy:
        """Return what a schedule leaves open. Chunks of heads are a pipeline already, and cache nothing."""
        strategy = schedule.strategy if schedule.route.direct else replace(schedule.strategy, chunks=0)
        if schedule.keys is not None:  # the cache has equally many rows of queries and keys
            strategy = replace(strategy, cache_qkv=False)
        if self.calls == 1:
            return strategy
        cache = False if strategy.cache_qkv == "auto" else strategy.cache_qkv
        return replace(strategy, cache_qkv=cache, chunks=1 if strategy.chunks == "auto" else strategy.chunks)


def traffic_model_of(schedule: Schedule) -> TrafficModel:
    """Return a schedule's traffic model, which the schedule caches."""
    if "traffic" not in schedule.memo:
        schedule.memo["traffic"] = TrafficModel(schedule.layout, schedule.regions, keys=schedule.keys)
    traffic: Any = schedule.memo["traffic"]
    return traffic


def _representative_of(schedule: Schedule) -> tuple[Layout, Mask]:
    if "representative" not in schedule.memo:
        schedule.memo["representative"] = representative(schedule.layout, schedule.mask)
    pair: tuple[Layout, Mask] = schedule.memo["representative"]
    return pair


def _smaller_traffic_model(schedule: Schedule) -> TrafficModel:
    """Return a traffic model to choose what circulates, which hardly depends on the number of documents or ranks."""
    documents, whole = schedule.mask.cu_seqlens, schedule.layout
    few = documents is None or (len(documents) <= MOST_DOCUMENTS and not whole.spreads_documents)
    if (few and whole.world <= MOST_SIMULATED) or schedule.keys is not None:
        return traffic_model_of(schedule)
    layout, mask = _representative_of(schedule)
    if layout.spreads_documents and mask.cu_seqlens is not None:  # each is over all ranks: the longest represents all
        length = max(stop - start for start, stop in pairwise(mask.cu_seqlens))
        mask = replace(mask, cu_seqlens=None).resized(length)
        layout = layout.cut_for(mask, length)
    return _of_first_ranks(layout, mask)


def _splits_by_choice(schedule: Schedule) -> bool:
    """Return whether the planner chooses how heads are split."""
    return not (schedule.strategy.ulysses_degree == 1 or schedule.layout.world == 1 or schedule.route.ring)


def _rows_leaving(schedule: Schedule, nodes: Sequence[int]) -> tuple[int, int]:
    """Count the key rows that leave the busiest node in a forward, directly and by nodes; of many ranks, the first."""
    traffic = _of_first_ranks(*_representative_of(schedule))
    straight, once = (traffic.rows_leaving(nodes[: traffic.world], by_nodes=by_nodes) for by_nodes in (False, True))
    return straight, once


def _of_first_ranks(layout: Layout, mask: Mask) -> TrafficModel:
    return TrafficModel(replace(layout, world=min(layout.world, MOST_SIMULATED)), mask.regions(layout.seqlen))
