"""The engines that a training step is foretold of: how each computes attention, what that takes and holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from burst_attention import Mask

from ..engines import Heads, choose
from ..engines.usp import UspAttention
from . import collectives
from .buffers import buffers
from .calls import Call, Way, chosen, foretell
from .request import Question


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An engine as it is foretold.

    Attributes:
        calls: of each kind of layer: how many, and what a call takes.
        keeping: can attention be kept while all else is recomputed?
        buffers: of a call's backward at its peak.
        kept, results, gathered: as for :class:`~burst_train.forecast.step_memory.Step`.
        whole: are embedding, head and norms whole on every rank, and other weights cut?
        ways: of each kind of layer, where the attention is ours.
    """

    way: str
    calls: tuple[tuple[int, Call], ...]
    buffers: int
    keeping: bool = True
    kept: int = 0
    results: int = 0
    gathered: int = 0
    whole: bool = False
    flags: str = ""
    ways: tuple[Way, ...] = ()


def _burst(q: Question) -> Candidate:
    ways, layout = [], q.layout
    for mask in q.masks:  # layers that differ in their windows share one cut
        ways.append(chosen(q.setting(mask), layout=layout, route=q.route, heads=q.heads, travels=q.travels))
        layout = ways[0].layout
    route = "" if ways[0].route == "direct" else f" --route {ways[0].route}"
    # --heads 1 asks for what travels by a rule; left out, that none is cut is found again.
    heads = f" --heads {ways[0].groups.query}" if ways[0].groups.query > 1 or q.heads != "auto" else ""
    flags = f"--engine burst --layout {ways[0].layout}{heads}{route}"
    return _planned(q, ways, flags if q.travels == "auto" else "")  # which burst train does not take


def _published(q: Question) -> Candidate:
    route = "direct" if q.setting(Mask()).nodes is None else "nodes"
    ways = [Way(layout="zigzag", route=route, travels="query")] * len(q.masks)
    return _planned(q, ways, "")


def _ring(q: Question) -> Candidate:
    return _planned(q, [collectives.RING] * len(q.masks), "--engine ring")


def _planned(q: Question, ways: list[Way], flags: str) -> Candidate:
    calls, held, kept, results = [], 0, 0, 0
    for way, (mask, count) in zip(ways, q.masks.items(), strict=True):
        calls.append((count, foretell(way, q.setting(mask))))
        held = max(held, buffers(way, q.setting(mask), q.dtype))
        if way.groups.keep:
            shape, times = q.shape, way.groups.query // way.groups.key
            token = q.tokens * shape.batch * shape.io
            keys = token * shape.kv_heads * (shape.head_dim + shape.v_head_dim)
            kept = max(kept, (times - 1) * keys)  # in place of the rank's own q, k and v
            results = max(results, token * shape.q_heads * shape.head_dim + times * keys)
    return Candidate(
        way=str(ways[0]),
        calls=tuple(calls),
        buffers=held,
        kept=kept,
        results=results,
        flags=flags,
        ways=tuple(ways),
    )


def _ulysses(q: Question) -> Candidate:
    calls = tuple((count, collectives.ulysses(q.setting(mask))) for mask, count in q.masks.items())
    return _trading(q, "contiguous, all-to-all", calls, _alone(q), "--engine ulysses")


def _usp(q: Question) -> Candidate:
    groups = UspAttention().groups(q.kv_heads, q.cluster.ranks)
    settings = [q.setting(mask) for mask in q.masks]
    calls = tuple(zip(q.masks.values(), (collectives.usp(each, groups) for each in settings), strict=True))
    held = max(buffers(collectives.RING, collectives.ring_of(each, groups), q.dtype) for each in settings)
    way = f"zigzag, all-to-all among {groups}, a ring of {q.cluster.ranks // groups}"
    return _trading(q, way, calls, held, "--engine usp")


def _trading(q: Question, way: str, calls: tuple[tuple[int, Call], ...], held: int, flags: str) -> Candidate:
    """Tokens exchanged for heads around an attention that holds so many bytes."""
    shape, token = q.shape, q.tokens * q.shape.batch * q.shape.io
    traded = token * (2 * shape.q_heads * shape.v_head_dim + 4 * shape.kv_heads * shape.head_dim)
    kept = token * shape.q_heads * shape.v_head_dim
    return Candidate(way=way, calls=calls, buffers=held + traded, keeping=False, kept=kept, flags=flags)


def _tensor(q: Question) -> Candidate:
    hidden = q.model.hidden if q.model else q.q_heads * q.head_dim
    calls = tuple((count, collectives.tensor(q.setting(mask), hidden)) for mask, count in q.masks.items())
    gathered = 2 * q.batch * q.seq_len * hidden * q.dtype.itemsize
    return Candidate(
        way="heads and columns cut",
        calls=calls,
        buffers=_alone(q),
        keeping=False,
        kept=gathered,
        gathered=gathered * 3 // 2,
        whole=True,
        flags="--engine tensor-sequence",
    )


def _alone(q: Question) -> int:
    """Buffers of whole attention for a rank's share of the heads."""
    ranks, way = q.cluster.ranks, Way(layout="contiguous", travels="query")
    shape = replace(q.shape, q_heads=q.q_heads // ranks, kv_heads=q.kv_heads // ranks)
    settings = (replace(q.setting(mask), world=1, shape=shape) for mask in q.masks)
    return max(buffers(way, setting, q.dtype) for setting in settings)


# By what they are called in tables.
MAKERS: Mapping[str, Callable[[Question], Candidate]] = {
    "burst": _burst,
    "burst as published": _published,
    "ring": _ring,
    "ulysses": _ulysses,
    "usp": _usp,
    "tensor-sequence": _tensor,
}


def refusal(name: str, q: Question) -> str:
    """In the engine's own words; empty if it takes these."""
    if name == "tensor-sequence" and q.model is None:
        return "it cuts a whole model, not attention alone; give --model"
    hidden, ranks = q.q_heads * q.head_dim, q.cluster.ranks
    sizes = {"hidden": q.model.hidden, "intermediate": q.model.intermediate} if q.model else {}
    heads = Heads(
        q_heads=q.q_heads, kv_heads=q.kv_heads, head_dim=q.head_dim, **({"hidden": hidden, "intermediate": 0} | sizes)
    )
    engine = name.partition(" ")[0]
    options = {"layout": q.layout, "route": q.route, "heads": q.heads} if name == "burst" else {}
    try:
        choose(engine, **options).check(heads, q.seq_len, ranks)  # type: ignore[arg-type]
    except ValueError as error:
        if name == "burst":
            raise
        return str(error)
    return ""
