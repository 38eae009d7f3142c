"""Keep the tensors that a backward needs outside the device's memory, and read them ahead.

Use with activation checkpointing, which saves only a layer's inputs::

    with offload.hooks(hidden):
        out = checkpoint(layer, hidden, *others, use_reentrant=False, preserve_rng_state=False)

The copy of a layer's input is written while this layer and the next one run. In the backward, the input of the layer
before is read while a layer computes. At most three inputs are resident at once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .disk import DiskStore
from .host import HostStore

Store = HostStore | DiskStore

HOST, DISK = "host", "disk:"


@dataclass(eq=False)
class _Saved:
    """What the graph holds in place of a tensor. ``before``: the tensor saved before it, which is needed next."""

    ticket: Any
    before: weakref.ref[_Saved] | None


class Offloading:
    """Saves chosen tensors in a store, which keeps the copies. A rank whose store fails raises alone."""

    def __init__(self, store: Store) -> None:
        self._store: Any = store  # tickets belong to their store
        self._last: weakref.ref[_Saved] | None = None

    def hooks(self, *tensors: Tensor) -> saved_tensors_hooks:
        """Return a context in which autograd saves exactly these tensors in the store; don't change them in place."""
        chosen = [weakref.ref(x) for x in tensors]  # the graph may hold the hooks, and must not hold the tensors

        def pack(x: Tensor) -> Any:
            return self._put(x) if any(each() is x for each in chosen) else x

        def unpack(held: Any) -> Tensor:
            return self._get(held) if isinstance(held, _Saved) else held

        return saved_tensors_hooks(pack, unpack)

    def _put(self, x: Tensor) -> _Saved:
        ticket = self._store.put(x)
        saved = _Saved(ticket, self._last)
        # The graph may be read again (retain_graph), so the copy lives as long as the graph.
        weakref.finalize(saved, self._store.free, ticket).atexit = False
        self._last = weakref.ref(saved)
        return saved

    def _get(self, saved: _Saved) -> Tensor:
        x = self._store.get(saved.ticket)
        before = None if saved.before is None else saved.before()
        if before is not None:
            self._store.fetch(before.ticket)
        return x


def offloading(where: str) -> Offloading:
    """Return the Offloading of ``memory=Memory(offload=where)``; ``where`` and errors as in :func:`check_place`."""
    check_place(where)
    try:
        store = HostStore() if where == HOST else DiskStore(where.removeprefix(DISK))
    except ValueError as error:
        raise ValueError(f"memory=Memory(offload={where!r}): {error}") from error
    return Offloading(store)


def check_place(where: str) -> None:
    """Raise TypeError or ValueError if ``where`` is not ``"host"`` (pinned memory, GPUs only) or ``"disk:DIR"``."""
    if not isinstance(where, str):
        raise TypeError(f"offload={where!r} must be a str or None")
    if where != HOST and not (where.startswith(DISK) and where != DISK):
        raise ValueError(
            f"memory=Memory(offload={where!r}) names no place; pass 'host', 'disk:DIR', such as disk:/scratch, or None"
        )
