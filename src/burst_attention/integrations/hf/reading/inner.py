"""Find the part of a model that runs on shards: its body, or the language model inside a vision-language model."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import PreTrainedModel

from ..stub_forward import body_of

_INNER = ("language_model", "text_model")  # names of the language model inside of a vision-language model


def language_model_of(model: Any) -> Any:
    """Return the language model inside a vision-language model, without its head; None for other models."""
    around, name = around_language(model)
    inner = getattr(around, name, None)
    return body_of(inner) if inner is not None and inner.get_output_embeddings() is not None else inner


def around_language(model: Any) -> tuple[Any, str]:
    """Return the module that calls the language model, and the language model's name in it; (None, "") otherwise."""
    embeddings = _embeddings_of(model) if isinstance(model, PreTrainedModel) else None
    for around in (model, body_of(model)) if embeddings is not None else ():
        for name in _INNER:
            inner = getattr(around, name, None)
            if isinstance(inner, PreTrainedModel) and _embeddings_of(inner) is embeddings:
                return around, name
    return None, ""


def _embeddings_of(model: Any) -> Any:
    with suppress(NotImplementedError):
        return model.get_input_embeddings()


def text_of(model: Any) -> Any:
    """Return the part that runs on shards: the language model, or the body of a model without vision."""
    inner = language_model_of(model)
    return body_of(model) if inner is None else inner
