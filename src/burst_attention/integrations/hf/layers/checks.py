"""Compare what a transformers layer asks of its attention with the plan. Each check raises ValueError."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from burst_attention.attention.batch import PADDING, Chunked, Plans, mask_refusal
from burst_attention.attention.plan import Plan
from burst_attention.plan.mask import Mask

from ..reading import Reading
from ..reading.configs import dropouts_of
from ..reading.known import names
from ..reading.models import check_tail
from ..running import RunningPlans

UNSTATED: Any = object()

_DOCUMENTS = "the plan defines the documents: make_plan(..., mask=Mask(cu_seqlens=...))"
_BIAS = "a bias on attention logits is not supported; use a model with rotary positions"
# Keywords that would change the result of an attention function, each with a remedy.
_REFUSED = {
    "head_mask": "masking heads is not supported; prune them from the model",
    **dict.fromkeys(("position_bias", "alibi"), _BIAS),
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"), _DOCUMENTS),
    "output_attentions": "attention weights are never computed as a whole; leave it out",
}
# Keywords that models pass on to the attention but that don't change its result.
# (deterministic: torch.use_deterministic_algorithms decides on the order of sums).
_BENIGN = names(
    "deterministic use_cache cache_position input_ids output_hidden_states output_router_logits num_items_in_batch "
    "return_dict shift_labels"
)


@dataclass(frozen=True)
class MaskRequest:
    """A mask other than plain causal that a model requested: mask code has no plan, so the attention refuses it."""

    causal: bool
    window: int | None  # its sliding window; None for no window
    foreign: tuple[str, ...]  # descriptions of parts that a plan's mask can't express
    chunk: int | None = None  # tokens of a chunk, if a query sees only its own
    together: torch.Tensor | None = None  # int [B, S], groups that also see each other's later tokens; -1: none
    beyond: bool = False  # whether a group's tokens see each other even if the window is shorter

    dtype: ClassVar[torch.dtype] = torch.float32  # an indexer adds its mask to the scores, unless it is of bools

    def __getitem__(self, rows: Any) -> MaskRequest:
        """Return the mask itself for all its rows: models cut a mask to the queries whose logits are wanted.

        An attention with an indexer gives it the mask of the first head.
        """
        if any(row not in (slice(None), slice(0, None)) and (n, row) != (1, 0) for n, row in enumerate(rows)):
            raise ValueError(f"attention_mask: a part of a mask ({rows}) is not supported; the plan's mask is whole")
        return self


def choose(plan: Any, window: Any, chunk: int | None = None) -> Plan:
    """Return the plan for a layer's window or chunk; ``UNSTATED`` stands for a layer that doesn't state one."""
    if chunk is not None:
        if not isinstance(plan, Mapping) or Chunked(chunk) not in plan:
            raise ValueError(f"attention_chunk_size={chunk} of the layer has no plan among the call's; parallelize")
        chunked: Plan = plan[Chunked(chunk)]
        return chunked
    if isinstance(plan, Mapping):
        ours = isinstance(plan, RunningPlans)  # derived from one plan
        if not ours:
            _check_same_layout(plan)
        wanted = None if window is UNSTATED else window
        if wanted not in plan and _reach(wanted, Plans.of(plan).one) is None:
            wanted = None
        if wanted not in plan:
            remedy = f"add {wanted}: full_plan.with_mask(Mask(window={wanted}))"
            raise ValueError(
                f"sliding_window={wanted} of the layer is not among the plans' windows {sorted(plan, key=str)}; "
                + ("set layer_types and sliding_window of the configuration to what its layers use" if ours else remedy)
            )
        plan = plan[wanted]
        if ours:  # its window may be smaller than the layer's: that of a mask by hand
            return plan
    stated = window is not UNSTATED and window != plan.mask.window
    if stated and _reach(window, plan) != _reach(plan.mask.window, plan):
        raise ValueError(
            f"sliding_window={window} of the layer is not the window={plan.mask.window} of the plan's mask; "
            f"make the plan with Mask(window={window}), or pass plan={{None: ..., {window}: ...}} if layers differ"
        )
    return plan


def _reach(window: int | None, plan: Plan) -> int | None:
    """Return the window, or None if it covers the longest document."""
    borders = plan.mask.cu_seqlens
    longest = plan.schedule.span
    if borders is not None:
        longest = max((after - before for before, after in itertools.pairwise(borders)), default=0)
    return None if window is None or window >= longest else window


def _check_same_layout(plans: Mapping[Any, Plan]) -> None:
    shapes = {(x.seqlen, x.schedule.layout.description, x.world, x.rank) for x in plans.values()}
    if len(shapes) > 1:
        raise ValueError(
            f"plan has plans with different (seqlen, layout, world, rank) {sorted(shapes)}; use plan.with_mask"
        )
    if len({replace(x.mask, causal=True, window=None) for x in plans.values()}) > 1:
        listed = ", ".join(f"{window}: {x.mask!r}" for window, x in plans.items())
        raise ValueError(f"plan has masks of different documents, prefixes or blocks ({listed}); vary windows alone")


def mask_request(attention_mask: Any) -> MaskRequest | None:
    """Return the mask code's request; None for plain causal. Raise if a plan's mask can't express it."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2 and attention_mask.all():
        return None
    if isinstance(attention_mask, MaskRequest) and attention_mask.together is not None:
        grouped = ("groups of tokens that see each other both ways (block_sequence_ids)",)
        attention_mask = replace(attention_mask, foreign=attention_mask.foreign + grouped)
    if attention_mask is None or (isinstance(attention_mask, MaskRequest) and not attention_mask.foreign):
        return attention_mask
    what = f"a mask {shown(attention_mask)}"
    if isinstance(attention_mask, MaskRequest):
        what = " and ".join(attention_mask.foreign)
    elif isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        what = PADDING
    raise mask_refusal(what)


def stated_window(sliding_window: Any, request: MaskRequest | None) -> Any:
    """Return the layer's window, from its keyword or its mask. Some models state only one of them."""
    wanted = None if request is None else request.window
    if wanted is None or wanted == sliding_window:
        return sliding_window
    if sliding_window is UNSTATED or sliding_window is None:
        return wanted
    if request is not None and not request.causal and wanted == sliding_window + 1:  # the largest distance
        return wanted
    raise ValueError(
        f"sliding_window={sliding_window} of the layer is not the window {wanted} of its mask; make them equal"
    )


def check_keywords(dropout: float, others: Mapping[str, Any], config: Any = None) -> None:
    """Refuse dropout, and every keyword that changes the result or may change it."""
    if dropout:
        rates = dropouts_of(config)
        remedy = f"the configuration has {rates}; set them to 0.0" if rates else "set it to 0.0"
        raise ValueError(f"dropout={dropout} of attention weights is not supported: {remedy}, or call eval()")
    for name, value in others.items():
        if value is None or name in _BENIGN or (name == "output_attentions" and not value):
            continue
        remedy = _REFUSED.get(name, "its effect on the attention is unknown; leave it out")
        raise ValueError(f"{name}={shown(value)} is refused: {remedy}")


def check_attend(attend: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse an attention function of the caller that doesn't take the layer's soft cap or sinks."""
    if len(options) > 1:
        taken = inspect.signature(attend).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        for name in options.keys() - taken.keys() if not open_ended else ():
            raise ValueError(
                f"{name}={shown(options[name])} of the layer: the attention {getattr(attend, '__name__', attend)!r} "
                "does not take it; use burst_attention"
            )


def check_blocks(module: torch.nn.Module, plans: Any) -> None:
    """Refuse all masks but the causal one for an indexer of blocks of keys."""
    mask = Plans.of(plans).one.mask
    if not mask.causal or mask.prefix:
        raise ValueError(
            f"the mask {mask} lets queries see later keys, which the indexer of {type(module).__name__} never chooses; "
            "use a causal mask"
        )
    if mask.cu_seqlens is not None:
        raise ValueError(
            f"the batch has packed documents, but the indexer of {type(module).__name__} counts blocks from the start "
            "of a row; give each document a row"
        )


def check_pools(module: torch.nn.Module, plan: Plan) -> None:
    """Refuse all masks but the causal one of documents for an indexer of pools of keys, and queries without a key."""
    check_tail(module)
    if plan.mask != Mask(cu_seqlens=plan.mask.cu_seqlens):
        raise ValueError(
            f"the mask {plan.mask} may cut pools of keys, but {type(module).__name__} chooses whole ones; use a causal "
            "mask of documents alone"
        )


def check_causal(plan: Plan, stated: list[bool]) -> None:
    """Refuse a layer if only one of the layer and the plan's mask is causal."""
    if [causal for causal in stated if causal != plan.mask.causal]:
        raise ValueError(
            f"is_causal={not plan.mask.causal} of the layer is not the causal={plan.mask.causal} of the plan's mask; "
            f"make the plan with Mask(causal={not plan.mask.causal})"
        )


def check_tokens(count: int, plan: Plan) -> None:
    """Refuse a batch that was not sharded."""
    if count != plan.length:
        raise ValueError(
            f"input_ids has {count} tokens, the plan gives this rank {plan.length} of {plan.seqlen}; "
            "run the model's body inside of `with hf.shards(model, batch) as shard:`"
        )


def check_lengths(query: torch.Tensor, key: torch.Tensor, plan: Plan) -> None:
    """Refuse a batch that was not sharded, and keys from a cache."""
    check_tokens(query.shape[2], plan)
    if key.shape[2] != plan.key_length:
        raise ValueError(
            f"the cache has earlier tokens ({key.shape[2]} keys for {query.shape[2]} queries), which is not supported; "
            "pass no cache, and use_cache=False"
        )


def shown(value: Any) -> str:
    """Format a value for an error message; tensors by their shape."""
    return f"{type(value).__name__} {list(value.shape)}" if hasattr(value, "shape") else repr(value)


def experts_of(reading: Reading) -> list[Any]:
    """Return the modules of experts that compute as their configuration says."""
    return [x for x in (part.module for part in reading) if {"has_gate", "is_transposed", "config"} <= vars(x).keys()]


def check_experts(experts: Sequence[Any]) -> None:
    """Refuse grouped products of fp64 weights, which torch does not have."""
    for part in experts:
        how = part.config._experts_implementation
        if how == "grouped_mm" and any(x is not None and x.dtype == torch.float64 for x in part._parameters.values()):
            raise ValueError(
                f"dtype=torch.float64 of {type(part).__name__}: experts_implementation={how!r} has no fp64; load the "
                "model with experts_implementation='eager', or call model.set_experts_implementation('eager')"
            )
