"""Runs: the stretches of neighbouring tokens of one document that each rank holds. Integers only."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..plan.layout import Layout


@dataclass(frozen=True)
class Run:
    """``length`` neighbouring tokens of a document, positions ``first`` on, at ``offset`` on rank ``owner``."""

    owner: int
    offset: int
    first: int
    length: int
    start: int
    stop: int

    @property
    def begins(self) -> bool:
        """Whether the document begins here, so that nothing comes in."""
        return self.first == self.start

    @property
    def ends(self) -> bool:
        """Whether the document ends here, so that nothing goes out."""
        return self.first + self.length == self.stop

    @property
    def local(self) -> slice:
        """The run's local indices."""
        return slice(self.offset, self.offset + self.length)


class Hop(NamedTuple):
    """A message of a scan: what the run ``source`` holds goes to the run ``target``. Both are indices in ``every``."""

    source: int
    target: int
    whole: bool  # M and U; otherwise U alone, which is then a state


Rounds = tuple[tuple[Hop, ...], ...]


class Borders(NamedTuple):
    """Which tokens a convolution needs of other runs, as one rank sees it.

    ``rows``: the local tokens that this rank gives. For each rank, ``sends``: which of them it gets; ``places``: where
    its tokens go in [own runs x width]; places that stay free are zero.
    """

    rows: list[int]
    sends: list[list[int]]
    places: list[list[int]]


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of all ranks in the order of the sequence, as seen by ``rank``."""

    every: tuple[Run, ...]
    rank: int
    world: int

    @cached_property
    def own(self) -> tuple[int, ...]:
        """Indices in ``every`` of this rank's runs, in local order."""
        held = (n for n, run in enumerate(self.every) if run.owner == self.rank)
        return tuple(sorted(held, key=lambda n: self.every[n].offset))

    @cached_property
    def givers(self) -> tuple[int, ...]:
        """The own runs whose document goes on behind them."""
        return tuple(n for n in self.own if not self.every[n].ends)

    @cached_property
    def takers(self) -> tuple[int, ...]:
        """The own runs whose document began before them."""
        return tuple(n for n in self.own if not self.every[n].begins)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The own runs that are givers and takers."""
        return tuple(n for n in self.givers if not self.every[n].begins)

    @cached_property
    def chains(self) -> tuple[range, ...]:
        """The runs of each document that has several, as indices in ``every``."""
        starts = [n for n, run in enumerate(self.every) if run.begins]
        chains = (range(*pair) for pair in itertools.pairwise([*starts, len(self.every)]))
        return tuple(chain for chain in chains if len(chain) > 1)

    @cached_property
    def description(self) -> str:
        """A text that is equal on two ranks only if the runs are."""
        return f"runs (digest {hashlib.blake2b(repr(self.every).encode(), digest_size=8).hexdigest()})"

    @cached_property
    def rounds(self) -> tuple[Rounds, Rounds]:
        """The rounds of a scan over every document's runs, from the first to the last, and from the last to the first.

        Before the round with hop h a run knows the h - 1 runs before it. It gives these and itself to the run h behind
        it, which then knows 2 h - 1. A run that knows all runs before it holds a state, so it sends no M.
        Source: Hillis and Steele, Data parallel algorithms, 1986.
        """
        longest = max(map(len, self.chains), default=1)
        hops = [1 << n for n in range((longest - 1).bit_length())]

        def over(chains: Sequence[range]) -> Rounds:
            return tuple(
                tuple(Hop(chain[n], chain[n + hop], n >= hop) for chain in chains for n in range(len(chain) - hop))
                for hop in hops
            )

        return over(self.chains), over([chain[::-1] for chain in self.chains])

    @functools.lru_cache(maxsize=128)  # noqa: B019  # the runs themselves are in a bounded cache
    def borders(self, width: int) -> Borders:
        """Return what a convolution needs that reads the ``width`` tokens before each token."""
        rows: dict[int, int] = {}
        sends: list[list[int]] = [[] for _ in range(self.world)]
        places: list[list[int]] = [[] for _ in range(self.world)]
        slots = {run: number * width for number, run in enumerate(self.own)}
        for chain in self.chains:
            for at in chain[1:]:
                to, giver = self.every[at], at
                for token in range(to.first - 1, max(to.start, to.first - width) - 1, -1):
                    giver -= token < self.every[giver].first
                    source = self.every[giver]
                    if source.owner == self.rank:
                        local = source.offset + token - source.first
                        sends[to.owner].append(rows.setdefault(local, len(rows)))
                    if to.owner == self.rank:
                        places[source.owner].append(slots[at] + width - (to.first - token))
        return Borders(list(rows), sends, places)

    def state_bytes(self, factor: int, state: int, *, backward: bool = False) -> tuple[int, int]:
        """Return the (sent, received) bytes of an exchange of states, or its backward."""
        sent = received = 0
        for move in itertools.chain.from_iterable(self.rounds[backward]):
            source, target = (self.every[n].owner for n in move[:2])
            if source != target:
                size = state + factor * move.whole
                sent += size * (source == self.rank)
                received += size * (target == self.rank)
        return sent, received

    def border_bytes(self, width: int, token: int) -> tuple[int, int]:
        """Return the (sent, received) bytes for a convolution; its backward swaps them. ``token``: a token's bytes."""
        borders = self.borders(width)
        sent, received = (
            sum(len(each) for rank, each in enumerate(lists) if rank != self.rank)
            for lists in (borders.sends, borders.places)
        )
        return sent * token, received * token


@functools.lru_cache(maxsize=64)
def runs_of(layout: Layout, borders: Sequence[int] | None, rank: int) -> Runs:
    """Return a layout's runs with these document borders; ValueError for one that separates neighbouring tokens."""
    if any(stride != 1 and count > 1 for *_, count, stride in layout.table(range(layout.world)).tolist()):
        raise ValueError(
            f"layout={layout.name!r} separates neighbouring tokens, but recurrent layers and convolutions pass a state "
            "from token to token; use Strategy(layout='zigzag') or 'contiguous'"
        )
    documents, every = borders or (layout.start, layout.start + layout.seqlen), []
    for owner, offset, first, count in _joined(layout):
        at = first
        while at < first + count:
            place = bisect.bisect_right(documents, at)
            start, stop = documents[place - 1], documents[place]
            until = min(first + count, stop)
            every.append(Run(owner, offset + at - first, at, until - at, start, stop))
            at = until
    return Runs(tuple(every), rank, layout.world)


def _joined(layout: Layout) -> list[tuple[int, int, int, int]]:
    """Return (owner, local offset, first position, length) of all segments in order, with adjacent ones joined."""
    joined: list[tuple[int, int, int, int]] = []
    for owner, offset, first, count, _ in sorted(layout.table(range(layout.world)).tolist(), key=lambda row: row[2]):
        if joined:
            last_owner, last_offset, last_first, length = joined[-1]
            if (last_owner, last_offset + length, last_first + length) == (owner, offset, first):
                joined[-1] = (owner, last_offset, last_first, length + count)
                continue
        joined.append((owner, offset, first, count))
    return joined
