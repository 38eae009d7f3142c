"""A model as a whole: whether it can run on shards, what its attention sees, and whether places matter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_attention.attention.batch import Reach

from ..classes import stock_class
from . import attached, known, structure
from .configs import check_layers, check_rope, layer_windows
from .forwards import is_decorated, taker_of
from .known import ALONE
from .parts import ATTENTIONS, Kind, Part, Reading, language_model_of, read, text_of

_OF_ENCODER = ("encoder_attn", "crossattention", "cross_attn")  # names of attentions to another sequence
_CAUSAL_MASKS = known.names("create_causal_mask create_sliding_window_causal_mask")
_BOTH_WAYS = known.names(
    "create_bidirectional_mask create_bidirectional_sliding_window_mask use_bidirectional_attention"
)
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def check_config(config: PreTrainedConfig, *, training: bool = True, layout: str = "auto") -> None:
    """Check a configuration without loading the model. Runs in one process.

    Args:
        config: the configuration of a causal language model.
        training: False allows dropout, because evaluation disables it.
        layout: the layout of the tokens, as in ``Strategy``.

    Raises:
        TypeError: ``config`` is no configuration.
        ValueError: the model can't run on shards. The message names the setting, its value and a remedy.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config is a {type(config).__name__}; pass a configuration: AutoConfig.from_pretrained(name)")
    text = config.get_text_config(decoder=True)
    for name in _DROPOUTS if training else ():
        if getattr(text, name, None):
            raise ValueError(f"{name}={getattr(text, name)} of the configuration is not supported; set {name}=0.0")
    check_rope(text)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        check_layers(text)
        return
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:
        raise ValueError(
            f"transformers can't build it ({type(error).__name__}: {error}); correct config.json"
        ) from error
    reading = read(model.train(training))
    check_parts(reading, reading, layout)
    check_causal(reading)
    if training:
        attached.check_random(reading)


def check_parts(reading: Reading, body: Reading, layout: str) -> None:
    """Refuse a model that can't run on shards; ``body``: the part that runs there. Dropout may still be turned off."""
    mixers = body.of(Kind.MIXER)
    if mixers and layout.startswith("striped"):
        raise ValueError(
            f"layout={layout!r} of the strategy separates neighbouring tokens, but {mixers[0]} passes a state from "
            "token to token; use Strategy(layout='zigzag')"
        )
    text = reading.model.config.get_text_config(decoder=True)  # its class may have turned a decoder into a causal model
    check_layers(text)
    check_rope(text)
    structure.check_structure(body)
    structure.check_exchanges(body)
    _check_blocks(body, text)
    for part in body.of(Kind.INDEXER):
        check_tail(part.module)
    attached.check_random(reading, body, dropout=False)


def _check_blocks(body: Reading, config: Any) -> None:
    """Refuse an indexer of blocks of keys (MiniMax M3) whose choice is not certain, or not one for each key head."""
    for indexer in (part.module for part in body.of(Kind.INDEXER)):
        local, most = getattr(indexer, "local_blocks", 0), getattr(indexer, "topk_blocks", 0)
        if most and getattr(config, "is_causal", True) is False:
            raise ValueError(
                "is_causal=False of the configuration lets queries see later keys, which the indexer of blocks never "
                "chooses; leave it out"
            )
        if local > most:
            raise ValueError(
                f"index_local_blocks={local} of the configuration is more than index_topk_blocks={most}, so the order "
                f"of equal scores decides which are chosen; set at most {most}"
            )
        if most and indexer.num_heads != config.num_key_value_heads:
            raise ValueError(
                f"index_n_heads={indexer.num_heads} of the configuration is not num_key_value_heads="
                f"{config.num_key_value_heads}, and each key-value head needs its own choice; make them equal"
            )


def check_tail(indexer: Any) -> None:
    """Refuse an indexer of pools of keys (GLM-5.3) with queries that see none."""
    if known.pools_keys(indexer) and indexer.index_kpool > 1 and not indexer.index_kpool_always_select_tail:
        raise ValueError(
            f"index_kpool_always_select_tail=False leaves the first {indexer.index_kpool - 1} tokens without a "
            "key, and transformers then averages the values of all, later ones too; set it to True"
        )


def attention_windows(model: Any) -> list[Reach]:
    """Return what each attention of a causal language model sees, by layer: a window, a :class:`Chunked`, or None.

    A layer without an attention has no entry, and one with several has as many.
    """
    layers = _attentions_by_layer(model)
    reaches = layer_windows(model.config.get_text_config(decoder=True))
    if len(reaches) != len(layers):
        reaches = [None] * len(layers)
    return [reach for reach, layer in zip(reaches, layers, strict=True) for _ in layer]


def attentions_of(model: Any) -> list[nn.Module]:
    """Return the attentions of a causal language model, in the order of :func:`attention_windows`."""
    return [module for layer in _attentions_by_layer(model) for module in layer]


def _attentions_by_layer(model: Any) -> list[list[nn.Module]]:
    body = read(text_of(model))
    lists = [part.module for part in body if isinstance(part.module, nn.ModuleList)]
    stacks = [modules for modules in lists if all(isinstance(x, GradientCheckpointingLayer) for x in modules)]
    layers = [body.by_id[id(layer)] for stack in stacks for layer in stack]
    return [[part.module for part in layer.inside if part.kind in ATTENTIONS] for layer in layers]


def recurrent_layers(model: nn.Module) -> dict[str, str]:
    """Return the layers of a model that pass a state from token to token, by name: which mechanism they have."""
    return {part.name: str(known.mechanism(part.module)) for part in read(model).of(Kind.MIXER)}


def windows_of(model: Any, *, causal: bool) -> list[Reach]:
    """Return :func:`.configs.layer_windows` of a model."""
    return layer_windows(model.config.get_text_config(decoder=True), causal=causal)


def is_causal(reading: Reading) -> bool:
    """Return whether the attention of a body's layers is causal, as they state; each call is compared with that."""
    body = reading.model
    attentions = [part for part in reading.of(*ATTENTIONS) if part.name.split(".")[-1] not in _OF_ENCODER]
    stated = {part.name: known.states_causal(part.module) for part in attentions}
    config, kind = getattr(body, "config", None), type(body).__name__
    used = _mask_names(body)
    if not getattr(config, "is_causal", True) and (used & _CAUSAL_MASKS or any(stated.values())):
        if reason := _reason_against_encoding(reading, attentions):
            raise ValueError(f"is_causal=False of the configuration: {reason}; leave it out, or {ALONE}")
        return False
    for name in [name for name, causal in stated.items() if not causal]:
        if getattr(config, "is_decoder", False):
            raise ValueError(
                f"{name} of {kind} says is_causal=False, but the configuration is_decoder=True, so its mask is not "
                f"certain; {ALONE}"
            )
        if used & _CAUSAL_MASKS and not used & _BOTH_WAYS:
            raise ValueError(
                f"{name} of {kind} says is_causal=False, but {kind} makes causal masks, which only some of "
                f"transformers' attentions read; unset use_bidirectional_attention, or {ALONE}"
            )
    if len({*stated.values()}) < 2:
        return all(stated.values())
    names = [next(name for name, causal in stated.items() if causal is wanted) for wanted in (True, False)]
    raise ValueError(f"{names[0]} of {kind} is causal, but {names[1]} is not; {ALONE}")


def check_causal(reading: Reading) -> bool:
    """Return whether plans are causal. A vision-language model's own masks add the groups that see each other."""
    model, body = reading.model, reading.text.model
    if language_model_of(model) is None:
        return is_causal(reading.text)
    used = "use_bidirectional_attention" in _mask_names(body) and body.config.use_bidirectional_attention
    if used or not getattr(body.config, "is_causal", True):
        raise ValueError(
            f"{type(body).__name__} is bidirectional by its configuration (use_bidirectional_attention, is_causal), "
            f"which is not supported inside {type(model).__name__}; {ALONE}"
        )
    return True


def _reason_against_encoding(reading: Reading, attentions: Iterable[Part]) -> str | None:
    """Return why a body may not be as its configuration's ``is_causal=False`` says, or None."""
    body, kind = reading.model, type(reading.model).__name__
    if mixers := reading.of(Kind.MIXER):
        return f"{mixers[0].name} of {kind} passes a state from token to token"
    if any(known.CHUNKED in kinds for _, kinds in known.layer_lists(body.config)):
        return f"chunked layers of {kind} stay causal"
    for part in attentions:
        if known.gets_no_keywords(part.module):
            return f"{part.name} of {kind} does not get it"
    forward = stock_class(taker_of(body)).forward
    if not (_mask_names(body) & _CAUSAL_MASKS and is_decorated(forward, "merge_with_config_defaults")):
        return f"{kind} is not known to follow it"
    return None


def _mask_names(body: nn.Module) -> frozenset[str]:
    """Return the global names and attributes in the forward of a body, whose masks follow from them."""
    return known.code_names(stock_class(taker_of(body)).forward)


def embeds_positions(reading: Reading) -> bool:
    """Return whether a model has learned positions: a table that token ids don't index."""
    # An adapter may wrap the embeddings and copy them. Gemma has a table of tokens for each layer.
    of_tokens = read(reading.model.get_input_embeddings()).by_id
    tables = [part for part in reading if isinstance(part.module, nn.Embedding) and id(part.module) not in of_tokens]
    return any(not any(x.startswith("embed_tokens") for x in table.name.split(".")) for table in tables)


def is_rotary(reading: Reading) -> bool:
    """Return whether a model turns queries and keys by their positions."""
    return any(known.is_called(part.module, "RotaryEmbedding") for part in reading)


def depends_on_places(reading: Reading) -> bool:
    """Return whether a token's place matters, not only its distance to others: learned positions, growing scales."""
    config = reading.model.config.get_text_config(decoder=True)
    scaled = getattr(config, "attn_temperature_tuning", None)
    scaled = scaled or "llama_4_scaling_beta" in str(getattr(config, "rope_parameters", None))
    blocks = any(hasattr(part.module, "block_size") for part in reading.of(Kind.INDEXER))  # counted from a row's start
    grows = any(known.is_called(part.module, "SoftmaxScaling") for part in reading)  # Mistral Large 4's
    return blocks or grows or bool(scaled) or not is_rotary(reading) or embeds_positions(reading)
