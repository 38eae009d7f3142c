"""Layers that attend to the keys and values of an earlier layer: which that is, their source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from burst_attention.attention.batch import Reach
from burst_attention.integrations.hf.classes import stock_class
from burst_attention.integrations.hf.layers.dealt import ON_ONE_RANK
from burst_attention.integrations.hf.reading import Reading
from burst_attention.integrations.hf.reading.forwards import parameters_of

from .layer import shown_reach

_LAST = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")  # whose last layers share
_LATENTS = ("mistral_large4_text",)
_ARGUMENT = "shared_kv_states"  # by which layers hand keys and values on


def sources_of(config: Any, reaches: Sequence[Reach]) -> dict[int, int]:
    """Return the source of each layer that has one, by number; ``reaches``: what each layer sees.

    In transformers a layer reads what the last source of its kind before it has stored. The kind is the type of the
    layer in Gemma, and whether keys are rotated in Mistral Large 4.

    Raises:
        ValueError: it is unknown where layers get their keys, or the configuration names another source.
    """
    kind, count = config.model_type, getattr(config, "num_kv_shared_layers", None) or 0
    layers, listed = range(len(reaches)), getattr(config, "kv_source_layers", None) or ()
    kinds: Sequence[Any]
    if kind in _LATENTS and listed:
        kinds, named = [bool(each) for each in config.no_rope_layers], {n: listed[n] for n in layers if listed[n] != n}
        stored = sorted({*named.values()})
    elif kind in _LAST:
        kinds, stored = config.layer_types, [*layers[: len(layers) - count]]
        named = dict.fromkeys(layers[len(stored) :])
    elif count or listed or not {*(getattr(config, "kv_sharing_modes", None) or ())} <= {None, "store"}:
        raise ValueError(
            f"layers of the configuration share keys and values, and where those of {kind!r} get them is unknown; "
            f"{ON_ONE_RANK}"
        )
    else:
        return {}
    sources = {}
    for n, name in named.items():
        sources[n] = source = max((m for m in stored if m < n and kinds[m] == kinds[n]), default=-1)
        if source < 0:
            why = "but no earlier layer of its kind stores any"
        elif name not in (None, source):
            why = f"of layer {name}, but transformers' code gives it those of layer {source}"
        elif reaches[n] != reaches[source]:
            why = f"of layer {source}, but sees {shown_reach(reaches[n])}, and that one {shown_reach(reaches[source])}"
        else:
            continue
        raise ValueError(f"layer {n} of the configuration takes keys and values {why}; {ON_ONE_RANK}")
    return sources


def check_sharing(body: Reading, sources: dict[int, int], argument: str) -> None:
    """Refuse the cache ``argument`` for a model whose layers share otherwise than its configuration says."""
    for part in body:
        number = getattr(part.module, "layer_idx", None)
        if not part.is_attention or number is None:
            continue
        shares = bool(getattr(part.module, "is_kv_shared_layer", False))
        if shares != (number in sources) or (
            shares and _ARGUMENT not in parameters_of(stock_class(part.module).forward)
        ):
            raise ValueError(
                f"{argument}: {part} {'shares' if shares else 'has its own'} keys and values, which is not what its "
                f"configuration says; {ON_ONE_RANK}"
            )
