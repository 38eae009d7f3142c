"""Host memory for a GPU's tensors, on a CPU: streams that never get on show that the host waits for nothing."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from burst_attention.memory import host
from burst_attention.memory.host import HostStore, PinnedMemory
from burst_attention.memory.offload import Offloading
from burst_attention.memory.store import OffloadError

LAYERS, SIZE = 16, 3000


class Event:
    """An event that is never reached: there is no way to ask it."""

    def record(self, stream: Stream) -> None:
        stream.copying = self


class Stream:
    """Knows the events that it waits for, and the event of its last copy."""

    def __init__(self, device: object = None) -> None:
        self.waited: set[Event] = set()
        self.copying: Event | None = None

    def wait_event(self, event: Event) -> None:
        self.waited.add(event)

    def wait_stream(self, stream: Stream) -> None:
        pass


class Watched(HostStore):
    """Counts the tensors on the device; memory that a copy uses must not go before the compute stream waits for it."""

    def __init__(self, compute: Stream) -> None:
        super().__init__()
        self.compute, self.alive, self.most, self.early = compute, 0, 0, 0
        self._memory._allocate = lambda size: torch.empty(size, dtype=torch.uint8)  # type: ignore[method-assign]

    def _check(self, x: torch.Tensor) -> None:
        pass

    def _watch(self, x: torch.Tensor, event: Event) -> None:
        def gone() -> None:
            self.alive -= 1
            self.early += event not in self.compute.waited

        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(x.untyped_storage(), gone)

    def put(self, x: torch.Tensor):
        ticket = super().put(x)
        self._watch(x, ticket.written)
        return ticket

    def fetch(self, ticket) -> None:
        known = ticket.ahead
        super().fetch(ticket)
        if ticket.ahead is not None and ticket.ahead is not known:
            self._watch(*ticket.ahead)


@pytest.fixture
def store(monkeypatch):
    compute = Stream()
    fake = SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=lambda _: compute, stream=lambda _: contextlib.nullcontext()
    )
    monkeypatch.setattr(host, "cuda", fake)
    return Watched(compute)


def gradient(offload: Offloading | None, *, twice: bool = False) -> torch.Tensor:
    torch.manual_seed(5)
    x = torch.randn(SIZE, requires_grad=True)
    hidden = x * 1
    for _ in range(LAYERS):
        with contextlib.nullcontext() if offload is None else offload.hooks(hidden):
            hidden = checkpoint(torch.sin, hidden, use_reentrant=False, preserve_rng_state=False)
    total = hidden.sum()
    del hidden
    if twice:
        total.backward(retain_graph=True)
        x.grad = None
    total.backward()
    return x.grad


@pytest.mark.parametrize("twice", [False, True])
def test_three_inputs_are_on_the_device_whatever_the_hosts_lead(store, twice):
    expected = gradient(None)
    for _ in range(2):
        assert torch.equal(gradient(Offloading(store), twice=twice), expected)
    gc.collect()
    assert store.most <= 3 and store.early == 0 and store.alive <= 3


def test_buffers_are_cut_from_slabs_and_used_again(store):
    slabs = []
    store._memory._allocate = lambda size: slabs.append(size) or torch.empty(size, dtype=torch.uint8)
    for _ in range(3):
        gradient(Offloading(store))
        gc.collect()
    assert len(slabs) <= -(-LAYERS // 4) and all(size & (size - 1) == 0 for size in slabs)


def test_a_buffer_is_no_view_of_another():
    memory = PinnedMemory()
    memory._allocate = lambda size: torch.empty(size, dtype=torch.uint8)
    first, second = (memory.take(torch.empty(7, 3, dtype=torch.bfloat16)) for _ in range(2))
    version = first._version
    second.fill_(1)
    first.fill_(2)
    assert first._version == version + 1 and (second == 1).all() and (first == 2).all()


def test_an_input_that_a_layer_changes_is_an_error(store):
    x = torch.randn(8)
    store.put(x)
    x.add_(1)
    with pytest.raises(OffloadError, match="changed in place"):
        for _ in range(3):
            store.put(torch.randn(8))
