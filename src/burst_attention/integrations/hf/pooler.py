"""Poolers, which score a whole sequence by its first token: a body's shard may not have it.

Inside of a parallel body a pooler returns None. The model's head gets the result for the whole hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from . import handed


def poolers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the poolers of a model's bodies."""
    for module in model.modules():
        pooler = getattr(module, "pooler", None) if isinstance(module, PreTrainedModel) else None
        if isinstance(pooler, nn.Module) and type(pooler).__name__.endswith("Pooler"):
            yield pooler


def pooled(body: Any, hidden: Tensor) -> Tensor | None:
    """Return the pooler's result for whole hidden states [B, S, E]; None if the body has no pooler."""
    pooler = getattr(body, "pooler", None)
    result: Tensor | None = pooler(hidden) if isinstance(pooler, Unpooled) else None
    return result


class Unpooled(nn.Module):
    """A pooler that doesn't run on shards."""

    stock_class: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return None inside of a parallel body; else run the stock forward."""
        plans = vars(self).get(handed.ATTRIBUTE, handed.ALONE)
        return super().forward(*args, **kwargs) if plans is handed.ALONE else None
