"""Generate text after prompts that no single device can hold: a cache over ranks for ``generate`` of transformers."""

from .cache import ShardedCache

__all__ = ["ShardedCache"]
