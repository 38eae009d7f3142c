"""Generate text after prompts that no single device can hold: a cache over ranks for ``generate`` of transformers."""

from ..integrations import hf  # noqa: F401  # first: it says which extra is missing
from .cache import ShardedCache
from .columns import ARGMAX_BYTES
from .experts import are_experts
from .forward import SHORT
from .slots import NO_HOLE, PAGE, first_needed
from .weights import shard_weights

__all__ = ["ARGMAX_BYTES", "NO_HOLE", "PAGE", "SHORT", "ShardedCache", "are_experts", "first_needed", "shard_weights"]
