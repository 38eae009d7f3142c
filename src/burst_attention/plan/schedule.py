"""The immutable schedule: layout, mask, route and strategy, and the programs that follow from them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from . import cost
from .assignment import KEYS_CIRCULATE, circulating
from .build import Builder
from .demand import PassSpec
from .groups import WHOLE, Groups
from .indexed import Indexed
from .layout import Layout, digest
from .mask import Mask
from .program import Program
from .route import Route
from .rows import Direction, Side
from .strategy import Strategy

_COMPARED = ("ulysses_degree", "cache_qkv", "circulate", "chunks", "gather_kv")


@dataclass(frozen=True)
class Schedule:
    """One sequence over ``layout.world`` ranks, as ``rank`` sees it. Integers only; it needs no process group.

    Raise TypeError or ValueError if the strategy doesn't fit these ranks, or the mask this sequence.
    """

    layout: Layout
    mask: Mask
    route: Route
    rank: int
    strategy: Strategy = field(default=Strategy(ulysses_degree=1))  # a planner chooses ``auto`` fields for each call
    keys: Layout | None = None  # the keys' layout, if it is not the queries'

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask={self.mask!r} must be a burst_attention.Mask")
        if not 0 <= self.rank < self.layout.world:
            raise ValueError(f"rank={self.rank} is outside of world={self.layout.world}")
        object.__setattr__(self, "strategy", self.strategy.over(self.layout.world))
        self._check_strategy()
        if self.keys is not None:
            self._check_keys(self.keys)
        self.mask.check(self.span)

    def _check_keys(self, keys: Layout) -> None:
        if keys.world != self.layout.world:
            raise ValueError(
                f"keys are laid out over {keys.world} ranks, the group has {self.layout.world}; list the keys of each "
                "of its ranks"
            )
        if self.layout.by_mask:
            raise ValueError(
                f"layout={self.layout.name!r} follows the documents of one sequence and can't be combined with keys; "
                "use 'zigzag', 'zigzag-by-halves', 'contiguous' or 'striped'"
            )
        if len(strides := {*self.layout.strides, *keys.strides}) > 1:
            raise ValueError(
                f"layout={self.layout.name!r} and the keys' layout {keys.name!r} have strides {sorted(strides)}; use "
                "one stride: 'striped' for queries only if the keys are striped too"
            )
        if self.strategy.cache_qkv is True:
            raise ValueError(
                "cache_qkv=True can't be combined with keys, which have another length than queries; use "
                "cache_qkv=False, or leave it open"
            )

    def _check_strategy(self) -> None:
        degree, chunks = self.strategy.ulysses_degree, self.strategy.chunks
        if chunks != "auto" and chunks and not self.route.direct:
            raise ValueError(
                f"chunks={chunks} sends the shards of a sequence group together, and route={self.route.name!r} passes "
                "them on one by one; use route='direct', or chunks=0"
            )
        if not isinstance(degree, int):
            return
        if self.layout.world % degree:
            raise ValueError(
                f"ulysses_degree={degree} does not divide the {self.layout.world} ranks of the group; choose a "
                "divisor, or 'auto'"
            )
        if degree > 1 and self.route.ring:
            raise ValueError(
                f"route={self.route.name!r} passes shards on along the ring, and with ulysses_degree={degree} the next "
                "rank computes other heads; use route='direct', or ulysses_degree=1"
            )

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """Values that are derived from this schedule and cached here. They don't affect equality."""
        return {}

    @cached_property
    def description(self) -> dict[str, object]:
        """A short description that ranks compare; equal on two ranks only if their schedules are."""
        return {
            "seqlen": self.layout.seqlen,
            "layout": self.layout.description,
            "route": self.route.description,
            "query_offset": self.layout.start,
            "keys": None if self.keys is None else f"{self.keys.name}, {self.keys.seqlen} ({digest(self.keys)})",
            "mask": f"{self.mask!r}" + (f" (digest {digest(self.mask)})" if self.mask.cu_seqlens else ""),
            **{name: getattr(self.strategy, name) for name in _COMPARED},
        }

    @cached_property
    def regions(self) -> np.ndarray:
        """The rectangles and bands of the mask."""
        return self.mask.regions(self.span)

    @property
    def span(self) -> int:
        """Number of positions that the mask covers: up to the last query or key."""
        return max(layout.stop for layout in self.layouts.values())

    @property
    def layouts(self) -> Mapping[Side, Layout]:
        """The layout of each side."""
        return {Side.QUERY: self.layout, Side.KEY: self.keys or self.layout}

    def program(self, circulate: str, direction: Direction, groups: Groups = WHOLE) -> Program:
        """Return this rank's program for one pass; ``circulate`` is a name of ``CIRCULATIONS``."""
        key = circulate, direction, groups
        if key not in self.memo:
            self.memo[key] = Builder(self.work(circulate, direction, groups), self.rank).program()
        return self.memo[key]

    def work(self, circulate: str, direction: Direction, groups: Groups = WHOLE) -> PassSpec:
        """Return the specification of one pass, for all ranks."""
        cube = circulating(circulate, direction, groups, self.layout.world)
        tables = self.memo.setdefault("tables", {})
        return PassSpec(self.layout, self.regions, cube, groups, self.route, direction, self.keys, tables)

    def slice_length(self, groups: Groups) -> int:
        """Count the tokens of this rank's sequence group."""
        return sum(self.layout.lengths[owner] for owner in groups.members(groups.context(self.rank)))

    def traffic(self, shape: cost.Shape, circulate: str, groups: Groups = WHOLE) -> cost.Traffic:
        """Return the bytes that this rank sends and receives in one forward and one backward."""
        counts = list[int]()
        for direction in Direction:
            edges = self.program(circulate, direction, groups).edges
            for own in ([e for e in edges if e.source == self.rank], [e for e in edges if e.target == self.rank]):
                counts.append(sum(shape.edge_bytes(edge, direction, groups) for edge in own))
        return cost.Traffic(*counts)

    def indexed_traffic(self, call: Indexed, like: cost.Shape, chunks: int = 1) -> cost.Traffic:
        """Return the bytes of an attention to chosen keys in chunks of heads, and of the choice, without a backward."""
        attention = self.traffic(call.attention(like, chunks), KEYS_CIRCULATE) * chunks
        if not call.chooses:
            return attention
        choice = self.traffic(call.choice(like), KEYS_CIRCULATE)
        return attention + replace(choice, backward_sent=0, backward_received=0)
