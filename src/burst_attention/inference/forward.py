"""Run a parallelized model with a cache that is dealt over the ranks: prefill on shards, decode on every rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from burst_attention.attention.batch import Plans, digest_of, mask_of
from burst_attention.integrations.hf.call import arguments, heads, stub_forward, text_only, vision
from burst_attention.integrations.hf.call.generate import SAME, check_clocks, named, settings_of, with_settings
from burst_attention.integrations.hf.call.rows import rows_of
from burst_attention.integrations.hf.layers import converted
from burst_attention.integrations.hf.layers.checks import shown
from burst_attention.integrations.hf.layers.dealt import ON_ONE_RANK, Step, passed
from burst_attention.integrations.hf.reading import Kind, forwards, known, models, read
from burst_attention.integrations.hf.reading.parts import text_of
from burst_attention.integrations.hf.running import RunningPlans, running
from burst_attention.integrations.hf.settings import weights_of

from .greedy import NextToken, only, takes_argmax
from .sharing import check_sharing

# Up to this many tokens, every rank computes all of them. More are computed on shards.
SHORT = 64
_TAKEN = ("input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep")
_SILENT = ("return_dict", "cache_position")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_OF_MODES = ("num_beams", "prompt_lookup_num_tokens", "penalty_alpha")
_OTHER_MODE = f"a cache over ranks serves greedy search and sampling; leave it out, or {ON_ONE_RANK}"


@dataclass(frozen=True, eq=False)
class Fit:
    """A cache, and what its tokens need of the model. Between the tokens of one ``generate`` it does not change."""

    cache: Any
    body: Any
    head: Any  # its linear layer
    limits: tuple[int | None, int | None]  # tokens of its vocabulary, positions
    embedding: Any = None  # of a language model inside of another model, which gets embeddings
    axes: int | None = None  # of its positions, all equal with text


@dataclass(eq=False, slots=True)  # made for each token; a frozen one takes longer
class _CachedCall:
    """A call that all ranks have agreed on."""

    fit: Fit
    cache: Any
    ids: Tensor  # [B, n], the new tokens
    mask: Tensor | None  # [B, S], zeros for padding in front; None without padding
    padding: Tensor  # int64 [B]: the columns in front of each row's tokens, on the CPU
    places: Tensor  # int64 [B, n]: the new tokens' positions, negative for padding
    past: int  # columns in the cache
    keep: int  # logits of this many last tokens
    argmax: bool  # whether only their argmax matters


@contextmanager
def generating(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], argument: str) -> Iterator[dict[str, Any]]:
    """Agree on a call of ``generate`` with the other ranks; yield its keywords, as transformers names them.

    ``argument``: the keyword of the cache. Inside, only the first token checks the model.
    """
    state, cache = model._burst, kwargs[argument]
    with state.meeting.entering("generate"):
        if known.CACHE not in forwards.parameters_of(model.stock_class.forward):
            raise ValueError(f"{argument}: {type(model).__name__} takes no cache; call generate without one")
        twice = [name for name in known.CACHES if name != argument and kwargs.get(name) is not None]
        if twice:
            raise ValueError(f"{argument} and {twice[0]} are both caches; pass one of them")
        kwargs = {name: value for name, value in kwargs.items() if name not in known.CACHES} | {known.CACHE: cache}
        sees = vision.language_model_of(model) is not None
        kwargs = text_only.check_arguments(model, kwargs) if sees else kwargs
        values = named(args, kwargs)
        limits = _limits(model)
        ids = _prompt(limits, values.get("input_ids") if values.get("inputs") is None else values["inputs"], values)
        if sees:
            text_only.check_ids(model, ids)
        settings, fields = settings_of(model, values)
        _check_mode(settings, values)
        _check_positions_of(settings, limits[1], ids.shape[1])
        fields |= {"the digest of input_ids": digest_of(ids), **cache.describe()}
        if state.shared is not None:  # which exchanges a step has depends on it
            argmax = takes_argmax(model, settings, values)
            fields["whether a step gathers logits"] = not argmax
            kwargs |= {"logits_to_keep": NextToken(1)} if argmax else {}
        fields, details = with_settings(model, fields)
    state.meeting.agree("generate", fields, details=details, **SAME)
    state.passed = argument
    try:
        with text_only.positions_of_text(model) if sees else nullcontext():
            yield kwargs
    finally:
        state.passed = state.fit = None


def forward(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return logits [B, logits_to_keep, V] of new tokens after those of a cache, equal bits on all ranks.

    Where ``generate`` takes their argmax alone and ranks share the head, they are -inf but at the argmax.
    """
    call, logits = _agreed(model, args, kwargs), torch.empty(0)
    count, shared = call.ids.shape[1], model._burst.shared
    before = 0 if shared is None else shared.transport.sent
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        done = _prefill(model, call, count - max(call.keep, 2 if call.cache.states else 1))
        for start, stop in itertools.pairwise(_stops(done, count)):
            logits = _step(model, call, start, stop)
    call.cache.weights_sent += 0 if shared is None else shared.transport.sent - before
    out = CausalLMOutputWithPast(logits=logits, **{known.CACHE: call.cache})
    return out if kwargs.get("return_dict", True) else out.to_tuple()


def _agreed(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _CachedCall:
    meeting = model._burst.meeting
    if meeting.alone:
        return _checked(model, args, kwargs)
    with meeting.entering("the model with a cache"):
        call = _checked(model, args, kwargs)
        fields = {
            "the digest of input_ids": digest_of(call.ids),
            "the digest of attention_mask": None if call.mask is None else digest_of(call.padding),
            "logits_to_keep": "the next token" if call.argmax else call.keep,
            **call.cache.describe(),
        }
        if (shared := model._burst.shared) is not None:  # which exchanges a call has depends on both
            fields["torch.is_inference_mode_enabled()"] = torch.is_inference_mode_enabled()
            if call.ids.shape[1] > 1:
                fields["rows of shared weights in place"] = shared.look_in_place()
        details = {}
        if model._burst.passed is None:  # else generate has compared them
            own = model._burst.settings
            fields, details = {**fields, **own.fields()}, own.details()
    meeting.agree("the model with a cache", fields, details=details, **SAME)
    call.cache.open_lines()
    return call


def _checked(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _CachedCall:
    state = model._burst
    values = arguments.named(model, args, kwargs)
    keyword: Any = passed(values)
    cache, argument = values.pop(keyword), state.passed or keyword  # generate may rename it
    fit = state.fit
    sees = vision.language_model_of(model) is not None if fit is None else fit.embedding is not None
    if sees:
        values = text_only.check_arguments(model, values)
    for name, value in values.items():
        if name not in (*_TAKEN, *_SILENT) and not arguments.has_no_effect(model, name, value):
            raise ValueError(f"{name}={shown(value)} is refused: its effect with a cache over ranks is unknown")
    if values.get("use_cache") is False:
        raise ValueError(f"use_cache=False, but {argument} is a cache; leave one of them out")
    if fit is None or fit.cache is not cache:
        fit = _fit(model, cache, argument)
        state.fit = None if state.passed is None else fit
    past = cache.get_seq_length()
    ids = _prompt(fit.limits, values.get("input_ids"), values, past)
    if sees and state.passed is None:  # else generate has checked its prompt
        text_only.check_ids(model, ids)
    mask, (rows, count) = _padding_mask(values, past, ids), ids.shape
    if sees and mask is not None:
        raise ValueError(
            f"attention_mask={shown(mask)} has padding in front of rows, which {type(model).__name__}, a "
            "vision-language model, has no cache over ranks for; generate with rows of equal lengths, or each row alone"
        )
    padding = torch.zeros(rows, dtype=torch.int64, device="cpu") if mask is None else (mask == 0).sum(1).cpu()
    if count == 1 and mask is None:
        places = torch.full((rows, 1), past, device=ids.device)
    else:
        places = torch.arange(past, past + count, device="cpu").expand(rows, -1)
        places = (places if mask is None else places - padding[:, None]).to(ids.device, non_blocking=True)
    cache.check_batch(padding, argument)
    cache.move(ids.device)
    _check_positions(places, values.get("position_ids"))
    argmax = isinstance(values.get("logits_to_keep"), NextToken)
    # generate reads the last logits alone, and passes no number to a model whose forward names none.
    keep = _kept(values, count) if state.passed is None or "logits_to_keep" in values else 1
    return _CachedCall(fit, cache, ids, mask, padding, places, past, keep, argmax)


def _fit(model: Any, cache: Any, argument: str) -> Fit:
    """Check that the model can fill the cache: it may need no more than its keys, values and states."""
    state, kind, body = model._burst, type(model).__name__, text_of(model)
    if torch.is_autocast_enabled(model.device.type):
        raise ValueError("autocast is on: a cache over ranks needs one dtype; load the model with dtype=torch.bfloat16")
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() before it fills a cache")
    state.check_parts(model)
    if state.form is None or not forwards.has_stock_forward(model):
        raise ValueError(f"{argument}: {kind} has a custom head or forward, which has no cache over ranks")
    if state.memory.attention_chunks > 1:
        raise ValueError(f"attention_chunks={state.memory.attention_chunks} of hf.Memory: caches need all heads; use 1")
    inner, reading = vision.language_model_of(model), read(model)
    reading = reading if inner is None else reading.text
    converted.check_cached(reading.text, argument)
    check_sharing(reading.text, cache.sources, argument)
    if models.embeds_positions(reading) or not (models.is_rotary(reading) or reading.text.of(Kind.MIXER)):
        raise ValueError(
            f"{argument}: {kind} has learned positions, or none that are rotary, which no cache has; leave it out"
        )
    embedding, axes = None, None
    if inner is not None:
        embedding, axes = model.get_input_embeddings(), text_only.axes_of_positions(model)
    cache.check(
        model,
        state.plans.base,
        functools.partial(_samples, model),
        functools.partial(_rows, model),
        argument=argument,
        turn=state.passed is not None,
    )
    return Fit(cache, body, heads.find_linear(model), _limits(model), embedding, axes)


def _samples(model: Any) -> dict[str, str]:
    shared = model._burst.shared
    return weights_of(model) | ({} if shared is None else shared.samples())


def _rows(model: Any) -> dict[str, str]:
    shared = model._burst.shared
    return {} if shared is None else shared.rows()


def _limits(model: Any) -> tuple[int | None, int | None]:
    """Return how many tokens the model's vocabulary has, and how many positions it can have."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return getattr(model.get_input_embeddings(), "num_embeddings", None), most


def _prefill(model: Any, call: _CachedCall, count: int) -> int:
    """Fill the cache with the first ``count`` tokens on shards, if they are many; return how many it took."""
    world, cache = model._burst.plans.base.world, call.cache
    # Padding moves behind a prompt's tokens. Rows that a later turn continues have it at different places inside.
    if count < max(SHORT, world) or (call.past and (call.mask is not None or cache.strided)):
        return 0
    mask = None if call.mask is None else call.mask[:, :count]
    ids = rows_of({"input_ids": call.ids[:, :count], "attention_mask": mask}, ranks=world).input_ids
    ids = ids.to(call.ids.device, non_blocking=True)
    pieces = 1 if cache.prefill_chunk is None else -(-count // cache.prefill_chunk)
    for n in range(pieces):  # of equal lengths, so that none has fewer tokens than ranks
        _prefill_piece(model, call, ids, count * n // pieces, count * (n + 1) // pieces)
    return count


def _prefill_piece(model: Any, call: _CachedCall, ids: Tensor, start: int, stop: int) -> None:
    """Run the body on this rank's shard of the tokens ``ids[:, start:stop]``, for its keys and values alone."""
    cache, model_plans, count = call.cache, model._burst.plans, stop - start
    if call.past + start:  # the tokens follow those of the cache; one plan for each reach of its layers
        first, held = cache.get_seq_length(), cache.stretches()
        masks = {reach: mask_of(reach, first + count, None) for reach in held}
        plans = Plans({x: model_plans.base.following(count, first=first, mask=masks[x], held=held[x]) for x in held})
    else:
        plans = model_plans.get(stop, None)
    positions = plans.one.positions.to(ids.device, non_blocking=True).repeat(len(ids), 1)
    shared = model._burst.shared
    weights = nullcontext() if shared is None else shared.prefilling()
    with weights, cache.prefilling(plans.one, call.padding, call.past + ids.shape[1]):
        _run(call.fit, plans.one.shard(ids[:, start:stop], 1), positions, RunningPlans(plans, positions=positions))


def _stops(done: int, count: int) -> list[int]:
    """Return where steps of the tokens [done, count) start and stop; the last holds all whose logits are kept."""
    last = max(done, count - SHORT)
    # transformers' mixers compute a step of one token by another formula, without limits of time steps, so avoid it.
    last -= (last - done) % SHORT == 1
    return [*range(done, last, SHORT), last, count]


def _step(model: Any, call: _CachedCall, start: int, stop: int) -> Tensor:
    """Run the body on the same tokens on every rank; return the logits of the last ones."""
    positions = call.places[:, start:stop]
    positions = positions if call.mask is None else positions.clamp(min=0)
    with call.cache.stepping(stop - start, call.padding) as step:
        hidden = _run(call.fit, call.ids[:, start:stop], positions, step)[0]
    linear, shared = call.fit.head, model._burst.shared  # under FSDP2 its weight is whole only now
    if shared is not None and shared.has(linear):
        kept = heads.for_head(hidden[:, -call.keep :], linear.weight)
        if call.argmax:
            return only(shared.argmax(linear, kept, model._burst.form.apply_), linear.weight.shape[0], kept.dtype)
        return model._burst.form.apply_(shared.product(linear, kept))
    head = heads.Head.of(linear.weight, linear.bias, model._burst.form)
    return head.logits(heads.for_head(hidden[:, -call.keep :], head.weight))


def _run(fit: Fit, ids: Tensor, positions: Tensor, plan: RunningPlans | Step) -> Any:
    positions = positions if fit.axes is None else positions.expand(fit.axes, *positions.shape)
    values = {"position_ids": positions, "plan": plan, known.CACHE: fit.cache, "use_cache": True}
    with running(plan):
        values |= {"input_ids": ids} if fit.embedding is None else {"inputs_embeds": fit.embedding(ids)}
        return stub_forward.run_body(fit.body, **values)


def _prompt(limits: tuple[int | None, int | None], ids: Any, values: Mapping[str, Any], past: int = 0) -> Tensor:
    """Return token ids [B, n] after their checks. They follow ``past`` columns of the cache."""
    if values.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds: embeddings computed outside of the model are not supported; pass input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise TypeError(f"input_ids={shown(ids)} must be a tensor of token ids [batch, sequence]")
    if 0 in ids.shape:
        raise ValueError(f"input_ids has shape {list(ids.shape)}: the prompt is empty; pass at least one token")
    (vocab, most), length = limits, past + ids.shape[1]
    low, high = (int(x) for x in ids.aminmax())
    if vocab is not None and (low < 0 or high >= vocab):
        raise ValueError(f"input_ids holds {low if low < 0 else high}, outside of the model's vocabulary of {vocab}")
    if most is not None and length > most:
        raise ValueError(
            f"input_ids: {length} tokens, with those of the cache, are more than the model's "
            f"max_position_embeddings={most}; shorten the prompt, or load the model with more positions"
        )
    return ids


def _check_positions_of(settings: Any, most: int | None, prompt: int) -> None:
    """Refuse to generate beyond the model's positions. The last token needs none, because nothing follows it."""
    name = "max_length" if settings.max_new_tokens is None else "max_new_tokens"
    limit, before = getattr(settings, name), prompt if name == "max_new_tokens" else 0
    if most is not None and limit is not None and before + limit - 1 > most:
        raise ValueError(
            f"{name}={limit}, after a prompt of {prompt} tokens, needs more than the model's "
            f"max_position_embeddings={most}; pass at most {name}={most - before + 1}, or load the model with more "
            "positions"
        )


def _kept(values: Mapping[str, Any], count: int) -> int:
    keep = values.get("logits_to_keep", 0)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"logits_to_keep={shown(keep)} is not supported with a cache over ranks; pass a number")
    keep = min(keep or count, count)
    if keep > SHORT:
        raise ValueError(f"logits_to_keep={keep}: a cache over ranks gives at most {SHORT}; pass logits_to_keep=1")
    return keep


def _padding_mask(values: Mapping[str, Any], past: int, ids: Tensor) -> Tensor | None:
    """Return the mask of all columns so far, if it has padding."""
    mask, whole = values.get("attention_mask"), (len(ids), past + ids.shape[1])
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != whole:
        raise ValueError(f"attention_mask={shown(mask)} must cover the cache and the new tokens: {list(whole)}")
    if bool(mask.all()):
        return None
    if bool((mask[:, 1:].bool() < mask[:, :-1].bool()).any()) or not bool(mask[:, -1].all()):
        raise ValueError("attention_mask has zeros behind or between tokens; pad in front of each row's tokens only")
    return mask


def _check_positions(right: Tensor, positions: Any) -> None:
    if positions is None:
        return
    if isinstance(positions, Tensor) and positions.dtype == right.dtype and torch.equal(positions, right):
        return  # one operator, for each token
    # [B, n], or of axes in time and space [axes, B, n], which are equal without images.
    fits = isinstance(positions, Tensor) and positions.dim() in (2, 3) and positions.shape[-1] == right.shape[1]
    if not fits or not bool(((positions == right) | (right < 0)).all()):
        raise ValueError(f"position_ids={shown(positions)} differ from the tokens' places; leave position_ids out")


def _check_mode(settings: Any, values: Mapping[str, Any]) -> None:
    """Refuse ways to generate that reorder or roll back the cache."""
    for name in ("assistant_model", "custom_generate"):
        if (value := values.get(name)) is not None:
            what = repr(value) if isinstance(value, str) else type(value).__name__
            raise ValueError(f"{name}={what} is refused: {_OTHER_MODE}")
    if settings.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation={settings.cache_implementation!r} is refused: a cache is given; omit it"
        )
    check_clocks(settings, values)
    if settings.prefill_chunk_size is not None:
        raise ValueError(
            f"prefill_chunk_size={settings.prefill_chunk_size} is refused: the cache decides; make "
            f"ShardedCache(model.config, prefill_chunk={settings.prefill_chunk_size})"
        )
    mode = settings.get_generation_mode(None)
    if mode not in _MODES:
        named = {name: getattr(settings, name, None) for name in _OF_MODES}
        text = ", ".join(f"{name}={value}" for name, value in named.items() if value not in (None, 1))
        raise ValueError(f"{text or mode.value} ({mode.value}) is refused: {_OTHER_MODE}")
