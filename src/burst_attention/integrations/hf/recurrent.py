"""Recurrent layers and short convolutions of transformers, over the ranks of a sequence.

A mixer keeps its weights and its code. Only the names of its kernels mean ours (:mod:`burst_attention.recurrence`),
which call the kernels of the modeling file, whatever they are at that moment (fla, mamba_ssm, a hub kernel). No module
of another package changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_attention.attention.batch import Plans
from burst_attention.recurrence.exchange import RunExchange

from . import checks, handed, mixers
from .dealt import DealtCache, Step
from .handed import ALONE, ATTRIBUTE
from .own_attention import OwnAttention, is_known
from .pooler import Unpooled, poolers_of
from .positions import Placed, is_counted
from .token_chunks import subclass

_KEYWORD = "burst_plans"  # a layer's plans: checkpointing stores keywords, and calls the layer again with them
_NOT_PASSED_ON = ("NemotronAttention", "StableLmAttention")  # their layers keep keywords to themselves
_TEMPERED = "Llama4TextAttention"  # scales queries by their places
_CACHES = ("cache_params", "past_key_values")  # how mixers call their cache
# Mechanisms whose states a cache holds. transformers' Mamba 1 starts several later tokens from a zero state.
_CACHED = frozenset({"gated delta", "Kimi delta", "Mamba 2", "convolution"})


def convert(body: nn.Module) -> None:
    """Make the known mixers of a model run on shards. Changes classes in place; a second call changes nothing."""
    for layer in [each for each in body.modules() if isinstance(each, GradientCheckpointingLayer)]:
        inside = [mixer for _, mixer in mixers.mixers_of(layer)]
        kinds = [(layer, _Layer), *((mixer, _Mixer) for mixer in inside)]
        for module, mixin in kinds if inside or any(map(_gets_no_keywords, layer.modules())) else []:
            if not isinstance(module, mixin):
                module.__class__ = subclass(mixin, type(module))
    poolers = [*poolers_of(body)]
    for mixin, is_of_kind in _KINDS.items():
        for each in poolers if mixin is Unpooled else body.modules():
            if is_of_kind(each) and not isinstance(each, mixin):
                kind: Any = type(each)
                each.__class__ = subclass(mixin, kind)


def is_tempered(module: nn.Module) -> bool:
    """Return whether an attention scales queries by their places, which it counts from the shard's start."""
    own = type(module).__name__ == _TEMPERED
    return own and bool(module.attn_temperature_tuning) and not module.use_rope


def restore(body: nn.Module) -> None:
    """Undo :func:`convert`."""
    for module in body.modules():
        if _is_converted(module):
            module.__class__ = module.stock_class  # type: ignore[assignment]


def check_converted(model: nn.Module) -> None:
    """Refuse a model with a mixer that would run on the shard alone."""
    for name, mixer in mixers.mixers_of(model):
        if not isinstance(mixer, _Mixer):
            raise ValueError(
                f"{name} ({type(mixer).__name__}) passes a state from token to token, but it is not parallelized, so "
                "it would see only this rank's shard; call hf.parallelize(model)"
            )
    for name, module in model.named_modules():
        if is_tempered(module) and not isinstance(module, _Tempered):
            raise ValueError(
                f"{name} ({type(module).__name__}) scales queries by their places, which it would count from the "
                "shard's start; call hf.parallelize(model), or set attn_temperature_tuning to false"
            )
        if is_counted(module) and not isinstance(module, Placed):
            raise ValueError(
                f"{name} ({type(module).__name__}) embeds positions counted from the shard's start; call "
                "hf.parallelize(model)"
            )
        if is_known(module) and not isinstance(module, OwnAttention):
            raise ValueError(
                f"{name} ({type(module).__name__}) computes its attention itself, over this rank's shard alone; call "
                "hf.parallelize(model)"
            )
    for pooler in poolers_of(model):
        if not isinstance(pooler, Unpooled):
            raise ValueError(
                f"{type(pooler).__name__} scores the shard's first token, not the sequence's; call "
                "hf.parallelize(model), or build the body with add_pooling_layer=False"
            )


def check_cached(body: nn.Module) -> None:
    """Refuse a model with parts that have a state that no cache over ranks holds, or that need positions."""
    for name, module in body.named_modules():
        found, kind = mixers.mechanism(module), type(module).__name__
        if found is not None and found not in _CACHED:
            raise ValueError(
                f"past_key_values: {name} ({kind}, {found}) has a state that no cache over ranks holds; generate on "
                "one rank with transformers' own cache"
            )
        if isinstance(module, (OwnAttention, Placed)) or _gets_no_keywords(module):
            raise ValueError(
                f"past_key_values: {name} ({kind}) has a custom attention or counts positions, which has no cache over "
                "ranks yet; use a model with rotary positions and plain attention"
            )


def check_layout(model: nn.Module, layout: str) -> None:
    """Refuse a layout that separates neighbouring tokens, for a model that passes states between them."""
    found = next(mixers.mixers_of(model), None)
    if found is not None and layout.startswith("striped"):
        raise ValueError(
            f"layout={layout!r} of the strategy separates neighbouring tokens, but {found[0]} "
            f"({type(found[1]).__name__}) passes a state from token to token; use Strategy(layout='zigzag')"
        )


def hands_plans(model: nn.Module) -> bool:
    """Return whether modules get their plans other than by keywords."""
    return any(isinstance(each, (_Layer, OwnAttention)) for each in model.modules())


@contextmanager
def converted(body: nn.Module) -> Iterator[None]:
    """Convert a model inside this context only."""
    before = any(map(_is_converted, body.modules()))
    convert(body)
    try:
        yield
    finally:
        if not before:
            restore(body)


@contextmanager
def running(body: nn.Module, plans: Any = ALONE) -> Iterator[None]:
    """Give the plans of a call to the layers, also where the model does not pass keywords on. Default: run alone."""
    takers = [each for each in body.modules() if isinstance(each, (_Layer, OwnAttention, Placed, Unpooled))]
    for each in takers:
        setattr(each, ATTRIBUTE, plans)
    try:
        yield
    finally:
        for each in takers:
            vars(each).pop(ATTRIBUTE, None)


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, (_Layer, _Mixer, *_KINDS))


def _gets_no_keywords(module: nn.Module) -> bool:
    """Return whether a module is an attention that gets no keywords from its layer."""
    return type(module).__name__ in _NOT_PASSED_ON or is_known(module)


def given_to(module: nn.Module) -> Any:
    """Return the plans that a layer handed to a module inside it, or None."""
    plans = vars(module).get(ATTRIBUTE)
    return None if plans is ALONE else plans


class _Layer(nn.Module):
    """A decoder layer: hands its plans to modules inside it, also if checkpointing runs it again later."""

    stock_class: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plans = kwargs.get("plan", vars(self).get(ATTRIBUTE))
        return super().__call__(*args, **{_KEYWORD: plans} | kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plans = kwargs.pop(_KEYWORD, None)
        inside = [each for each in self.modules() if isinstance(each, _Mixer) or _gets_no_keywords(each)]
        for each in inside:
            setattr(each, ATTRIBUTE, plans)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for each in inside:
                vars(each).pop(ATTRIBUTE, None)


class _Mixer(nn.Module):
    """A mixer whose kernels run on shards."""

    stock_class: Any

    @torch.compiler.disable  # the function with our kernels is made for each call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plans = handed.plans_of(self)
        known = getattr(plans, "positions", None) is not None
        if plans is ALONE or isinstance(plans, Step):  # the mixer gets all tokens, and the cache as in one process
            return super().forward(*args, **kwargs)
        plan, cache = Plans.of(plans).one, None
        for name in _CACHES if known else ():
            if isinstance(kwargs.get(name), DealtCache):
                cache = kwargs.pop(name)
        with plan.agreement.entering("a recurrent layer", once=True):
            _check(plan.length, plan.seqlen, args, kwargs)
        if not known:
            checks.mark_attended(plans, kwargs.get("position_ids"))
        with nullcontext() if cache is None else cache.recurring(self.layer_idx) as past:
            return mixers.over_runs(self, RunExchange(plan, past=past))(*args, **kwargs)


class _Places:
    """Stands for a cache, by whose length the attention counts its tokens; here by a tensor of their places."""

    def __init__(self, offset: Tensor) -> None:
        self._offset = offset

    def get_seq_length(self, _: int) -> Tensor:
        """Return the difference between each local token's place in its document and its number."""
        return self._offset

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values as they are."""
        return key, value


class _Tempered(nn.Module):
    """An attention of Llama 4 that scales queries by their places in their documents."""

    stock_class: Any

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = kwargs.get("plan")
        if given is not None and past_key_values is None:
            plans = Plans.of(given)
            with plans.one.agreement.entering("burst_attention", once=True):
                _check(plans.one.length, plans.one.seqlen, (hidden_states,), {})
            places = plans.one.document_positions - torch.arange(plans.one.length, device="cpu")
            past_key_values = _Places(places.to(hidden_states.device))
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


# Modules whose class changes wherever they stand.
_KINDS: dict[Any, Callable[[nn.Module], bool]] = {
    _Tempered: is_tempered,
    OwnAttention: is_known,
    Placed: is_counted,
    Unpooled: lambda pooler: True,
}


def _check(length: int, seqlen: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    if hidden.shape[1] != length:
        raise ValueError(
            f"input_ids has {hidden.shape[1]} tokens, the plan gives this rank {length} of {seqlen}; shard the batch "
            "with hf.shard_batch(batch, plan)"
        )
    for name in _CACHES:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: a cache with earlier tokens is not supported; pass use_cache=False")
    checks.mask_request(kwargs.get("attention_mask"))
    checks.check_keywords(0.0, {name: kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")})
