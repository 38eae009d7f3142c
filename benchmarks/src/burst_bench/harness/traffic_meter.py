"""Count the bytes that this process gives to torch.distributed's process groups.

The meter wraps methods of ``ProcessGroup``, through which all Python calls pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

# Methods of ProcessGroup -> bytes that leave this rank. In an all-to-all a rank keeps one part; gloo and NCCL gather
# around a ring, so each rank passes on world - 1 parts. A barrier's few bytes don't count.
_COUNTED: dict[str, Callable[..., int]] = {
    "send": lambda group, tensors, *_: sum(x.nbytes for x in tensors),
    "alltoall_base": lambda group, output, given, *_: given.nbytes * (group.size() - 1) // group.size(),
    "all_to_all_single": lambda group, output, given, *_: given.nbytes * (group.size() - 1) // group.size(),
    "allgather": lambda group, outputs, given, *_: sum(x.nbytes for x in given) * (group.size() - 1),
    "barrier": lambda *_: 0,
    "recv": lambda *_: 0,
}
_OTHERS = (
    *("all_gather_single", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "broadcast"),
    *("gather", "reduce", "reduce_scatter", "reduce_scatter_single", "scatter"),
)


class TrafficMeter(ExitStack):
    """A context that counts all bytes this process sends, through any package and process group."""

    sent: int | None = 0  # payload bytes so far; None after a call that can't be counted

    def __enter__(self) -> TrafficMeter:
        for name in (*_COUNTED, *_OTHERS):
            if name in vars(dist.ProcessGroup):
                counted = self._wrapped(name, getattr(dist.ProcessGroup, name))
                self.enter_context(patch.object(dist.ProcessGroup, name, counted))
        return self

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        count = _COUNTED.get(name)

        def call(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
            if count is None:
                self.sent = None
            elif self.sent is not None:
                self.sent += count(group, *arguments)
            return original(group, *arguments, **options)

        return call
