"""Modules whose class ``parallelize`` replaces, so that their own code runs on shards.

Recurrent layers and short convolutions keep their weights and their code. Only the names of their kernels mean ours
(:mod:`burst_attention.recurrence`), which call the kernels of the modeling file, whatever they are at that moment (fla,
mamba_ssm, a hub kernel). No module of another package changes. Positions that a model counts from the start of its
input, and poolers, get those of the whole sequence.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_attention.attention.batch import Plans
from burst_attention.attention.plan import Plan
from burst_attention.recurrence import kernels
from burst_attention.recurrence.exchange import RunExchange

from ..classes import Converted, become, revert, stock_class
from ..reading import Kind, Part, Reading, known
from ..reading.forwards import parameters_in, taker_of
from ..reading.models import check_tail
from ..running import ALONE, RUNNING, RunningPlans, running, running_plans
from . import checks
from .dealt import Step, passed
from .indexed import IndexedAttention, Indexer
from .own_attention import OwnAttention
from .pooled import PooledIndexer

_KEYWORD = "burst_plans"  # a layer's plans: checkpointing stores keywords, and calls the layer again with them
# Mechanisms whose states a cache holds. transformers' Mamba 1 starts several later tokens from a zero state.
_CACHED = frozenset({"gated delta", "Kimi delta", "Mamba 2", "convolution"})


def convert(body: Reading) -> None:
    """Make the known modules of a model run on shards. Changes classes in place; a second call changes nothing."""
    for part in body:
        if mixin := _mixin_of(part):
            become(part.module, mixin)


def convert_body(body: Reading) -> None:
    """Convert a model's parts, and the module that gets its body's arguments."""
    convert(body)
    become(taker_of(body.model), _Body)


def _mixin_of(part: Part) -> type[Converted] | None:
    """Return the mixin of a part whose class must change."""
    if isinstance(part.module, GradientCheckpointingLayer):
        return _Layer if any(map(_reads_plans, part.inside)) else None
    if part.kind is Kind.INDEXER and known.pools_keys(part.module):
        return PooledIndexer
    return _MIXINS.get(part.kind)


def _reads_plans(part: Part) -> bool:
    """Return whether a part gets no keywords from its layer, but needs its plans."""
    by_context = vars(part.module).get("burst_by_context", False)  # experts
    by_kind = part.kind in (Kind.MIXER, Kind.INDEXED)
    return by_kind or by_context or known.gets_no_keywords(part.module)


def check_converted(reading: Reading) -> None:
    """Refuse a model with a module that would run on the shard alone."""
    for part in reading:
        mixin = _mixin_of(part)
        if mixin and mixin.wrong_alone and not isinstance(part.module, mixin):
            raise ValueError(f"{part} {mixin.wrong_alone}; call hf.parallelize(model)")


def check_cached(body: Reading, argument: str) -> None:
    """Refuse the cache ``argument`` for parts with a state that no cache over ranks holds, or that need positions."""
    for part in body:
        mechanism, kind = known.mechanism(part.module), type(part.module).__name__
        if mechanism is not None and mechanism not in _CACHED:
            raise ValueError(
                f"{argument}: {part.name} ({kind}, {mechanism}) has a state that no cache over ranks holds; leave it "
                "out"
            )
        if isinstance(part.module, (OwnAttention, _Placed, _Tempered)) or known.gets_no_keywords(part.module):
            raise ValueError(
                f"{argument}: {part} has a custom attention or counts positions, which has no cache over ranks yet; "
                "use a model with rotary positions and plain attention"
            )
        if part.kind is Kind.INDEXER:
            check_tail(part.module)


def hands_plans(reading: Reading) -> bool:
    """Return whether layers get their plans other than by keywords."""
    return any(isinstance(part.module, (_Layer, OwnAttention)) for part in reading)


@contextmanager
def converted(reading: Reading) -> Iterator[None]:
    """Convert a model inside this context only."""
    before = any(isinstance(part.module, Converted) for part in reading)
    convert(reading)
    try:
        yield
    finally:
        if not before:
            revert(reading.model, Converted)


class _Layer(Converted):
    """A decoder layer: keeps its plans for modules inside it, also if checkpointing runs it again later."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plans = kwargs.get("plan", RUNNING.plans)
        plans = Plans.of(plans) if isinstance(plans, (Plan, Mapping)) else plans  # those of a caller, by hand
        return super().__call__(*args, **{_KEYWORD: plans} | kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with running(kwargs.pop(_KEYWORD, None)):
            return super().forward(*args, **kwargs)


class _Body(Converted):
    """A model's body: parts without keywords read the plans of its arguments, whichever block of ``shards`` is open."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plans = kwargs.get("plan", RUNNING.plans)
        if not isinstance(plans, RunningPlans):
            return super().__call__(*args, **kwargs)
        if plans.positions is not None and "position_ids" in (names := parameters_in(self)):
            arguments = dict(zip(names, args, strict=False)) | kwargs
            with plans.one.agreement.entering("burst_attention", once=True):
                plans.check_body(self, arguments.get("position_ids"))
        with running(plans):
            return super().__call__(*args, **kwargs)


class _Mixer(Converted):
    """A mixer whose kernels run on shards."""

    wrong_alone = "passes a state from token to token, which would begin at this rank's shard"

    @torch.compiler.disable  # the function with our kernels is made for each call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plans = running_plans(self)
        if plans is ALONE or isinstance(plans, Step):  # the mixer gets all tokens, and the cache as in one process
            return super().forward(*args, **kwargs)
        plan, name = plans.one, passed(kwargs)
        cache = None if name is None else kwargs.pop(name)
        with plan.agreement.entering("a recurrent layer", once=True):
            _check(plan, args, kwargs)
        with nullcontext() if cache is None else cache.recurring(self.layer_idx) as past:
            return over_runs(self, RunExchange(plan, past=past))(*args, **kwargs)


def over_runs(mixer: nn.Module, exchange: RunExchange) -> Callable[..., Any]:
    """Return the forward of a known mixer over runs. It takes the same arguments as the stock forward."""
    kind = stock_class(mixer)
    if known.mechanism(mixer) == "lightning":
        return functools.partial(_lightning, mixer, exchange)
    home = sys.modules[kind.__module__]
    used = known.KERNELS.keys() & known.code_names(kind.forward)
    # Looked up at each call: the modeling file's kernel may have been replaced by a faster one.
    ours = {name: functools.partial(known.KERNELS[name], getattr(home, name), exchange) for name in used}
    return functools.partial(_with_names(kind.forward, ours), mixer)


def _with_names(function: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function, and of its decorators, in which some global names mean other values."""
    below = getattr(function, "__wrapped__", None)
    if below is None:
        scope, closure = {**function.__globals__, **names}, function.__closure__
    else:
        inner, scope = _with_names(below, names), function.__globals__
        closure = tuple(CellType(inner) if cell.cell_contents is below else cell for cell in function.__closure__)
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _lightning(mixer: Any, exchange: RunExchange, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """The forward of MiniMax's lightning attention, which calls no kernel by name. ``hidden_states``: [B, S, E]."""
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states))
    query, key, value = qkv.unflatten(-1, (mixer.num_attention_heads, -1)).transpose(1, 2).chunk(3, -1)
    out = kernels.lightning(exchange, query, key, value, mixer.slope_rate, block=mixer.block_size)
    out = mixer.norm(out.transpose(1, 2).flatten(2))
    return mixer.out_proj(F.sigmoid(mixer.output_gate(hidden_states)) * out), None


@dataclass(frozen=True)
class _Places:
    """Stands for a cache, whose length is each local token's place in its document less its number."""

    offset: Tensor

    def get_seq_length(self, _: int) -> Tensor:
        return self.offset

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


class _Tempered(Converted):
    """An attention of Llama 4 that scales queries by their places in their documents."""

    wrong_alone = "scales queries by their places, which it would count from the shard's start"

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if kwargs.get("plan") is not None:
            plans = Plans.of(kwargs["plan"])
            with plans.one.agreement.entering("burst_attention", once=True):
                checks.check_tokens(hidden_states.shape[1], plans.one)
                _check_no_cache(kwargs)
            places = plans.one.document_positions_on(hidden_states.device)
            kwargs[known.CACHE] = _Places(places - torch.arange(len(places), device=places.device))
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


class _Placed(Converted):
    """An embedding of positions, for decoders that count their input's tokens: takes positions from the plan."""

    wrong_alone = "embeds positions counted from the shard's start"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plans = running_plans(self)
        if plans is not ALONE:
            weight: Any = self.weight
            kwargs["position_ids"] = plans.one.document_positions_on(weight.device)
        return super().forward(*args, **kwargs)


class _Unpooled(Converted):
    """A pooler scores a sequence by its first token. On shards it returns None; :func:`pooled` runs it later."""

    wrong_alone = "scores the shard's first token, not the sequence's (add_pooling_layer=False builds none)"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) if RUNNING.plans in (None, ALONE) else None


def pooled(body: Any, hidden: Tensor) -> Tensor | None:
    """Return the pooler's result for whole hidden states [B, S, E]; None if the body has no pooler."""
    pooler = getattr(body, "pooler", None)
    result: Tensor | None = pooler(hidden) if isinstance(pooler, _Unpooled) else None
    return result


_MIXINS: Mapping[Kind, type[Converted]] = {
    Kind.MIXER: _Mixer,
    Kind.TEMPERED: _Tempered,
    Kind.INDEXED: IndexedAttention,
    Kind.INDEXER: Indexer,
    Kind.SCORES: OwnAttention,
    Kind.PLACES: _Placed,
    Kind.POOLER: _Unpooled,
}


def _check(plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    checks.check_tokens((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).shape[1], plan)
    _check_no_cache(kwargs)
    checks.mask_request(kwargs.get("attention_mask"))
    checks.check_keywords(0.0, {name: kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")})


def _check_no_cache(kwargs: Mapping[str, Any]) -> None:
    for name in known.CACHES:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: a cache with earlier tokens is not supported; pass use_cache=False")
