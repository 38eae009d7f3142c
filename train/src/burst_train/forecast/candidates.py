"""The engines that a prediction compares: the time, traffic and memory of each one's attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from burst_attention import Mask
from burst_attention.plan.rows import Direction, Side

from ..engines import Heads, choose
from ..engines.usp import UspAttention
from ..memory import KEEPING
from . import collectives
from .buffers import buffers
from .calls import AttentionStrategy, Call, chosen, predict_call
from .request import ForecastRequest
from .step_memory import OVERLAPPING


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The attention of one engine, as input to the prediction of a step.

    Attributes:
        way: how a call is computed, in words.
        calls: (number of layers, call) for each kind of layer.
        buffers: bytes of a call's backward at its peak.
        keeping: whether attention results can be kept while the rest of a layer is recomputed.
        kept, results, gathered: as for :class:`~burst_train.forecast.step_memory.Step`.
        whole: whether every rank holds embedding, head and norms whole, and the other weights are cut.
        flags: the flags of ``burst train`` that select this engine; empty if no flags can.
        ways: how calls are computed, for each kind of layer; empty if the attention is not ours.
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
    ways: tuple[AttentionStrategy, ...] = ()


def _burst(q: ForecastRequest) -> Candidate:
    ways, strategy = [], q.strategy
    options = {"caches": q.attention_chunks == 1, "lse": q.model is not None and "sinks" in q.model.options}
    for mask in q.masks:  # layers that differ in their windows share one layout
        ways.append(chosen(q.setting(mask), strategy, **options))
        strategy = replace(strategy, layout=ways[0].layout)
    route = "" if ways[0].route == "direct" else f" --route {ways[0].route}"
    # With degree 1 a rule says what circulates; left out, the planner finds degree 1 again.
    asked = ways[0].groups.query > 1 or q.ulysses_degree != "auto"
    degree = f" --ulysses-degree {ways[0].groups.query}" if asked else ""
    flags = f"--engine burst --layout {ways[0].layout}{degree}{route}"
    q = replace(q, layout=ways[0].layout)  # which says how full a rank may be
    return _planned(q, ways, flags if q.circulate == "auto" else "")  # a flag that burst train lacks


def _published(q: ForecastRequest) -> Candidate:
    route = "direct" if q.setting(Mask()).nodes is None else "nodes"
    ways = [AttentionStrategy(layout="zigzag", route=route, circulate="query")] * len(q.masks)
    return _planned(q, ways, "")


def _ring(q: ForecastRequest) -> Candidate:
    return _planned(q, [collectives.RING] * len(q.masks), "--engine ring")


def _planned(q: ForecastRequest, ways: list[AttentionStrategy], flags: str) -> Candidate:
    calls, held, kept, results = [], 0, 0, 0
    for way, (mask, count) in zip(ways, q.masks.items(), strict=True):
        calls.append((count * q.attention_chunks, predict_call(way, q.setting(mask))))
        held = max(held, buffers(way, q.setting(mask), q.dtype, calls=min(q.attention_chunks, OVERLAPPING)))
        if way.groups.keep:
            shape, times = q.shape, way.groups.query // way.groups.key
            token = q.tokens * shape.batch * shape.io
            keys = token * shape.kv_heads * (shape.head_dim + shape.v_head_dim)
            kept = max(kept, (times - 1) * keys)  # saved instead of the rank's own q, k and v
            saved = token * shape.q_heads * shape.head_dim + times * keys
            if way.groups.results:
                saved += q.tokens * shape.side_bytes(Side.QUERY, Direction.FORWARD, wide=shape.io)
            results = max(results, saved)
    return Candidate(
        way=str(ways[0]),
        calls=tuple(calls),
        buffers=held,
        kept=kept,
        results=results,
        flags=flags,
        ways=tuple(ways),
    )


def _ulysses(q: ForecastRequest) -> Candidate:
    calls = tuple((count, collectives.ulysses(q.setting(mask))) for mask, count in q.masks.items())
    return _trading(q, "contiguous layout, all-to-all", calls, _alone(q), "--engine ulysses")


def _usp(q: ForecastRequest) -> Candidate:
    groups = UspAttention().groups(q.kv_heads, q.cluster.ranks)
    settings = [q.setting(mask) for mask in q.masks]
    calls = tuple(zip(q.masks.values(), (collectives.usp(each, groups) for each in settings), strict=True))
    held = max(buffers(collectives.RING, collectives.ring_of(each, groups), q.dtype) for each in settings)
    way = f"zigzag layout, all-to-all among {groups} ranks, ring of {q.cluster.ranks // groups}"
    return _trading(q, way, calls, held, "--engine usp")


def _trading(q: ForecastRequest, way: str, calls: tuple[tuple[int, Call], ...], held: int, flags: str) -> Candidate:
    """Return a candidate with an all-to-all before and after an attention that holds ``held`` bytes."""
    shape, token = q.shape, q.tokens * q.shape.batch * q.shape.io
    traded = token * (2 * shape.q_heads * shape.v_head_dim + 4 * shape.kv_heads * shape.head_dim)
    kept = token * shape.q_heads * shape.v_head_dim
    return Candidate(way=way, calls=calls, buffers=held + traded, keeping=False, kept=kept, flags=flags)


def _tensor(q: ForecastRequest) -> Candidate:
    hidden = q.model.hidden if q.model else q.q_heads * q.head_dim
    calls = tuple((count, collectives.tensor(q.setting(mask), hidden)) for mask, count in q.masks.items())
    gathered = 2 * q.batch * q.seq_len * hidden * q.dtype.itemsize
    return Candidate(
        way="heads and columns sharded",
        calls=calls,
        buffers=_alone(q),
        keeping=False,
        kept=gathered,
        gathered=gathered * 3 // 2,
        whole=True,
        flags="--engine tensor-sequence",
    )


def _alone(q: ForecastRequest) -> int:
    """Return the buffers of attention over all tokens for a rank's share of the heads."""
    ranks, way = q.cluster.ranks, AttentionStrategy(layout="contiguous", circulate="query")
    shape = replace(q.shape, q_heads=q.q_heads // ranks, kv_heads=q.kv_heads // ranks)
    settings = (replace(q.setting(mask), world=1, shape=shape) for mask in q.masks)
    return max(buffers(way, setting, q.dtype) for setting in settings)


# The keys are the names in tables.
MAKERS: Mapping[str, Callable[[ForecastRequest], Candidate]] = {
    "burst": _burst,
    "burst as published": _published,
    "ring": _ring,
    "ulysses": _ulysses,
    "usp": _usp,
    "tensor-sequence": _tensor,
}


def refusal(name: str, q: ForecastRequest) -> str:
    """Return the engine's error for this request; empty if it can run."""
    if name == "tensor-sequence" and q.model is None:
        return "it shards a whole model, not attention only; give --model"
    hidden, intermediate = (q.model.hidden, q.model.intermediate) if q.model else (q.q_heads * q.head_dim, 0)
    ranks = q.cluster.ranks
    own = {} if q.model is None else {"family": q.model.family, "options": q.model.options}
    sizes: dict[str, Any] = {"q_heads": q.q_heads, "kv_heads": q.kv_heads, "head_dim": q.head_dim, **own}
    heads = Heads(**sizes, hidden=hidden, intermediate=intermediate)
    engine = name.partition(" ")[0]
    if q.attention_chunks > 1 and engine not in KEEPING:
        return "it can't compute attention in chunks of heads; leave --attention-chunks out to see it"
    if q.joined > 1 and name != "burst":
        return "it has no layout balanced; leave --packing balanced out to see it"
    options: dict[str, Any] = {"strategy": q.strategy} if name == "burst" else {}
    if engine in KEEPING:
        options["attention_chunks"] = q.attention_chunks
    try:
        choose(engine, **options).check(heads, q.seq_len, ranks)
    except ValueError as error:
        if name == "burst":
            raise
        return str(error)
    return ""
