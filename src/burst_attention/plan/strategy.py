"""A strategy: the choices that decide how attention is computed. Each published scheme is one, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from .assignment import CIRCULATIONS, KEYS_CIRCULATE
from .layout import Layout
from .route import ROUTES

DegreeOrAuto = int | Literal["auto", "all"]
CacheOrAuto = bool | Literal["auto"]
GatherOrAuto = bool | Literal["auto"]
ChunksOrAuto = int | Literal["auto"]
MOST_CHUNKS = 64


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How attention is computed over the ranks. The planner chooses every field that is ``auto``.

    No field changes the result beyond rounding. ``plan.explain()`` prints the chosen strategy in this form.

    Attributes:
        layout: which tokens each rank holds. ``zigzag`` is balanced for causal masks. ``zigzag-by-halves`` spreads
            each quarter of the sequence over all ranks. ``contiguous``: one stretch per rank. ``striped``: of ``world``
            ranks, each holds every ``world``-th token. ``-per-document`` after a name lays out each packed document
            separately. ``balanced`` follows the mask: it keeps documents that fit on one rank whole and spreads the
            others.
        route: how a shard reaches the ranks that need it. ``direct``: from its owner to each of them.
            ``ring-attention``: around the ring, and partial results too. ``nodes``: once to each node, and there from
            rank to rank.
        circulate: which tensors move. ``query``: K and V in the forward; Q, dO and their statistics in the
            backward (BurstAttention, arXiv 2403.09347, algorithm 2). ``key-value``: K and V in both; dK and dV come
            home (RingAttention). ``nearest``: for each pair of shards the one with less than half a ring to go;
            balances a contiguous layout under a causal mask. ``blocks``: both sides of square blocks of pairs
            (arXiv 2512.20968): the fewest bytes for many ranks, more memory. ``pass-query``: the query side in both;
            in the forward out and lse come home (pass-Q, arXiv 2411.01783): the fewest bytes for few queries over
            many keys.
        ulysses_degree: U, the number of groups into which heads are split. Of U * R ranks each U neighbours form a
            sequence group: they exchange shards by all-to-all, and each computes one group of heads. 1: heads stay
            whole. ``all``: as many as ranks. U must divide the ranks, and divide the key-value heads or be a
            multiple of them that divides the query heads.
        cache_qkv: whether the forward saves the q, k and v of its sequence group for the backward instead of
            exchanging them twice. Only with U > 1.
        chunks: into how many chunks the all-to-all of a sequence group is split, by position. Each chunk is
            computed while the next one moves. 0: one owner's shard at a time. Only with U > 1.
        gather_kv: whether one exchange gathers K and V of all ranks before a rank computes with any of them. Saves
            launches, and hides less. Needs ``ulysses_degree=1``, ``circulate="key-value"`` and ``route="direct"``.

    Raises:
        TypeError, ValueError: a field has a value that no plan can use.
    """

    layout: str = "auto"
    route: str = "auto"
    circulate: str = "auto"
    ulysses_degree: DegreeOrAuto = "auto"
    cache_qkv: CacheOrAuto = "auto"
    chunks: ChunksOrAuto = "auto"
    gather_kv: GatherOrAuto = "auto"

    def __post_init__(self) -> None:
        if self.layout != "auto":
            Layout(self.layout, 0, 1)  # raises if the name is unknown
        for name, value, choices in (("route", self.route, ROUTES), ("circulate", self.circulate, CIRCULATIONS)):
            if value != "auto" and value not in choices:
                raise ValueError(f"{name}={value!r} is unknown; choose one of auto, {', '.join(choices)}")
        degree, chunks = self.ulysses_degree, self.chunks
        if degree not in ("auto", "all") and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise ValueError(f"ulysses_degree={degree!r} must be a number of head groups, at least 1, 'all' or 'auto'")
        for name, flag in (("cache_qkv", self.cache_qkv), ("gather_kv", self.gather_kv)):
            if flag != "auto" and not isinstance(flag, bool):
                raise ValueError(f"{name}={flag!r} must be True, False or 'auto'")
        if self.gather_kv is True and (self.route, self.circulate, degree) != ("direct", "key-value", 1):
            raise ValueError(
                f"gather_kv=True needs route='direct', circulate='key-value' and ulysses_degree=1, not "
                f"route={self.route!r}, circulate={self.circulate!r} and ulysses_degree={degree!r}"
            )
        if chunks != "auto" and (
            isinstance(chunks, bool) or not isinstance(chunks, int) or not 0 <= chunks <= MOST_CHUNKS
        ):
            raise ValueError(f"chunks={chunks!r} must be a number of chunks, 0 to {MOST_CHUNKS}, or 'auto'")

    def __repr__(self) -> str:
        """Return the expression that makes this strategy, without ``auto`` fields."""
        return f"Strategy({', '.join(f'{name}={value!r}' for name, value in self._fixed.items())})"

    @property
    def _fixed(self) -> dict[str, Any]:
        """The fields that are not ``auto``."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value != "auto"}

    def over(self, world: int) -> Strategy:
        """Resolve ``all`` for a number of ranks."""
        return replace(self, ulysses_degree=world) if self.ulysses_degree == "all" else self


# The published schemes, with the fields that each fixes.
NAMED = {
    "auto": Strategy(),
    "burst": Strategy(layout="zigzag", ulysses_degree=1, circulate="query"),
    "ring": Strategy(layout="contiguous", route="ring-attention", ulysses_degree=1, circulate="key-value"),
    "zigzag-ring": Strategy(layout="zigzag", route="ring-attention", ulysses_degree=1, circulate="key-value"),
    "all-gather": Strategy(layout="zigzag", route="direct", ulysses_degree=1, circulate="key-value", gather_kv=True),
    "ulysses": Strategy(layout="contiguous", route="direct", ulysses_degree="all", cache_qkv=True, chunks=1),
    "usp": Strategy(layout="zigzag", route="direct", circulate="key-value", cache_qkv=True, chunks=1),
}
# Names of 0.3.
ALIASES = {"burst-attention": "burst", "ring-attention": "zigzag-ring", "contiguous-ring": "ring"}
_SAYS = {"true": True, "false": False}


def strategy_of(strategy: Any) -> Strategy:
    """Return the strategy that a user named or passed. Raise TypeError or ValueError for anything else.

    ``strategy``: None, a :class:`Strategy`, a name of :data:`NAMED`, ``usp:U`` with a Ulysses degree U, or fields with
    commas, such as ``layout=zigzag,ulysses_degree=4``.
    """
    if strategy is None or isinstance(strategy, Strategy):
        return Strategy() if strategy is None else strategy
    if not isinstance(strategy, str):
        raise TypeError(f"strategy={strategy!r} must be a Strategy or a name: {', '.join(NAMED)}, usp:U")
    if "=" in strategy:
        return _of_fields(strategy)
    name, colon, degree = ALIASES.get(strategy, strategy).partition(":")
    if name == "usp" and colon and degree.isdecimal() and int(degree):
        return replace(NAMED[name], ulysses_degree=int(degree))
    if colon or name not in NAMED:
        raise ValueError(
            f"strategy={strategy!r} is unknown; choose one of {', '.join(NAMED)}, usp:U (such as usp:4), or give "
            "fields of Strategy, such as layout=zigzag,ulysses_degree=4"
        )
    return NAMED[name]


def for_chosen_keys(strategy: Strategy) -> Strategy:
    """Return a strategy for attention to chosen keys, whose heads stay whole and whose keys circulate.

    Only open fields change. A layout is then chosen for what runs.
    """
    if strategy.ulysses_degree != "auto" or strategy.circulate != "auto":
        return strategy
    return replace(strategy, ulysses_degree=1, circulate=KEYS_CIRCULATE)


def _of_fields(text: str) -> Strategy:
    names, said = [each.name for each in fields(Strategy)], dict[str, Any]()
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in names or name in said:
            fault = "is given twice" if name in said else f"is unknown; choose from {', '.join(names)}"
            raise ValueError(f"strategy={text!r}: the field {name!r} {fault}")
        said[name] = int(value) if value.isdecimal() else _SAYS.get(value.lower(), value)
    return Strategy(**said)


def text_of(strategy: Strategy) -> str:
    """Return the text that :func:`strategy_of` reads as this strategy: a name if it has one, otherwise its fields."""
    name = next((name for name, each in NAMED.items() if each == strategy), None)
    return name or ",".join(f"{key}={value}" for key, value in strategy._fixed.items())
