"""Embeddings of positions that a model counts from the start of its input, on shards.

Decoders of encoder-decoder families take no ``position_ids``. They count their input's tokens, and a rank would count
from its shard's start. The module that embeds these positions gets those of the rank's tokens instead.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from torch import Tensor, nn

from . import handed

# The names of tables, by the input that indexes them.
_TABLES = {
    "position_ids": ("embed_positions", "position_embedding", "position_embeddings", "positions_embed", "wpe"),
    "token_type_ids": ("token_type_embedding", "token_type_embeddings"),
}
_TOWERS = ("vision", "visual", "image", "audio")

# Their forward takes ``position_ids`` [S], but the decoder around them counts those itself, or passes none.
_COUNTED = frozenset(
    {
        "BartLearnedPositionalEmbedding",
        "BigBirdPegasusLearnedPositionalEmbedding",
        "BlenderbotLearnedPositionalEmbedding",
        "BlenderbotSmallLearnedPositionalEmbedding",
        "MBartLearnedPositionalEmbedding",
        "MarianSinusoidalPositionalEmbedding",
        "MvpLearnedPositionalEmbedding",
        "PLBartLearnedPositionalEmbedding",
        "PegasusSinusoidalPositionalEmbedding",
        "RoFormerSinusoidalPositionalEmbedding",
        "TrOCRLearnedPositionalEmbedding",
    }
)


def is_counted(module: nn.Module) -> bool:
    """Return whether a module embeds positions that the module around it counts."""
    kind = getattr(module, "stock_class", type(module))
    return kind.__name__ in _COUNTED and kind.__module__.startswith("transformers.models.")


def positions_of_ids(body: Any, ids: Tensor) -> Tensor | None:
    """Return the positions [B, S] that a model derives from the whole sequence's ids; None if it does not.

    RoBERTa and its relatives count from their padding's id, and skip padding.
    """
    embeddings = getattr(body, "embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)
    if embeddings is None or padding is None:
        return None
    home = sys.modules[getattr(embeddings, "stock_class", type(embeddings)).__module__]
    name = "create_position_ids_from_input_ids"
    count = getattr(embeddings, name, getattr(home, name, None))
    return None if count is None else cast("Tensor", count(ids, padding))


class Placed(nn.Module):
    """An embedding of positions that takes them from the plan."""

    stock_class: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Embed the positions of this rank's tokens in their documents: [S_local]."""
        plans = handed.plans_of(self)
        if plans is not handed.ALONE:
            places: Tensor = plans.one.document_positions
            kwargs["position_ids"] = places.to(self.weight.device)  # type: ignore[arg-type]
        return super().forward(*args, **kwargs)


def tables_of(body: nn.Module) -> dict[str, int]:
    """Return how many values each integer input of a body may have, by name, where a learned or fixed table limits it.

    A table's rows before its ``offset`` are for padding.
    """
    found: dict[str, int] = {}
    fixed = ((name, x) for name, x in body.named_buffers() if "embed_positions" in name and x.dim() == 2)
    every = [*body.named_modules(), *fixed]
    for path, table in every:
        name = path.rpartition(".")[2]
        rows = (
            table.num_embeddings if isinstance(table, nn.Embedding) else len(table) if isinstance(table, Tensor) else 0
        )
        role = next((role for role, names in _TABLES.items() if name in names), None)
        if any(tower in path for tower in _TOWERS):  # it has its own positions
            continue
        if role and rows:
            rows -= getattr(table, "offset", 0)
            found[role] = min(rows, found.get(role, rows))
    return found
