"""Read and check the arguments of one call of a parallelized model, before the ranks agree on them."""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from burst_attention.plan.mask import Mask

from ..classes import stock_class
from ..layers.checks import shown
from ..reading import Reading, forwards
from ..reading.known import CACHES, names
from ..reading.parts import text_of
from . import vision
from .rows import IGNORED, PACKING, BatchRows

BATCH = ("input_ids", "inputs_embeds", "labels", "shift_labels", "attention_mask", "position_ids", *PACKING)
TOKENS = ("token_type_ids",)  # other arguments of each token
_ANSWERED = names(
    "num_items_in_batch logits logits_to_keep fused_lm_head output_hidden_states output_router_logits return_dict"
)
_IGNORED = ("use_cache", "cache_position")  # without an effect on the output of a parallelized model
_REMEDY_OF_TABLE = {
    "input_ids": "resize the model's embeddings",
    "position_ids": "shorten or pack the documents, or load a model with more positions",
    "token_type_ids": "pass types that the model has",
}
# The names of tables, by the input that indexes them.
_TABLES = {
    "position_ids": ("embed_positions", "position_embedding", "position_embeddings", "positions_embed", "wpe"),
    "token_type_ids": ("token_type_embedding", "token_type_embeddings"),
}
_TOWERS = ("vision", "visual", "image", "audio")

_REMEDIES = {
    **dict.fromkeys(
        CACHES,
        "a cache holds whole sequences, as do the keys and values of PEFT's prefix tuning. To generate, call "
        "model.generate, which runs on each rank separately; to train, use LoRA, prompt tuning or P-tuning",
    ),
    "output_attentions": "attention weights are never computed as a whole; leave it out",
    "plan": "the model makes its plans; inside of hf.shards call its body, such as model.model(**shard)",
    "is_causal": "the model's configuration decides, when it is parallelized; set is_causal there, and leave it out",
}


def named(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments that are not None, by name."""
    if not args:
        return {name: value for name, value in kwargs.items() if value is not None}
    kind = type(model).__name__
    places = [*forwards.parameters_of(model.stock_class.forward)]
    if len(args) > len(places):
        raise TypeError(f"{kind} takes at most {len(places)} positional arguments, got {len(args)}; pass them by name")
    placed = dict(zip(places, args, strict=False))
    twice = sorted(placed.keys() & kwargs.keys())
    if twice:
        raise TypeError(f"{kind} got {twice[0]} both by position and by name; pass it once")
    return {name: value for name, value in (placed | dict(kwargs)).items() if value is not None}


def runs_its_own(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether a causal model's forward must run because it or its loss is not transformers'."""
    if model._burst.form is None:
        return False
    labeled = any(inputs.get(name) is not None for name in ("labels", "shift_labels"))
    if forwards.has_stock_forward(model) and (not labeled or forwards.has_stock_loss(model)):
        return False
    wrong = "fused_lm_head" if inputs.get("fused_lm_head") else "logits_to_keep"
    if inputs.get(wrong) and (labeled or wrong == "fused_lm_head"):
        raise ValueError(
            f"{wrong}={shown(inputs[wrong])} is refused: {type(model).__name__} has a custom forward or loss; omit it"
        )
    return True


def check_keywords(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse arguments that a parallelized model does not support."""
    taken = (*BATCH, *_ANSWERED, *_IGNORED, *(vision.whole_arguments(model) or TOKENS))
    for name, value in inputs.items():
        if name in taken or has_no_effect(model, name, value):
            continue
        close = "".join(f"did you mean {each}? Otherwise " for each in difflib.get_close_matches(name, taken, 1))
        remedy = _REMEDIES.get(name, f"{close}its effect over ranks is unknown; leave it out")
        raise ValueError(f"{name}={shown(value)} is refused: {remedy}")
    if getattr(model.config, "output_attentions", False) and inputs.get("output_attentions") is not False:
        raise ValueError(f"output_attentions=True of the configuration is refused: {_REMEDIES['output_attentions']}")
    if vision.language_model_of(model) is not None:
        if inputs.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds are refused: a vision-language model merges images in; pass input_ids")
        if wanted_states(model, inputs) is not False:
            raise ValueError(
                f"output_hidden_states is refused: the shards of {type(model).__name__} are inside of it; leave it out"
            )
    _check_logits(model, inputs)


def has_no_effect(model: Any, name: str, value: Any) -> bool:
    """Return whether an argument asks for what the model does anyway, so that it can be dropped."""
    if name == "is_causal":
        return bool(value == model._burst.plans.causal)
    if forwards.drops(model, name):
        return True
    return forwards.is_default(name, value, stock_class(model).forward, stock_class(text_of(model)).forward)


def _check_logits(model: Any, inputs: Mapping[str, Any]) -> None:
    if inputs.get("logits", "gather") != "gather":
        raise ValueError(f"logits={shown(inputs['logits'])} is unknown; pass logits='gather', or leave it out")
    keep = inputs.get("logits_to_keep", 0)
    for name in ("logits_to_keep", "fused_lm_head"):
        if inputs.get(name) and inputs.get("logits"):
            raise ValueError(f"{name}={shown(inputs[name])} and logits='gather' are both given; pass one of them")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"logits_to_keep={shown(keep)} is not supported; pass a number of last positions, or 0")
    for name in ("logits_to_keep", "fused_lm_head"):
        if inputs.get(name) and model._burst.form is None:
            raise ValueError(
                f"{name}={inputs[name]} is refused: {type(model).__name__} runs its head on whole rows; leave it out"
            )


def of_tokens(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return other values of each token [B, S], by name, that the body needs."""
    if vision.language_model_of(model) is not None:
        return {}
    values = {name: inputs[name] for name in TOKENS if name in inputs}
    body, ids = text_of(model), inputs.get("input_ids")
    count = None if "position_ids" in inputs else _counter_of_positions(body)
    if count is None:
        return values
    if "inputs_embeds" in inputs:
        raise ValueError(
            f"inputs_embeds without position_ids are refused: {type(model).__name__} counts token ids; pass both"
        )
    if not isinstance(ids, torch.Tensor):
        return values
    positions = count(ids, body.embeddings.padding_idx)
    if packed := [name for name in PACKING if name in inputs]:
        raise ValueError(
            f"{packed[0]} packs documents, but {type(model).__name__} counts positions over the whole row; pass "
            "position_ids that restart at 0 where each document begins"
        )
    return values | {"position_ids": positions}


def by_hand(model: Any, batch: Any, mask: Any) -> dict[str, Any]:
    """Return the entries of a batch that ``hf.shards`` can cut, by name; refuse others, and other models."""
    kind, state = type(model).__name__, model._burst
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is a {type(batch).__name__}; pass a mapping with input_ids")
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(f"mask={mask!r} must be a burst_attention.Mask, or None")
    if state.left is not None:
        raise ValueError(f"model is left as it is on one rank, because {state.left}; call it without hf.shards")
    if vision.language_model_of(model) is not None:
        raise ValueError(f"model is a {kind}, whose language model gets its tokens from the model; call the model")
    if state.meeting.inner is not None:
        raise ValueError(f"model is a {kind} with a tensor-parallel axis, which hf.shards does not have yet; call it")
    inputs = {name: value for name, value in batch.items() if value is not None}
    documents = [name for name in inputs if name in ("position_ids", *PACKING)]
    for name, value in inputs.items():
        if name not in (*BATCH, *TOKENS):
            cut = isinstance(value, torch.Tensor) and value.dim() > 1
            remedy = f"leave it out, and use shard.plan.shard({name}, 1)" if cut else "leave it out"
            raise ValueError(f"batch has {name}={shown(value)}, which hf.shards can't cut; {remedy}")
    if mask is not None and mask.causal != state.plans.causal:
        raise ValueError(f"mask={mask!r}: the attention of {kind} is causal={state.plans.causal}; pass that")
    if mask is not None and documents:
        raise ValueError(f"{documents[0]} and mask={mask!r} both describe documents; leave one of them out")
    if mask is not None and mask.cu_seqlens is not None and _counter_of_positions(text_of(model)) is not None:
        raise ValueError(
            f"mask={mask!r} has documents, but {kind} counts positions over the whole row; pass position_ids that "
            "restart at 0 where each document begins, and no mask"
        )
    real = inputs.get("attention_mask")
    if mask is not None and isinstance(real, torch.Tensor) and not real.all():
        raise ValueError(f"attention_mask has padding, which mask={mask!r} does not; make the padding a document of it")
    if state.form is None and "labels" in inputs:
        raise ValueError(f"labels: {kind} predicts no next token; cut them by shard.plan.shard(labels, 1)")
    return inputs


def check_weights(model: Any) -> None:
    """Refuse a call of a model whose weights serve generation alone."""
    if model._burst.shared is not None:
        raise ValueError(
            f"shard_weights has shared the weights of {type(model).__name__} over ranks, for generation with a "
            "ShardedCache alone; pass cache=ShardedCache(model.config), or load the model again"
        )


def check_labels(model: Any, inputs: Mapping[str, Any], rows: BatchRows) -> None:
    """Refuse a call that asks for no result."""
    wanted = inputs.get("logits_to_keep") or inputs.get("logits") or wanted_states(model, inputs) is not False
    if rows.targets is None and not wanted and model._burst.form is not None and forwards.has_stock_forward(model):
        raise ValueError(
            "labels are missing: a parallelized model returns its loss, and logits on request; pass labels, "
            "logits_to_keep=n for those of the last n positions or logits='gather' for all, or use model.generate"
        )


def check_rows(model: Any, inputs: Mapping[str, Any], rows: BatchRows, items: float | None, keep: int) -> None:
    """Refuse a batch that this model can't take."""
    labels = rows.targets if inputs.get("labels") is None else inputs["labels"]
    if labels is not None and not isinstance(labels, torch.Tensor):
        raise TypeError(f"labels is a {type(labels).__name__}; pass a tensor")
    _check_indices(model, rows)
    if items == 0 and rows.targets is not None and (rows.targets != IGNORED).any():
        raise ValueError("num_items_in_batch=0, but the batch has labels; pass their count, or leave it out")
    if keep and rows.real is not None and not rows.real[:, -keep:].all():
        raise ValueError(f"logits_to_keep={keep} would return logits of padding; pad in front of a row's tokens")
    if rows.shifted and model._burst.absolute:
        raise ValueError(
            f"position_ids, or padding in front, move a row's first token away from position 0, which changes the "
            f"result of {type(model).__name__}; pad behind the tokens, or pass position_ids that begin with 0"
        )


def _check_indices(model: Any, rows: BatchRows) -> None:
    """Refuse integers beyond the table that they index, where one rank alone would raise an IndexError."""
    tables = {"input_ids": getattr(model.get_input_embeddings(), "num_embeddings", None), **model._burst.tables}
    inputs = {"input_ids": rows.input_ids, **rows.others}
    indexed = [name for name in inputs if tables.get(name) is not None]
    ranges = {name: [int(x) for x in inputs[name].aminmax()] for name in indexed}
    if "position_ids" not in inputs:  # they count the tokens of a document
        borders = rows.cu_seqlens or (0, rows.input_ids.shape[1])
        ranges["position_ids"] = [0, max(after - before for before, after in itertools.pairwise(borders)) - 1]
    for name, (low, high) in ranges.items():
        size = tables.get(name)
        if size is not None and (low < 0 or high >= size):
            remedy = "pass numbers of at least 0 (-100 is for labels alone)" if low < 0 else _REMEDY_OF_TABLE[name]
            raise ValueError(
                f"{name} holds {low if low < 0 else high}, outside of the {size} rows of the model's table; {remedy}"
            )


def wants_router(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether the caller wants the router loss of a mixture of experts."""
    config = model.config.get_text_config()
    wanted = bool(inputs.get("output_router_logits", getattr(config, "output_router_logits", False)))
    if wanted and not hasattr(model, "router_aux_loss_coef"):
        raise ValueError(f"output_router_logits=True: {type(model).__name__} has no router loss; leave it out")
    return wanted


def wanted_states(model: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the hidden states that the caller wants: all (True), none (False), or by their numbers."""
    wanted = inputs.get("output_hidden_states", getattr(model.config, "output_hidden_states", None) or False)
    numbers = isinstance(wanted, (list, tuple)) and all(type(each) is int for each in wanted)
    if not (isinstance(wanted, bool) or numbers):
        raise TypeError(f"output_hidden_states={wanted!r} must be True, False, or the numbers of layers, such as [1]")
    return wanted


def _counter_of_positions(body: Any) -> Any:
    """Return the function by which RoBERTa and its relatives count positions from ids, skipping padding; or None."""
    embeddings = getattr(body, "embeddings", None)
    if getattr(embeddings, "padding_idx", None) is None:
        return None
    home = sys.modules[stock_class(embeddings).__module__]
    name = "create_position_ids_from_input_ids"
    return getattr(embeddings, name, getattr(home, name, None))


def tables_of(body: Reading) -> dict[str, int]:
    """Return how many values each integer input of a body may have, by name, where a table limits it."""
    # A table's rows before its ``offset`` are for padding. Vision and audio towers have their own positions.
    limits: dict[str, int] = {}
    tables = ((part.name, part.module) for part in body if isinstance(part.module, nn.Embedding))
    sizes = {name: table.num_embeddings - getattr(table, "offset", 0) for name, table in tables}
    fixed = ((name, len(x)) for name, x in body.model.named_buffers() if "embed_positions" in name and x.dim() == 2)
    for path, rows in (*sizes.items(), *fixed):
        role = next((role for role, tables in _TABLES.items() if path.rpartition(".")[2] in tables), None)
        if role and rows and not any(tower in path for tower in _TOWERS):
            limits[role] = min(rows, limits.get(role, rows))
    return limits
