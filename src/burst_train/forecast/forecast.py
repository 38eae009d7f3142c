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
from burst_attention.plan.strategy import for_chosen_keys, strategy_of, text_of
from burst_attention.planner.choice import TIE

from ..memory import RematName, Saving
from ..presets import PRESETS
from ..strategies import FOREIGN, choose
from .attention import ALONE, AttentionStrategy, AttentionTimes, Transfer, alone, chosen, gather, predict_call, tensor
from .footprint import buffers
from .memory import OVERLAPPING, REMATS, StepMemory
from .models import padded
from .request import TENSOR, ForecastRequest

MESHES = (2, 4, 8)  # ranks of a tensor-parallel axis that are predicted, if they divide a node
COMPARED = ("auto", "burst", "zigzag-ring", "ulysses", "usp", "tensor-sequence")
MOST_TOKENS = 2**31
TOKEN_CHUNKS, MOST_HEAD_CHUNKS = 32, 8  # of the options that savings() adds
GRAIN = 1024  # resolution of the longest sequence, in tokens


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
    remat: RematName = "none"  # of the step that the seconds are for
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
    meshes = []
    for ranks in MESHES if request.compares_meshes and request.strategy not in FOREIGN else ():
        with suppress(ValueError):  # leave out what can't be cut
            request.cut(ranks)
            meshes.append(f"{request.strategy}{TENSOR}{ranks}")
    return [forecast_of(name, request) for name in dict.fromkeys((request.strategy, *meshes, *COMPARED))]


def savings(request: ForecastRequest) -> list[tuple[str, Forecast]]:
    """Predict the strategy with options that save memory, each added to those before: (flags, forecast)."""
    if request.limit is None or not request.model.has_formula:
        return []
    heads = max(n for n in range(1, MOST_HEAD_CHUNKS + 1) if request.model.kv_heads % n == 0)
    options: dict[str, Mapping[str, Any]] = {
        "--remat layer": {},
        f"--mlp-chunks {TOKEN_CHUNKS}": {"mlp_chunks": TOKEN_CHUNKS},
        f"--attention-chunks {heads}": {"attention_chunks": heads},
        "--offload host": {"offload": "host"},
        "--optimizer adamw-8bit": {"optimizer": "adamw-8bit"},
        "--optimizer-offload": {"optimizer": "adamw", "optimizer_offload": True},
    }
    saving, predictions = replace(request, remat="layer", saving=Saving()), []
    for flags, more in options.items():
        if flags == "--attention-chunks 1" or (request.model.mixtures and "chunks" in flags):
            continue
        with suppress(ValueError):  # Ulysses over more ranks than a chunk has heads: leave the option out
            tried = replace(saving, saving=replace(saving.saving, **dict(more)))
            predictions.append((flags, forecast_of(request.strategy, tried)))
            saving = tried
    return predictions


def recommended(predictions: Sequence[Forecast], saving: Sequence[tuple[str, Forecast]] = ()) -> Forecast | None:
    """Return the first strategy that may fit within TIE of the fastest; else the first of ``saving`` that fits."""
    shortest = fastest(predictions)
    if shortest is None:
        return next((prediction for _, prediction in saving if prediction.fits), None)
    return next(prediction for prediction in _possible(predictions) if prediction.seconds <= TIE * shortest.seconds)


def fastest(predictions: Sequence[Forecast]) -> Forecast | None:
    """Return the strategy that fits, or may fit, with the shortest step; None if none fits."""
    return min(_possible(predictions), key=lambda prediction: prediction.seconds, default=None)


def _possible(predictions: Sequence[Forecast]) -> list[Forecast]:
    return [prediction for prediction in predictions if not prediction.refused and prediction.fits is not False]


def forecast_of(name: str, request: ForecastRequest) -> Forecast:
    """Predict a step of one strategy. If it can't run: ValueError if it was asked for, else ``refused`` says why."""
    base, _, ranks = name.partition(TENSOR)
    try:
        q = request.cut(int(ranks)) if ranks else request
        _check(base, q)
        step = _planned(base, q)
        if base == "auto" and step.caches_too_much:
            step = min(step, _planned(base, q, caches=False), key=lambda option: (not option.fits, option.seconds))
        return step.forecast(name)
    except ValueError as error:
        if name == request.strategy:  # the request has no prediction at all
            raise
        return Forecast(strategy=name, refused=str(error).replace(f"--strategy {base} ", "it ", 1))


def _planned(name: str, q: ForecastRequest, *, caches: bool = True) -> PredictedStep:
    step = predicted_step(name, q, caches=caches)
    # burst train plans for two forwards with --remat layer, so plan again.
    if not step.whole and q.remat is None and step.remat == "layer":
        step = predicted_step(name, replace(q, remat=step.remat), caches=caches)
        step = replace(step, q=replace(step.q, remat=None))
    return step


def _check(name: str, q: ForecastRequest) -> None:
    """Raise ValueError if the ranks can't train by this strategy."""
    if name in FOREIGN and q.saving.attention_chunks > 1:
        raise ValueError("it can't compute attention in chunks of heads; leave --attention-chunks out to see it")
    if q.joined > 1 and name != q.strategy:
        raise ValueError("it has no layout balanced; leave --packing balanced out to see it")
    if q.model.chooses:
        _check_indexed(name, q)
    choose(name, attention_chunks=q.saving.attention_chunks).check(q.model, q.seq_len, q.sharing)


def _check_indexed(name: str, q: ForecastRequest) -> None:
    """Raise ValueError if layers that attend to chosen keys can't run by the strategy, or with these options."""
    if q.saving.attention_chunks > 1:
        raise ValueError("--attention-chunks is not predicted for heads that share a choice of keys; leave it out")
    degree = 1 if name in FOREIGN else strategy_of(name).over(q.sharing).ulysses_degree
    if isinstance(degree, int) and degree > 1:
        raise ValueError(f"--strategy {name} splits heads, and all heads of a layer share a choice of keys")


def predicted_step(name: str, q: ForecastRequest, *, timed: bool = True, caches: bool = True) -> PredictedStep:
    """Return the step of a strategy; with ``timed`` False only what its memory depends on.

    ``caches`` False: attention caches no gathered q, k and v, where the strategy leaves that open.
    """
    if name in FOREIGN:
        return _tensor(q)
    ways, strategy = [], strategy_of(name).over(q.sharing)
    if not caches:
        strategy = replace(strategy, cache_qkv=False)
    if q.joined > 1:
        strategy = replace(strategy, layout="balanced")
    chunks = q.saving.attention_chunks
    options = {"caches": chunks == 1, "lse": "sinks" in q.model.options}
    if q.model.chooses:
        strategy = for_chosen_keys(strategy)
    for kind in q.kinds:  # layers that differ in their windows share one layout
        ways.append(chosen(q.setting(*kind), strategy, **options))
        strategy = replace(strategy, layout=ways[0].layout)
    q = replace(q, layout=ways[0].layout)  # which says how full a rank may be
    calls, held, kept, results = [], 0, 0, 0
    for way, (kind, count) in zip(ways, q.kinds.items(), strict=True):
        if timed:
            calls.append((count * chunks, predict_call(way, q.setting(*kind))))
        if not q.model.chooses:  # else no formula gives the memory
            held = max(held, buffers(way, q.setting(*kind), q.dtype, calls=min(chunks, OVERLAPPING)))
        if way.groups.keep:
            shape, times = q.shape, way.groups.query // way.groups.key
            token = q.tokens * shape.batch * shape.io
            keys = token * shape.kv_heads * (shape.head_dim + shape.v_head_dim)
            kept = max(kept, (times - 1) * keys)  # saved instead of the rank's own q, k and v
            saved = token * shape.q_heads * shape.head_dim + times * keys
            if way.groups.results:
                saved += q.tokens * shape.side_bytes(Side.QUERY, Direction.FORWARD, wide=shape.io)
            results = max(results, saved)
    fixed = ways[0].strategy
    if len({*ways}) > 1:  # each kind of layer has its own way; the layout and the degree are shared
        fixed = replace(fixed, circulate="auto", cache_qkv="auto", chunks="auto", gather_kv="auto")
    return PredictedStep(
        q=q,
        way=str(ways[0]),
        calls=tuple(calls),
        buffers=held,
        more={"kept": kept, "results": results},
        flags="" if q.joined > 1 else f"--strategy {text_of(fixed) if name == 'auto' else name}",
        ways=tuple(ways),
    )


def _tensor(q: ForecastRequest) -> PredictedStep:
    calls = tuple((count, tensor(q.setting(*kind), q.model.hidden)) for kind, count in q.kinds.items())
    gathered = 2 * q.batch * q.seq_len * q.model.hidden * q.io
    return PredictedStep(
        q=q,
        way="heads and columns sharded",
        calls=calls,
        buffers=max(buffers(ALONE, alone(q.setting(*kind)), q.dtype) for kind in q.kinds),
        more={"kept": gathered, "gathered": gathered * 3 // 2},
        whole=True,
        flags="--strategy tensor-sequence",
    )


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """A step with the attention of one strategy."""

    q: ForecastRequest  # with the layout of that attention
    way: str  # how a call is computed, in words
    calls: tuple[tuple[int, AttentionTimes], ...]  # (number of layers, call) for each kind of layer
    buffers: int  # bytes of a call's backward at its peak
    flags: str  # of the strategy
    more: Mapping[str, int]  # values of ``StepMemory`` in proportion to the tokens
    whole: bool = False  # embedding, head and norms on every rank, as in tensor parallelism
    ways: tuple[AttentionStrategy, ...] = ()  # for each kind of layer; empty with tensor parallelism

    def forecast(self, name: str) -> Forecast:
        """Predict the step's seconds, memory and traffic; ``name`` labels the strategy."""
        q, remat, peak = self.q, self.remat, self.q.cluster.device.peak
        parts: dict[str, Any] = self._seconds(remat)
        moved, sums = self.parameters, q.tensor_sums(remat)
        seconds, ranks = self.seconds, q.cluster.ranks * q.tensor_parallel
        memory: dict[str, Mapping[str, int]] = {each: held for each in self._remats if (held := self.memory(each))}
        judged = bool(memory) and q.limit is not None
        return Forecast(
            strategy=name,
            way=self.way,
            **parts,
            exposed=self._of_calls("exposed", remat),
            sent={"attention": (self._of_calls("mean_inside", remat), self._of_calls("mean_across", remat))}
            | {"parameters": (moved.inside, moved.across)}
            | ({"tensor": (sums.inside, sums.across)} if q.tensor_parallel > 1 else {}),
            memory=memory,
            remat=remat,
            fits=self.fits if judged else None,
            longest=self.longest(self._remats[-1] if q.remat is None else remat) if judged else None,
            steps={each: sum(self._seconds(each).values()) for each in self._remats},
            tokens_per_second=q.batch * q.seq_len / (seconds * ranks) if seconds else 0.0,
            mfu=q.flops / (seconds * q.cluster.ranks * peak) if peak and seconds and q.io == 2 else None,
            flags=" ".join(self._flags()),
            standing=next((call.standing for _, call in self.calls if call.standing), None),
            ways=self.ways,
        )

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self._seconds(self.remat).values())

    @property
    def fits(self) -> bool:
        """Whether the step fits; True if that is unknown."""
        return self._fits(self.remat)

    @property
    def caches_too_much(self) -> bool:
        """Whether attention caches q, k and v, and the step lacks the memory to recompute least.

        The planner weighs the time of a call, not memory. A call without a cache may then make a shorter step.
        """
        q, caches = self.q, any(way.groups.keep for way in self.ways)
        return caches and q.remat != "layer" and not (self.fits and self.remat == (q.remat or self._remats[0]))

    def _of_calls(self, name: str, remat: RematName) -> float:
        """Return the sum of a figure over all attention calls of a step; a recomputed layer's forward runs twice."""
        forwards = 1 + (remat == "layer")
        return sum(n * (forwards * getattr(c.forward, name) + getattr(c.backward, name)) for n, c in self.calls)

    def _seconds(self, remat: RematName) -> dict[str, float]:
        """Return the seconds of a step with ``remat``, by the names of :class:`Forecast`."""
        q, rest, copies = self.q, self.q.rest_seconds(remat), 0.0
        if remat != "none":  # a forward is one of the four passes over the layers
            copies = q.copy_seconds(sum(n * c.forward.seconds for n, c in self.calls) + rest / 4)
        return {
            "attention": self._of_calls("seconds", remat),
            "rest": rest + copies,
            "parameters": max(0.0, self.parameters.seconds - rest),
            "tensor": q.tensor_sums(remat).seconds,
        }

    @property
    def _remats(self) -> list[RematName]:
        keeping = not self.whole and self.q.saving.attention_chunks == 1
        return [each for each in REMATS if keeping or each != "keep-attention"]

    @cached_property
    def remat(self) -> RematName:
        """The given recompute policy, or the one that recomputes least and fits; if none fits, the last."""
        if self.q.remat in self._remats:
            return self.q.remat
        if self.q.remat is not None:  # keep-attention, with a strategy that can't keep its attention
            return self._remats[-1]
        return next((each for each in self._remats if self._fits(each)), self._remats[-1])

    @cached_property
    def parameters(self) -> Transfer:
        """The exchange of parameters and gradients in a step.

        Sharded weights are gathered for the forward and for the backward, those outside layers once; gradients are
        scattered in fp32. FSDP2 sends as many rows of a weight for each rank as the fullest one has. With tensor
        parallelism, only the gradients of whole weights are summed.
        """
        m, cluster, io = self.q.model, self.q.cluster, self.q.io
        layers, root = padded(m.inside, cluster.ranks), padded(m.outside, cluster.ranks)
        size = 2 * io * root if self.whole else io * (2 * layers + root) + 4 * (layers + root)
        return gather(size, cluster.ranks, cluster.per_node, cluster.rates)

    def memory(self, remat: RematName, seq_len: int | None = None) -> Mapping[str, int]:
        """Return bytes by part, the attention's in proportion to the length; empty if no formula gives them."""
        q = self.q if seq_len is None else replace(self.q, seq_len=seq_len)
        chunks = max(q.saving.mlp_chunks, q.saving.attention_chunks)
        if not q.model.has_formula or q.io > 4 or (q.model.mixtures and chunks > 1):
            return {}
        scaled = {"buffers": self.buffers, **self.more}
        longer = {name: round(q.seq_len / self.q.seq_len * value) for name, value in scaled.items()}
        return StepMemory(q=q, remat=remat, whole=self.whole, **longer).parts()

    def _fits(self, remat: RematName, seq_len: int | None = None) -> bool:
        """Return whether the step fits; True if that is unknown."""
        limit = self.q.limit
        return limit is None or sum(self.memory(remat, seq_len).values()) <= limit

    def longest(self, remat: RematName) -> int:
        """Return the tokens of the longest sequence that fits, a multiple of :data:`GRAIN`; 0 if no length fits."""
        grain = GRAIN * self.q.joined
        least, most = 0, MOST_TOKENS // grain  # one fits; the other does not, or is beyond the search
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self._fits(remat, middle * grain) else (least, middle)
        return least * GRAIN

    def _flags(self) -> Iterator[str]:
        q, saving, tokens = self.q, self.q.saving, self.q.seq_len // self.q.joined
        yield f"--model {q.model.name} --seq-len {tokens}"
        if q.rope_scaling is not None:
            yield f"--rope-scaling {q.rope_scaling}"
        elif q.too_long and q.model.name not in PRESETS:
            yield f"--max-positions {tokens}"
        yield from filter(None, [self.flags])
        yield from [f"--tensor-parallel {q.tensor_parallel}"] * (q.tensor_parallel > 1)
        yield f"--dtype {str(q.dtype).removeprefix('torch.')}"
        if self.remat != "none":
            yield f"--remat {self.remat}"
            yield from [f"--offload {saving.offload}"] * (saving.offload != "none")
        yield from [f"--mlp-chunks {saving.mlp_chunks}"] * (saving.mlp_chunks > 1)
        yield from [f"--attention-chunks {saving.attention_chunks}"] * (saving.attention_chunks > 1)
        yield from [f"--optimizer {saving.optimizer}"] * (saving.optimizer != "adamw")
        yield from ["--optimizer-offload"] * saving.optimizer_offload
        yield from [f"--packing balanced --batch {q.joined}"] * (q.joined > 1)
        yield from [f"--batch {q.batch} --pack none"] * (q.batch > 1)
