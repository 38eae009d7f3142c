"""What a configuration says of a model's layers: their kinds, windows, rotary frequencies and dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from burst_attention.attention.batch import Chunked, Reach

from . import known
from .known import ALONE


def check_layers(config: Any) -> None:
    """Refuse a configuration that lists layers other than self-attention, or whose layers use a window below 1."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"is_encoder_decoder=True of the configuration: cross-attention is not supported; {ALONE}")
    for attribute, kinds in known.layer_lists(config):
        for kind in kinds:
            if kind not in known.LAYERS:
                why = known.REFUSED_LAYERS.get(kind, known.OTHER_LAYER)
                raise ValueError(
                    f"{attribute} of the configuration has {kind!r}: {why}, so each rank would see only its shard; "
                    f"{ALONE}"
                )
    for reach in layer_windows(config) if hasattr(config, "num_hidden_layers") else ():
        if isinstance(reach, int) and reach < 1:
            name = "window_size" if hasattr(config, "window_size") else "sliding_window"
            raise ValueError(f"{name}={reach} of the configuration is below 1; set at least 1, or null for none")


def layer_windows(config: Any, *, causal: bool = True) -> list[Reach]:
    """Return each layer's sliding window, in tokens, or its :class:`Chunked`; None for full attention.

    Args:
        causal: whether the layers are. In a configuration of others the window is the largest distance.
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
    windows = by_layer(config, "sliding_window", len(kinds))
    unused = getattr(config, "model_type", None) in known.WITHOUT_WINDOW
    if unused or getattr(config, "use_sliding_window", True) is False:
        windows = [None] * len(kinds)
    chunk = getattr(config, "attention_chunk_size", None)
    reaches: dict[str, Reach] = {known.CHUNKED: Chunked(chunk) if chunk else None}
    reaches["local"] = getattr(config, "window_size", None)  # GPT Neo
    # A bidirectional mask of transformers names the largest distance, Gemma 3's own the first one beyond.
    beyond = not causal and not (
        getattr(config, "use_bidirectional_attention", None) is True and getattr(config, "is_causal", True)
    )
    sliding = [None if window is None else window + beyond for window in windows]
    full = getattr(config, "model_type", None) in known.FULL_WITH_WINDOW
    windowed = "full_attention" if full else "sliding_attention"
    return [window if kind == windowed else reaches.get(kind) for kind, window in zip(kinds, sliding, strict=True)]


def by_layer(config: Any, name: str, count: int = 1) -> list[Any]:
    """Return a setting ``count`` times, None where there is none; of each layer if the layers differ in it."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return [getattr(layer, name, None) for layer in config.per_layer_config]
    return [getattr(config, name, None)] * count


def check_rope(config: Any) -> None:
    """Refuse rotary frequencies that depend on the largest position, because it differs by rank."""
    for attribute in ("rope_parameters", "rope_scaling"):
        check_rope_type(attribute, _rope_types(getattr(config, attribute, None)))


def check_rope_type(attribute: str, kinds: Iterable[Any]) -> None:
    """Refuse types of rotary frequencies, the value of ``attribute``, that depend on the largest position."""
    for kind in kinds:
        if isinstance(kind, str) and ("dynamic" in kind or kind in ("longrope", "su")):
            raise ValueError(
                f"{attribute} has rope type {kind!r}: its frequencies depend on the largest position, which "
                "differs by rank; use a model with rope type default, linear, yarn or llama3"
            )


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, Mapping):
        kind = parameters.get("rope_type", parameters.get("type"))
        if isinstance(kind, str):
            yield kind
        for nested in parameters.values():
            yield from _rope_types(nested)


def dropouts_of(config: Any) -> str:
    """Return the settings of a configuration that ask for dropout, as text; empty if none does."""
    settings = {} if config is None else config.get_text_config(decoder=True).to_dict()
    rates = ((name, x) for name, x in settings.items() if "drop" in name and isinstance(x, float) and x > 0)
    return ", ".join(f"{name}={x}" for name, x in rates)
