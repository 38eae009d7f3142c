"""Predict a training step for each engine: seconds, bytes, memory, and the longest sequence that fits.

No model runs. The attention's time comes from the planner (:mod:`burst_train.forecast.calls`). Memory comes from a
formula (:mod:`burst_train.forecast.step_memory`), with the attention's buffers from its programs. The rest of the
model takes the time of its matrix products and of its element-wise operations' bytes. Sharded parameters use a simple
model of collectives (:mod:`burst_train.forecast.collectives`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from burst_attention.planner.choice import WORTH

from ..memory import MemoryConfig
from . import collectives
from .buffers import token_bytes
from .calls import AttentionStrategy, Call
from .candidates import MAKERS, Candidate, refusal
from .collectives import Exchange
from .request import ForecastRequest
from .step_memory import REMATS, Remat, Step

MOST_TOKENS = 2**31
TOKEN_CHUNKS, MOST_HEAD_CHUNKS = 32, 8  # of the options that savings() adds
GRAIN = 1024  # resolution of the longest sequence, in tokens


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The prediction for one engine's step.

    Attributes:
        engine: name of the engine, as in tables.
        refused: why the engine can't run; all other fields are empty then.
        way: how a call is computed, in words, for the layers with the widest window.
        attention: seconds of attention with its exchange and its recomputation.
        rest: seconds of everything else that a rank computes.
        parameters: seconds of exchanging parameters and gradients that the matrix products don't hide.
        exposed: the part of ``attention`` that is exchange not hidden by computation, in seconds.
        sent: (within a node, between nodes) bytes that a rank sends in a step, mean over ranks. Keys:
            ``attention``, ``parameters``.
        memory: bytes by part, for each recompute policy.
        remat: recompute policy of the step that the seconds are for.
        fits: whether the step fits; None if the device's memory is unknown.
        longest: tokens of the longest sequence that fits, computed the same way; None if ``fits`` is. Of sequences
            that ``--packing balanced`` joins, all have this length. If the request
            leaves ``remat`` open, the policy that recomputes most is assumed.
        steps: seconds of a step for each recompute policy that the engine supports.
        tokens_per_second: tokens per second and rank.
        mfu: model FLOP utilisation; None if the peak is unknown, and in fp32.
        flags: flags of ``burst train`` for this step.
        standing: sizes of the two simulated worlds; None if all ranks were simulated.
        ways: how calls are computed, for each kind of layer; empty if the attention is not ours.
    """

    engine: str
    refused: str = ""
    way: str = ""
    attention: float = 0.0
    rest: float = 0.0
    parameters: float = 0.0
    exposed: float = 0.0
    sent: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    remat: Remat = "none"
    fits: bool | None = None
    longest: int | None = None
    steps: Mapping[str, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    mfu: float | None = None
    flags: str = ""
    standing: tuple[int, int] | None = None
    ways: tuple[AttentionStrategy, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.attention + self.rest + self.parameters


def forecasts(request: ForecastRequest) -> list[Forecast]:
    """Predict a step of every engine: ours as the planner chooses, and those it is compared with."""
    return [forecast_of(name, request) for name in MAKERS]


def savings(request: ForecastRequest) -> list[tuple[str, Forecast]]:
    """Predict burst with each option that saves memory added to those before it: (flags, forecast).

    Empty for attention only, for a model whose memory no formula gives, and if the device's memory is unknown.
    """
    if request.model is None or request.limit is None or request.model.measured:
        return []
    heads = max(n for n in range(1, MOST_HEAD_CHUNKS + 1) if request.kv_heads % n == 0)
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
        if flags != "--attention-chunks 1":
            saving = replace(saving, **dict(more))
            found.append((flags, forecast_of("burst", saving)))
    return found


def recommended(found: list[Forecast]) -> Forecast | None:
    """Return the first engine that fits, or may fit, within :data:`WORTH` of the shortest step; None if none fits."""
    shortest = fastest(found)
    return next((each for each in _possible(found) if shortest and each.seconds <= WORTH * shortest.seconds), None)


def fastest(found: list[Forecast]) -> Forecast | None:
    """Return the engine that fits, or may fit, with the shortest step; None if none fits."""
    return min(_possible(found), key=lambda each: each.seconds, default=None)


def _possible(found: list[Forecast]) -> list[Forecast]:
    return [each for each in found if not each.refused and each.fits is not False]


def forecast_of(name: str, request: ForecastRequest) -> Forecast:
    """Predict a step of one engine.

    Args:
        name: a key of :data:`~burst_train.forecast.candidates.MAKERS`.

    Raises:
        ValueError: ``burst`` can't be predicted for this request. For other engines ``refused`` says why.
    """
    refused = refusal(name, request)
    if refused:
        return Forecast(engine=name, refused=refused)
    if name != "burst":
        request = replace(request, layout="auto")  # it is burst's
    try:
        step = predicted_step(request, MAKERS[name](request))
        # burst train plans for two forwards with --remat layer, so plan again. Other engines don't depend on it.
        if name == "burst" and request.remat is None and step.remat == "layer":
            step = predicted_step(request, MAKERS[name](replace(request, remat=step.remat)))
        return step.forecast(name)
    except ValueError as error:
        if name == "burst":  # the request has no prediction at all
            raise
        return Forecast(engine=name, refused=str(error))


def _forwards(remat: Remat) -> int:
    """Return how often an attention call's forward runs in a step."""
    return 2 if remat == "layer" else 1


def predicted_step(request: ForecastRequest, candidate: Candidate) -> _PredictedStep:
    """Return the prediction of a request whose layout, if it was left open, is the candidate's."""
    layout = candidate.ways[0].layout if candidate.ways else request.layout
    return _PredictedStep(replace(request, layout=layout), candidate)


@dataclass(frozen=True)
class _PredictedStep:
    """The prediction of one candidate for a request."""

    q: ForecastRequest
    candidate: Candidate

    def forecast(self, name: str) -> Forecast:
        """Predict the step's seconds, memory and traffic; ``name`` labels the candidate."""
        q, remat, moved, peak = self.q, self.remat, self.parameters, self.q.cluster.device.peak
        exposed = sum(n * (self._forwards * c.forward.exposed + c.backward.exposed) for n, c in self.calls)
        attention, rest, parameters = self._seconds(remat)
        seconds = attention + rest + parameters
        total = sum(self._memory(remat).values())
        return Forecast(
            engine=name,
            way=self.candidate.way,
            attention=attention,
            rest=rest,
            parameters=parameters,
            exposed=exposed,
            sent={"attention": self._sent, "parameters": (moved.inside, moved.across)},
            memory={each: self._memory(each) for each in self._remats},
            remat=remat,
            fits=None if q.limit is None else total <= q.limit,
            longest=self.longest(self._remats[-1] if q.remat is None else remat),
            steps={each: sum(self._seconds(each)) for each in self._remats},
            tokens_per_second=q.batch * q.seq_len / (seconds * q.cluster.ranks) if seconds else 0.0,
            mfu=q.flops / (seconds * q.cluster.ranks * peak) if peak and seconds and q.dtype.itemsize == 2 else None,
            flags=self._flags(),
            standing=next((call.standing for _, call in self.calls if call.standing), None),
            ways=self.candidate.ways,
        )

    def _seconds(self, remat: Remat) -> tuple[float, float, float]:
        """Return seconds of (attention, other matrix products, exposed parameter exchange) with ``remat``."""
        q, forwards = self.q, _forwards(remat)
        attention = sum(n * (forwards * c.forward.seconds + c.backward.seconds) for n, c in self.calls)
        computed = q.rest_seconds(remat)
        copies = 0.0
        if remat != "none":  # a forward is one of the four passes over the layers
            copies = q.copy_seconds(sum(n * c.forward.seconds for n, c in self.calls) + computed / 4)
        return attention, computed + copies, max(0.0, self.parameters.seconds - computed)

    @property
    def _remats(self) -> list[Remat]:
        if self.q.model is None:
            return ["none"]
        keeping = self.candidate.keeping and self.q.attention_chunks == 1
        return [each for each in REMATS if keeping or each != "keep-attention"]

    @cached_property
    def remat(self) -> Remat:
        """The given recompute policy, or the one that recomputes least and fits; if none fits, the last."""
        q = self.q
        if q.remat in self._remats:
            return q.remat
        if q.remat is not None:  # keep-attention, with an engine that can't keep its attention
            return self._remats[-1]
        fitting = (each for each in self._remats if q.limit is None or sum(self._memory(each).values()) <= q.limit)
        return next(fitting, self._remats[-1])

    @property
    def _forwards(self) -> int:
        return _forwards(self.remat)

    @property
    def _sent(self) -> tuple[float, float]:
        """Bytes (within a node, between nodes) that attention sends in all layers."""
        inside, across = (
            sum(n * (self._forwards * getattr(c.forward, kind) + getattr(c.backward, kind)) for n, c in self.calls)
            for kind in ("inside", "across")
        )
        return inside, across

    @property
    def calls(self) -> tuple[tuple[int, Call], ...]:
        """(number of layers, attention call) for each window."""
        return self.candidate.calls

    @property
    def parameters(self) -> Exchange:
        """The exchange of parameters and gradients in a step.

        Sharded weights are gathered for the forward and for the backward; those outside layers are gathered once.
        Gradients are scattered in fp32. With tensor parallelism, only the gradients of whole weights are summed.
        """
        m, cluster, io = self.q.model, self.q.cluster, self.q.dtype.itemsize
        if m is None:
            return Exchange()
        layers, root = m.layers_size, m.root_size
        size = 2 * io * root if self.candidate.whole else io * (2 * layers + root) + 4 * (layers + root)
        return collectives.gather(size, cluster.ranks, cluster.per_node, cluster.rates)

    def _memory(self, remat: Remat, seq_len: int | None = None) -> Mapping[str, int]:
        """Return bytes by part for a sequence length; the attention's bytes are scaled in proportion to it."""
        q, c = self.q, self.candidate
        longer = 1.0 if seq_len is None else seq_len / q.seq_len
        tokens = q.tokens if seq_len is None else replace(q, seq_len=seq_len).tokens
        held = round(longer * c.buffers)
        if q.model is None:
            return {"inputs and results": tokens * token_bytes(q.shape, q.dtype), "attention": held}
        measured = q.model.memory(
            tokens=tokens,
            usual=q.tokens,
            batch=q.batch,
            world=q.cluster.ranks,
            dtype=q.dtype,
            buffers=held,
            options=MemoryConfig(remat=remat, optimizer=q.optimizer, optimizer_offload=q.optimizer_offload),  # type: ignore[arg-type]
        )
        if measured is not None:
            return measured
        step = Step(
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
            kept=round(longer * c.kept),
            results=round(longer * c.results),
            gathered=round(longer * c.gathered),
        )
        parts = dict(step.parts())
        if c.whole:
            more = 4 * round(q.model.root_size * (1 - 1 / q.cluster.ranks))
            for part, times in (("weights", 1), ("gradients", 1), ("AdamW", 2)):
                parts[part] += times * more
            cut = 2 * q.model.layer_size // q.cluster.ranks
            parts["gathered"] = q.dtype.itemsize * (q.model.root_size + cut) * (parts["gathered"] > 0)
        if q.optimizer_offload:
            parts |= dict.fromkeys(("weights", "gradients", "AdamW"), 0)
        return parts

    def longest(self, remat: Remat) -> int | None:
        """Return the tokens of the longest sequence that fits, a multiple of :data:`GRAIN`; 0 if no length fits."""
        limit, grain = self.q.limit, GRAIN * self.q.joined
        if limit is None:
            return None
        least, most = 0, MOST_TOKENS // grain  # one fits; the other does not, or is beyond the search
        while most - least > 1:
            middle = (least + most) // 2
            fits = sum(self._memory(remat, middle * grain).values()) <= limit
            least, most = (middle, most) if fits else (least, middle)
        return least * GRAIN

    def _flags(self) -> str:
        q, flags = self.q, self.candidate.flags
        if q.model is None or not flags:
            return ""
        tokens = q.seq_len // q.joined
        given = f"--model {q.model.source} --seq-len {tokens} --max-positions {tokens} {flags}"
        given += f" --dtype {str(q.dtype).removeprefix('torch.')}"
        given += f" --remat {self.remat}" if self.remat != "none" else ""
        given += f" --mlp-chunks {q.mlp_chunks}" if q.mlp_chunks > 1 else ""
        given += f" --attention-chunks {q.attention_chunks}" if q.attention_chunks > 1 else ""
        given += f" --offload {q.offload}" if q.offload != "none" and self.remat != "none" else ""
        given += f" --optimizer {q.optimizer}" if q.optimizer != "adamw" else ""
        given += " --optimizer-offload" if q.optimizer_offload else ""
        given += f" --packing balanced --batch {q.joined}" if q.joined > 1 else ""
        return given + (f" --batch {q.batch} --pack none" if q.batch > 1 else "")
