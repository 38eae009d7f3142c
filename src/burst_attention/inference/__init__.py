"""Generate text after prompts that no single device can hold: a cache over ranks for ``generate`` of transformers."""

from ..integrations import hf  # noqa: F401  # first: it says which extra is missing
from .cache import ShardedCache
from .weights import shard_weights

__all__ = ["ShardedCache", "shard_weights"]
