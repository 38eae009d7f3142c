"""Predict a training step for each strategy: seconds, bytes, memory, and the longest sequence that fits.

No model runs. The planner times the attention; a formula gives memory. The rest takes the time of its matrix products
and of its element-wise operations' bytes. Sharded parameters go by rings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from burst_attention.plan.rows import Direction, Side
from burst_attention.plan.strategy import strategy_of, text_of
from burst_attention.planner.choice import TIE

from ..parallel import FOREIGN, choose
from .attention import ALONE, AttentionStrategy, Call, Exchange, alone, chosen, gather, predict_call, tensor
from .buffers import buffers
from .memory import OVERLAPPING, REMATS, Remat, Step
from .request import TENSOR, ForecastRequest

MESHES = (2, 4, 8)  # ranks of a tensor-parallel axis that are predicted, if they divide a node
COMPARED = ("auto", "burst", "zigzag-ring", "ulysses", "usp", "tensor-sequence")
MOST_TOKENS = 2**31
TOKEN_CHUNKS, MOST_HEAD_CHUNKS = 32, 8  # of the options that savings() adds
GRAIN = 1024  # resolution of the longest sequence, in tokens


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The attention of one strategy, as input to the prediction of a step."""

    way: str  # how a call is computed, in words
    calls: tuple[tuple[int, Call], ...]  # (number of layers, call) for each kind of layer
    buffers: int  # bytes of a call's backward at its peak
    flags: str
    more: Mapping[str, int] = field(default_factory=dict)  # values of ``Step`` in proportion to the tokens
    whole: bool = False  # embedding, head and norms on every rank, as in tensor parallelism
    ways: tuple[AttentionStrategy, ...] = ()  # for each kind of layer; empty with tensor parallelism


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The prediction for one strategy's step."""

    strategy: str
    refused: str = ""  # why it can't run; all other fields are empty then
    way: str = ""  # how a call of the widest layers is computed, in words
    attention: float = 0.0  # seconds, with exchange and recomputation
    rest: float = 0.0  # seconds of everything else that a rank computes
    parameters: float = 0.0  # seconds of their exchange that matrix products don't hide
    tensor: float = 0.0  # seconds of sums over a tensor-parallel axis
    exposed: float = 0.0  # seconds of ``attention`` that are exchange, not hidden
    sent: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # bytes (in, between nodes), mean over ranks
    memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # bytes by part, for each policy
    remat: Remat = "none"  # of the step that the seconds are for
    fits: bool | None = None  # None if its memory or the device's is unknown
    longest: int | None = None  # tokens of the longest sequence that fits, at most recomputation if that is open
    steps: Mapping[str, float] = field(default_factory=dict)  # seconds for each recompute policy
    tokens_per_second: float = 0.0  # of a rank
    mfu: float | None = None  # None without a peak, and in fp32
    flags: str = ""
    standing: tuple[int, int] | None = None  # sizes of the two simulated worlds, if not all ranks were
    ways: tuple[AttentionStrategy, ...] = ()  # for each kind of layer

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.attention + self.rest + self.parameters + self.tensor

    @property
    def bytes(self) -> int | None:
        """Bytes of the step's peak; None if unknown."""
        return sum(self.memory[self.remat].values()) if self.memory else None


def forecasts(request: ForecastRequest) -> list[Forecast]:
    """Predict a step of the strategy that was asked for, then of those that it is compared with."""
    names = [*dict.fromkeys((request.strategy, *COMPARED))]
    if TENSOR not in request.strategy and request.strategy not in FOREIGN:
        names[1:1] = [f"{request.strategy}{TENSOR}{ranks}" for ranks in meshes(request)]
    return [forecast_of(name, request) for name in names]


def meshes(request: ForecastRequest) -> list[int]:
    """Return how many ranks of a node may cut the model, more than one; only where nothing forbids it."""
    found = []
    for ranks in MESHES if request.compares_meshes else ():
        with suppress(ValueError):
            if request.cut(ranks).cluster.ranks:
                found.append(ranks)
    return found


def savings(request: ForecastRequest) -> list[tuple[str, Forecast]]:
    """Predict the strategy with options that save memory, each added to those before: (flags, forecast)."""
    if request.limit is None or not request.model.predicted:
        return []
    heads = max(n for n in range(1, MOST_HEAD_CHUNKS + 1) if request.model.heads.kv_heads % n == 0)
    options: dict[str, Mapping[str, Any]] = {
        "--remat layer": {"remat": "layer", "optimizer": "adamw"},
        f"--mlp-chunks {TOKEN_CHUNKS}": {"mlp_chunks": TOKEN_CHUNKS},
        f"--attention-chunks {heads}": {"attention_chunks": heads},
        "--offload host": {"offload": "host"},
        "--optimizer adamw-8bit": {"optimizer": "adamw-8bit"},
        "--optimizer-offload": {"optimizer": "adamw", "optimizer_offload": True},
    }
    saving, found = replace(request, mlp_chunks=1, attention_chunks=1, offload="none", optimizer_offload=False), []
    for flags, more in options.items():
        if flags == "--attention-chunks 1":
            continue
        with suppress(ValueError):  # Ulysses over more ranks than a chunk has heads: leave the option out
            found.append((flags, forecast_of(request.strategy, replace(saving, **dict(more)))))
            saving = replace(saving, **dict(more))
    return found


def recommended(found: Sequence[Forecast], saving: Sequence[tuple[str, Forecast]] = ()) -> Forecast | None:
    """Return the first strategy that may fit within TIE of the fastest; else the first of ``saving`` that fits."""
    shortest = fastest(found)
    if shortest is None:
        return next((each for _, each in saving if each.fits), None)
    return next(each for each in _possible(found) if each.seconds <= TIE * shortest.seconds)


def fastest(found: Sequence[Forecast]) -> Forecast | None:
    """Return the strategy that fits, or may fit, with the shortest step; None if none fits."""
    return min(_possible(found), key=lambda each: each.seconds, default=None)


def _possible(found: Sequence[Forecast]) -> list[Forecast]:
    return [each for each in found if not each.refused and each.fits is not False]


def forecast_of(name: str, request: ForecastRequest) -> Forecast:
    """Predict a step of one strategy. If it can't run: ValueError if it was asked for, else ``refused`` says why."""
    base, _, ranks = name.partition(TENSOR)
    try:
        q = request.cut(int(ranks)) if ranks else request
        _check(base, q)
        step = PredictedStep(q, candidate(base, q))
        # burst train plans for two forwards with --remat layer, so plan again.
        if not step.candidate.whole and q.remat is None and step.remat == "layer":
            step = PredictedStep(q, candidate(base, replace(q, remat=step.remat)))
        return step.forecast(name)
    except ValueError as error:
        if name == request.strategy:  # the request has no prediction at all
            raise
        return Forecast(strategy=name, refused=str(error))


def _check(name: str, q: ForecastRequest) -> None:
    """Raise ValueError if the ranks can't train by this strategy."""
    if name in FOREIGN and q.attention_chunks > 1:
        raise ValueError("it can't compute attention in chunks of heads; leave --attention-chunks out to see it")
    if q.joined > 1 and name != q.strategy:
        raise ValueError("it has no layout balanced; leave --packing balanced out to see it")
    options: dict[str, Any] = {} if name in FOREIGN else {"attention_chunks": q.attention_chunks}
    choose(name, **options).check(q.model.heads, q.seq_len, q.sharing)


def candidate(name: str, q: ForecastRequest, *, timed: bool = True) -> Candidate:
    """Return the attention of a strategy; with ``timed`` False only what its memory depends on."""
    if name in FOREIGN:
        return _tensor(q)
    ways, strategy = [], strategy_of(name).over(q.sharing)
    if q.joined > 1:
        strategy = replace(strategy, layout="balanced")
    options = {"caches": q.attention_chunks == 1, "lse": "sinks" in q.model.heads.options}
    for mask in q.masks:  # layers that differ in their windows share one layout
        ways.append(chosen(q.setting(mask), strategy, **options))
        strategy = replace(strategy, layout=ways[0].layout)
    q = replace(q, layout=ways[0].layout)  # which says how full a rank may be
    calls, held, kept, results = [], 0, 0, 0
    for way, (mask, count) in zip(ways, q.masks.items(), strict=True):
        if timed:
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
        more={"kept": kept, "results": results},
        flags="" if q.joined > 1 else f"--strategy {_named(name, ways)}",
        ways=tuple(ways),
    )


def _named(name: str, ways: Sequence[AttentionStrategy]) -> str:
    """Return a name, or for ``auto`` the fields of what was chosen."""
    if name != "auto":
        return name
    strategy = ways[0].strategy
    if len({*ways}) > 1:  # each kind of layer has its own way; the layout and the degree are shared
        strategy = replace(strategy, circulate="auto", cache_qkv="auto", chunks="auto", gather_kv="auto")
    return text_of(strategy)


def _tensor(q: ForecastRequest) -> Candidate:
    calls = tuple((count, tensor(q.setting(mask), q.model.hidden)) for mask, count in q.masks.items())
    gathered = 2 * q.batch * q.seq_len * q.model.hidden * q.dtype.itemsize
    return Candidate(
        way="heads and columns sharded",
        calls=calls,
        buffers=max(buffers(ALONE, alone(q.setting(mask)), q.dtype) for mask in q.masks),
        more={"kept": gathered, "gathered": gathered * 3 // 2},
        whole=True,
        flags="--strategy tensor-sequence",
    )


def _forwards(remat: Remat) -> int:
    """Return how often an attention call's forward runs in a step."""
    return 2 if remat == "layer" else 1


@dataclass(frozen=True)
class PredictedStep:
    """The prediction of one candidate for a request."""

    asked: ForecastRequest
    candidate: Candidate

    @cached_property
    def q(self) -> ForecastRequest:
        """The request, with the candidate's layout."""
        ways = self.candidate.ways
        return replace(self.asked, layout=ways[0].layout) if ways else self.asked

    def forecast(self, name: str) -> Forecast:
        """Predict the step's seconds, memory and traffic; ``name`` labels the candidate."""
        q, calls, remat, peak = self.q, self.candidate.calls, self.remat, self.q.cluster.device.peak
        forwards, moved = _forwards(remat), self.parameters
        attention, rest, parameters, tensor = self._seconds(remat)
        seconds, ranks = attention + rest + parameters + tensor, q.cluster.ranks * q.tensor_parallel
        sums = q.tensor_sums(remat)
        inside, across = (
            sum(n * (forwards * getattr(c.forward, kind) + getattr(c.backward, kind)) for n, c in calls)
            for kind in ("inside", "across")
        )
        memory: dict[str, Mapping[str, int]] = {each: parts for each in self._remats if (parts := self.memory(each))}
        known = bool(memory) and q.limit is not None
        return Forecast(
            strategy=name,
            way=self.candidate.way,
            attention=attention,
            rest=rest,
            parameters=parameters,
            tensor=tensor,
            exposed=sum(n * (forwards * c.forward.exposed + c.backward.exposed) for n, c in calls),
            sent={"attention": (inside, across), "parameters": (moved.inside, moved.across)}
            | ({"tensor": (sums.inside, sums.across)} if q.tensor_parallel > 1 else {}),
            memory=memory,
            remat=remat,
            fits=self._fits(remat) if known else None,
            longest=self.longest(self._remats[-1] if q.remat is None else remat) if known else None,
            steps={each: sum(self._seconds(each)) for each in self._remats},
            tokens_per_second=q.batch * q.seq_len / (seconds * ranks) if seconds else 0.0,
            mfu=q.flops / (seconds * q.cluster.ranks * peak) if peak and seconds and q.dtype.itemsize == 2 else None,
            flags=" ".join(self._flags()),
            standing=next((call.standing for _, call in calls if call.standing), None),
            ways=self.candidate.ways,
        )

    def _seconds(self, remat: Remat) -> tuple[float, float, float, float]:
        """Return seconds with ``remat``: attention, other matrix products, exposed parameter exchange, tensor sums."""
        q, forwards, calls = self.q, _forwards(remat), self.candidate.calls
        attention = sum(n * (forwards * c.forward.seconds + c.backward.seconds) for n, c in calls)
        computed = q.rest_seconds(remat)
        copies = 0.0
        if remat != "none":  # a forward is one of the four passes over the layers
            copies = q.copy_seconds(sum(n * c.forward.seconds for n, c in calls) + computed / 4)
        hidden = max(0.0, self.parameters.seconds - computed)
        return attention, computed + copies, hidden, q.tensor_sums(remat).seconds

    @property
    def _remats(self) -> list[Remat]:
        keeping = not self.candidate.whole and self.q.attention_chunks == 1
        return [each for each in REMATS if keeping or each != "keep-attention"]

    @cached_property
    def remat(self) -> Remat:
        """The given recompute policy, or the one that recomputes least and fits; if none fits, the last."""
        if self.q.remat in self._remats:
            return self.q.remat
        if self.q.remat is not None:  # keep-attention, with a strategy that can't keep its attention
            return self._remats[-1]
        return next((each for each in self._remats if self._fits(each)), self._remats[-1])

    @cached_property
    def parameters(self) -> Exchange:
        """The exchange of parameters and gradients in a step.

        Sharded weights are gathered for the forward and for the backward, those outside layers once; gradients are
        scattered in fp32. With tensor parallelism, only the gradients of whole weights are summed.
        """
        m, cluster, io = self.q.model, self.q.cluster, self.q.dtype.itemsize
        layers, root = m.layers_size, m.root_size
        size = 2 * io * root if self.candidate.whole else io * (2 * layers + root) + 4 * (layers + root)
        return gather(size, cluster.ranks, cluster.per_node, cluster.rates)

    def memory(self, remat: Remat, seq_len: int | None = None) -> Mapping[str, int]:
        """Return bytes by part, the attention's in proportion to the length; empty if no formula gives them."""
        q, c = self.q, self.candidate
        longer = 1.0 if seq_len is None else seq_len / q.seq_len
        tokens = q.tokens if seq_len is None else replace(q, seq_len=seq_len).tokens
        held = round(longer * c.buffers)
        if not q.model.predicted or q.dtype.itemsize > 4:
            return {}
        return Step(
            model=q.model,
            tokens=tokens,
            batch=q.batch,
            world=q.cluster.ranks,
            io=q.dtype.itemsize,
            buffers=held,
            remat=remat,
            mlp_chunks=q.mlp_chunks,
            attention_chunks=q.attention_chunks,
            offload=q.offload != "none",
            low_bit=q.optimizer == "adamw-8bit",
            offloaded=q.optimizer_offload,
            accumulates=q.accumulates,
            whole=c.whole,
            **{name: round(longer * value) for name, value in c.more.items()},
        ).parts()

    def _fits(self, remat: Remat, seq_len: int | None = None) -> bool:
        """Return whether the step fits; True if that is unknown."""
        limit = self.q.limit
        return limit is None or sum(self.memory(remat, seq_len).values()) <= limit

    def longest(self, remat: Remat) -> int:
        """Return the tokens of the longest sequence that fits, a multiple of :data:`GRAIN`; 0 if no length fits."""
        grain = GRAIN * self.q.joined
        least, most = 0, MOST_TOKENS // grain  # one fits; the other does not, or is beyond the search
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self._fits(remat, middle * grain) else (least, middle)
        return least * GRAIN

    def _flags(self) -> Iterator[str]:
        q = self.q
        tokens = q.seq_len // q.joined
        yield f"--model {q.model.name} --seq-len {tokens} --max-positions {tokens}"
        yield from filter(None, [self.candidate.flags])
        yield from [f"--tensor-parallel {q.tensor_parallel}"] * (q.tensor_parallel > 1)
        yield f"--dtype {str(q.dtype).removeprefix('torch.')}"
        if self.remat != "none":
            yield f"--remat {self.remat}"
            yield from [f"--offload {q.offload}"] * (q.offload != "none")
        yield from [f"--mlp-chunks {q.mlp_chunks}"] * (q.mlp_chunks > 1)
        yield from [f"--attention-chunks {q.attention_chunks}"] * (q.attention_chunks > 1)
        yield from [f"--optimizer {q.optimizer}"] * (q.optimizer != "adamw")
        yield from ["--optimizer-offload"] * q.optimizer_offload
        yield from [f"--packing balanced --batch {q.joined}"] * (q.joined > 1)
        yield from [f"--batch {q.batch} --pack none"] * (q.batch > 1)


def step_memory(request: ForecastRequest) -> Mapping[str, int]:
    """Return the bytes by part of the step that was asked for; empty if they are not predicted."""
    if not request.model.predicted or request.strategy in FOREIGN:
        return {}
    try:
        step = PredictedStep(request, candidate(request.strategy, request, timed=False))
    except ValueError:  # this number of ranks is not simulated
        return {}
    return step.memory(step.remat)
