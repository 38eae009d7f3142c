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
from burst_attention.memory.host import HostStore, OffloadError, PinnedMemory
from burst_attention.memory.offload import Offloading

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


def memory_of(slabs: list[int]) -> PinnedMemory:
    """Memory that is not pinned; ``slabs`` gets the sizes of its allocations."""
    memory = PinnedMemory()
    memory._allocate = lambda size: slabs.append(size) or torch.empty(size, dtype=torch.uint8, device="cpu")
    return memory


class Watched(HostStore):
    """Counts the tensors on the device; memory that a copy uses must not go before the compute stream waits for it."""

    def __init__(self, compute: Stream) -> None:
        super().__init__()
        self.compute, self.alive, self.most, self.early, self.slabs = compute, 0, 0, 0, list[int]()

    def _pinned(self) -> PinnedMemory:
        return memory_of(self.slabs)

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
    for _ in range(3):
        gradient(Offloading(store))
        gc.collect()
    assert len(store.slabs) <= -(-LAYERS // 4) and all(size & (size - 1) == 0 for size in store.slabs)


def test_lengths_that_vary_share_memory_and_give_it_back():
    memory = memory_of(slabs := [])
    for n in range(200):
        held = [memory.take(torch.empty(100_000 + 700 * n, dtype=torch.uint8)) for _ in range(8)]
        assert len({x.data_ptr() for x in held}) == 8
        del held
    total = sum(storage.nbytes() for storage in {id(s): s for free in memory._free.values() for s, _ in free}.values())
    assert total <= 2 * 2**20 * 2 and sum(slabs) < 20 * 2**20  # pinning takes as long as there are bytes


@pytest.mark.parametrize(
    ("size", "slab"), [(2**20, 2**20), (15 * 2**16, 2**20), (9 * 2**16, 2**22), (10 * 2**16, 2**21)]
)
def test_the_host_waits_for_no_more_memory_than_a_copy_needs_or_would_be_wasted(size, slab):
    memory = memory_of(slabs := [])
    memory.take(torch.empty(size, dtype=torch.uint8, device="meta"))
    assert slabs == [slab]


def test_a_store_that_goes_waits_for_what_it_reads_ahead(store, monkeypatch):
    ticket = store.put(torch.randn(8))
    store.release(0)
    store.fetch(ticket)
    read, compute = ticket.ahead[1], store.compute
    assert read not in compute.waited
    host._wait_for(store._reading)  # as its finalizer does
    assert read in compute.waited and not store._reading


def test_a_default_device_changes_nothing():
    with torch.device("meta"):
        assert memory_of([]).take(torch.empty(5)).device.type == "cpu"


def test_a_buffer_is_no_view_of_another():
    memory = memory_of([])
    first, second = (memory.take(torch.empty(7, 3, dtype=torch.bfloat16)) for _ in range(2))
    version = first._version
    second.fill_(1)
    first.fill_(2)
    assert first._version == version + 1 and (second == 1).all() and (first == 2).all()


def test_an_input_that_a_layer_changes_is_an_error(store):
    x = torch.randn(8)
    store.put(x)
    x.add_(1)
    for _ in range(2):  # whoever goes on after the error gets it again
        with pytest.raises(OffloadError, match="changed in place"):
            for _ in range(3):
                store.put(torch.randn(8))
