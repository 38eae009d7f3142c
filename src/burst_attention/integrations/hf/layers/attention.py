"""The attention ``burst`` that transformers calls in every layer, and its checks of the layer's request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from burst_attention.attention.batch import PADDING, PlanArgument, Plans
from burst_attention.attention.call import DTYPES, burst_attention
from burst_attention.attention.chosen import chosen_attention
from burst_attention.attention.hardware import CallShape
from burst_attention.attention.plan import Plan

from ..reading.known import NAME
from ..running import ALONE, RUNNING, RunningPlans
from . import checks
from .attention_chunks import InHeadChunks, attend_in_chunks
from .by_hand import ByHand, check_running, mark_attended
from .checks import UNSTATED, MaskRequest
from .dealt import Step
from .indexed import Choice, IndexedAttention, attend_to_latents, to_chosen_rows


def register() -> None:
    """Register ``attn_implementation="burst"`` with transformers. A second call changes nothing.

    Raises:
        ValueError: another attention is registered under that name.
    """
    registered = ALL_ATTENTION_FUNCTIONS.get(NAME)
    if registered is None:
        AttentionInterface.register(NAME, Attention())
    elif not isinstance(registered, Attention):
        raise ValueError(f"the attention name {NAME!r} is taken by {registered!r}; don't register that one")
    # Without a mask function transformers silently drops a padding mask.
    if NAME not in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(NAME, _request_mask)


class Attention:
    """The function that every layer calls."""

    def __init__(self, names: Sequence[str] = (NAME,), *, warns: bool = True) -> None:
        self._by_hand = ByHand(names, warns=warns)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        plan: PlanArgument | Step | None = None,
        attend: Callable[..., torch.Tensor] = burst_attention,
        position_ids: torch.Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: Any = UNSTATED,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        block_indices: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Check the layer's arguments, then compute its attention [B, S_local, Hq, Dv]; no weights.

        Args:
            query: [B, Hq, S_local, D]; key, value: [B, Hkv, S_local, D or Dv], or the latent and the rotary part of an
                :class:`IndexedAttention` layer; s_aux: the layer's sinks [Hq].
            plan: those of the running call, as layers pass them on. Any others are checked as plans by hand.
            indices: [B, S_local, count], the keys that the layer's indexer has chosen; block_indices: [B, Hkv, S_local,
                count], those in the blocks that it has chosen (:mod:`.indexed`).
            attend: computes the attention after the checks; takes the arguments of :func:`burst_attention`. One that
                has a true ``of_some_tokens`` gets the projections of some tokens, without checks.
        """
        if plan is None and RUNNING.plans is not ALONE:  # the layer passed no keywords on
            plan = RUNNING.plans
        options: dict[str, Any] = {"scale": scaling}  # an ``attend`` of the caller may not know the others
        options |= {} if softcap is None else {"softcap": softcap}
        options |= {} if s_aux is None else {"sinks": s_aux}
        indices = block_indices if indices is None else indices
        if isinstance(attention_mask, Choice):
            indices, attention_mask = attention_mask.indices, None
        if indices is not None:
            options, attend = options | {"indices": indices}, _to_chosen if attend is burst_attention else attend
        weight = None
        if isinstance(module, IndexedAttention) and module.keeps_latent():
            found = module.to_attend(key) if attend is _to_chosen else None
            if found is None:
                key, value = module.expanded(key, value)
            else:
                key, weight = found
                attend = functools.partial(attend_to_latents, weight, attend=to_chosen_rows)
        if getattr(attend, "of_some_tokens", False):  # the call for all tokens was checked
            return attend(*_autocast(query, key, value), plan, **options).transpose(1, 2), None
        if isinstance(plan, Step):
            checks.check_keywords(dropout, others)
            attend = functools.partial(plan.of_layer, module, attention_mask, sliding_window)
            if weight is not None:
                attend = functools.partial(attend_to_latents, weight, attend=attend)
            return attend(query, key, value, plan, **options).transpose(1, 2).contiguous(), None
        with Plans.of(plan).one.agreement.entering("burst_attention", once=True):
            checks.check_keywords(dropout, others, getattr(module, "config", None))
            checks.check_attend(attend, options)
            if block_indices is not None and attend is _to_chosen:
                checks.check_blocks(module, plan)
            request = checks.mask_request(attention_mask)
            chunk = None if request is None else request.chunk
            chosen = checks.choose(plan, checks.stated_window(sliding_window, request), chunk)
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            stated = [causal] if request is None else [causal, request.causal]
        with chosen.agreement.entering("burst_attention", once=True):  # other layers may have other plans
            ours = plan if isinstance(plan, RunningPlans) else None
            checks.check_causal(chosen, stated[1:] if ours is not None and ours.masked else stated)
            checks.check_lengths(query, key, chosen)
            if ours is None:
                self._by_hand.check(module, query, position_ids, chosen)
            else:
                ours.check_positions(position_ids)
            query, key, value = _autocast(query, key, value)
        if ours is None:
            mark_attended(plan, position_ids)
        if isinstance(module, InHeadChunks) and (weight is not None or attend in (burst_attention, _to_chosen)):
            attend = functools.partial(attend_in_chunks, attend, module.head_chunks, weight)
        out = attend(query, key, value, chosen, **options)
        return out.transpose(1, 2).contiguous(), None


def _to_chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    indices: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention to the keys that a layer's indexer has chosen."""
    return chosen_attention(q, k, v, indices, plan, scale=scale, sinks=sinks)[0]


def _autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast as autocast does for torch's attention. Rotary angles are fp32, so q and k may differ in dtype from v."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return [x if dtype is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def _request_mask(
    *, mask_function: Callable, attention_mask: torch.Tensor | None = None, **_: Any
) -> MaskRequest | None:
    """Describe the mask instead of building it; transformers calls this. None means plain causal."""
    if RUNNING.plans is None:  # hf.parallelize has checked the model that runs
        check_running()
    causal, window, chunk, foreign = False, None, None, []
    together, beyond, both, parts = None, False, False, list(_mask_parts(mask_function))
    for kind, part in parts:  # an intersection may hold one union, of such parts and of groups of tokens
        if kind == "or_masks" and together is None and not both:
            joined = _closure(part)["mask_functions"]
            others, added = list(_mask_parts(joined[0])), joined[-1]
            parts += others  # taken up by this same loop
            windows = [_closure(each)["sliding_window"] for name, each in others if name == "sliding_window_overlay"]
            beyond, both = bool(windows), len(joined) == 2 and _adds_later_keys(added, *windows)
            if len(joined) == 2 and next(_mask_parts(added))[0] == "blockwise_overlay":
                together = _closure(added)["block_sequence_ids"]
            elif not both:
                foreign.append("the mask or_masks")
        elif kind == "causal_mask_function":
            causal = True
        elif kind == "sliding_window_overlay":
            window = _closure(part)["sliding_window"]
        elif kind == "sliding_window_bidirectional_overlay":
            window = _closure(part)["sliding_window"] + 1  # it names the largest distance
        elif kind == "chunked_overlay" and (attention_mask is None or not _closure(part)["left_padding"].any()):
            chunk = _closure(part)["chunk_size"]
        # transformers guesses documents from jumps in position ids. A shard's positions jump anyway, and the plan
        # defines the documents, so ignore the guess.
        elif kind not in ("packed_sequence_mask_function", "bidirectional_mask_function"):
            foreign.append(f"the mask {kind}")
    if attention_mask is not None and not attention_mask.all():
        foreign.append(PADDING)
    causal = causal and not both
    if causal and window is None and chunk is None and together is None and not foreign:
        return None
    return MaskRequest(causal, window, tuple(foreign), chunk, together, beyond)


def _adds_later_keys(overlay: Any, window: int | None = None) -> bool:
    """Return whether an overlay is Gemma 3's that makes a causal mask bidirectional, in the same window."""
    if not getattr(overlay, "__module__", "").startswith("transformers.models."):
        return False
    if window is None:
        return str(overlay.__qualname__).endswith("TextModel.forward.<locals>.<lambda>") and bool(overlay(0, 0, 0, 1))
    within = overlay.__qualname__ == "_bidirectional_window_overlay.<locals>.inner_mask"
    return within and bool(_closure(overlay)["sliding_window"] == window)


def _mask_parts(function: Callable) -> Iterator[tuple[str, Callable]]:
    """Yield (kind, function) for each part of an intersection of masks; any other combination is one part."""
    kind = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) == "transformers.masking_utils":
        kind = kind.split(".")[0]
    if kind == "and_masks":
        for part in _closure(function)["mask_functions"]:
            yield from _mask_parts(part)
    elif kind == "remap_positions_for_packed_sequence":
        yield from _mask_parts(_closure(function)["mask_function"])
    else:
        yield kind, function


def _closure(function: Any) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def call_shape(model: Any, chunks: int = 1, ranks: int = 1) -> CallShape:
    """Return the shape of a layer's calls, one for each chunk of heads, whose heads are cut over ``ranks``."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    try:
        names = ("num_attention_heads", "hidden_size", "head_dim", "num_key_value_heads")
        q_heads, width, head_dim, kv_heads = (getattr(text, name, None) for name in names)
    except RuntimeError:  # transformers refuses to name one value if layers differ
        return CallShape()
    if not isinstance(q_heads, int) or not isinstance(width, int) or q_heads < 1:
        return CallShape()
    kv_heads, head_dim = kv_heads or q_heads, head_dim or width // q_heads
    if not isinstance(kv_heads, int) or not isinstance(head_dim, int) or q_heads % kv_heads or head_dim < 1:
        return CallShape()
    dtype = model.dtype if getattr(model, "dtype", None) in DTYPES else None
    q_heads, kv_heads = (max(1, heads // (chunks * ranks)) for heads in (q_heads, kv_heads))
    return CallShape(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, attention_chunks=chunks)
