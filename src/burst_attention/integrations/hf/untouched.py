"""Models that can't run on shards, on one rank, which has whole sequences: ``parallelize`` leaves them as they are.

Their own forward, attention and loss run. So results are those without ``parallelize``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from burst_attention.loss import LogitForm

from .call.rows import PACKING
from .layers.dealt import DealtCache
from .layers.memory import Memory
from .reading import forwards, models, read, structure
from .reading.configs import check_layers
from .reading.known import ALONE

_OURS = ("logits", "fused_lm_head", *PACKING)  # arguments that only our forward takes


def reason_of(model: Any) -> str | None:
    """Return why a model can't run on shards, or None if it can."""
    reading = read(model)
    try:
        check_layers(model.config.get_text_config(decoder=True))
        structure.check_structure(reading.text)
        structure.check_exchanges(reading.text)
        structure.check_attention_is_ours(reading.text)
        models.check_causal(reading)
    except ValueError as error:
        return str(error).removesuffix(f"; {ALONE}")
    return None


def check_memory(reason: str, memory: Memory) -> None:
    """Refuse chunks, which are known to be right for models that can run on shards."""
    for name in ("attention_chunks", "mlp_chunks"):
        if getattr(memory, name) > 1:
            raise ValueError(f"memory=Memory({name}={getattr(memory, name)}): {reason}; leave {name} out")


def form_of(model: Any) -> LogitForm | None:
    """Return a placeholder if the model has transformers' next-token loss, None if it has another."""
    return LogitForm() if forwards.has_stock_loss(model) else None


def warn(reason: str) -> None:
    """Warn that a model stays as it is."""
    warnings.warn(f"hf.parallelize leaves the model as it is, which only one rank can do: {reason}", stacklevel=4)


def check_call(reason: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the model's own forward does not know, and would ignore."""
    for name, value in kwargs.items():
        if (name in _OURS and value is not None and value is not False) or isinstance(value, DealtCache):
            raise ValueError(f"{name} is refused: the model runs as it is, because {reason}; leave {name} out")
