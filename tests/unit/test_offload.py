"""Saved tensors in a file: equal bits, few resident tensors, space used again; every damage is an error by name."""

import errno
import gc
import os
import random
import threading
import time
import weakref
from concurrent.futures import wait
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from burst_attention.memory.disk import DiskStore, DiskTicket
from burst_attention.memory.host import OffloadError
from burst_attention.memory.offload import Offloading, offloading
from tests.support.processes import files_in_use

LAYERS, TOKENS, WIDTH = 6, 300, 64


class Watched(DiskStore):
    """A store that knows the storages of all tensors that it was given, read ahead or returned."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.storages: list[weakref.ref] = []
        self.puts = self.most = 0

    def watch(self, *given: torch.Tensor) -> None:
        self.storages += [weakref.ref(x.untyped_storage()) for x in given]
        alive = {id(storage) for each in self.storages if (storage := each()) is not None}
        self.most = max(self.most, len(alive))

    def put(self, x: torch.Tensor) -> DiskTicket:
        self.puts += 1
        self.watch(x)
        return super().put(x)

    def fetch(self, ticket: DiskTicket) -> None:
        super().fetch(ticket)
        self.watch(ticket.ahead[0])


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(1)
        self.weights = torch.nn.ParameterList(
            torch.randn(WIDTH, WIDTH, generator=make) / WIDTH**0.5 for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, offload: Offloading | None = None, count=lambda: None):
        def run(hidden: torch.Tensor, cos: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            count()
            return hidden + (hidden @ weight * cos).tanh()

        hidden = x * 1.0
        for weight in self.weights:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            if offload is None:
                hidden = checkpoint(run, hidden, cos, weight, **options)
            else:
                with offload.hooks(hidden):
                    hidden = checkpoint(run, hidden, cos, weight, **options)
        return hidden.square().sum()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(2)
    return torch.randn(TOKENS, WIDTH, generator=make, requires_grad=True), torch.rand(TOKENS, 1, generator=make)


def offload_to(store) -> Offloading:
    return Offloading(store)


def gradients(model: Layers, x: torch.Tensor) -> list[torch.Tensor]:
    found = [each.grad.clone() for each in (x, *model.parameters())]
    model.zero_grad()
    x.grad = None
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def store(tmp_path):
    made = Watched(tmp_path)
    yield made
    made.close()


def test_gradients_have_the_bits_of_recomputation_alone_and_can_be_read_again(store) -> None:
    model, (x, cos) = Layers(), inputs()
    model(x, cos).backward()
    expected = gradients(model, x)
    loss = model(x, cos, offload_to(store))
    for again in (True, False):
        loss.backward(retain_graph=again)
        assert same(gradients(model, x), expected)
    assert store.puts == LAYERS  # only each layer's input, not cos


@pytest.mark.parametrize("slow", [False, True], ids=["", "slow disk"])
def test_at_most_three_inputs_are_resident(monkeypatch, store, slow: bool) -> None:
    if slow:
        write, read = os.pwrite, os.preadv
        monkeypatch.setattr(os, "pwrite", lambda *call: time.sleep(0.02) or write(*call))
        monkeypatch.setattr(os, "preadv", lambda *call: time.sleep(0.02) or read(*call))
    model, (x, cos) = Layers(), inputs()
    model(x, cos, offload_to(store), store.watch).backward()
    assert 2 <= store.most <= 3


def test_a_put_waits_while_two_writes_are_under_way(monkeypatch, store) -> None:
    opened, write = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *call: opened.wait(30) and write(*call))
    tickets = [store.put(torch.full((64,), float(n))) for n in range(2)]
    third = threading.Thread(target=lambda: tickets.append(store.put(torch.full((64,), 2.0))))
    third.start()
    third.join(0.3)
    assert third.is_alive() and len(tickets) == 2
    opened.set()
    third.join(30)
    assert [store.get(ticket)[0].item() for ticket in tickets] == [0, 1, 2]


def test_the_tensor_before_is_read_ahead_and_only_that(store) -> None:
    tickets = [store.put(torch.full((64,), float(n))) for n in range(3)]
    store.fetch(tickets[0])
    store.fetch(tickets[0])
    assert len(tickets[0].reads) == 1
    store.fetch(tickets[1])
    assert tickets[0].ahead is None and tickets[1].ahead is not None
    model, (x, cos) = Layers(), inputs()
    asked: list[str] = []
    get, fetch = store.get, store.fetch
    store.get = lambda ticket: asked.append("get") or get(ticket)
    store.fetch = lambda ticket: asked.append("ahead" if ticket.ahead is None else "there") or fetch(ticket)
    model(x, cos, offload_to(store)).backward()
    # Each get finds its tensor read ahead, except the first one of a backward.
    assert asked == ["get", "ahead", "ahead", *["get", "there", "ahead"] * (LAYERS - 2), "get", "there"]


def test_space_is_used_again(store) -> None:
    model, (x, cos) = Layers(), inputs()
    offload, sizes = offload_to(store), []
    for _ in range(3):
        model(x, cos, offload).backward()
        sizes.append(os.fstat(store._file._fd).st_size)
    dropped = model(x, cos, offload)  # without a backward
    del dropped
    gc.collect()
    model(x, cos, offload).backward()
    assert [*sizes, os.fstat(store._file._fd).st_size] == [LAYERS * -(-TOKENS * WIDTH * 4 // 4096) * 4096] * 4


def test_records_never_overlap_and_gaps_are_used_again(store) -> None:
    draw, kept, most = random.Random(3), [], 0
    for n in range(300):
        if kept and draw.random() < 0.5:
            ticket, _ = kept.pop(draw.randrange(len(kept)))
            wait([ticket.written])
            store.free(ticket)
        else:
            kept.append((store.put(torch.full((draw.randrange(1, 9) * 1024,), n)), n))
            records = sorted((ticket.start, ticket.size) for ticket, _ in kept)
            assert all(a + size <= b for (a, size), (b, _) in pairwise(records))
            most = max(most, sum(size for _, size in records))
    assert os.fstat(store._file._fd).st_size < 1.5 * most
    assert all((store.get(ticket) == n).all() for ticket, n in kept)


def test_bytes_that_a_thread_still_writes_or_reads_are_not_used_again(monkeypatch, store) -> None:
    opened, write, read = threading.Event(), os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda *call: opened.wait(30) and write(*call))
    written = store.put(torch.zeros(1024))
    store.free(written)
    fetched = store.put(torch.ones(1024))
    assert fetched.start != written.start
    opened.set()
    wait([written.written, fetched.written])
    opened.clear()
    monkeypatch.setattr(os, "preadv", lambda *call: opened.wait(30) and read(*call))
    store.fetch(fetched)
    store.free(fetched)
    assert fetched.start not in [store.put(torch.zeros(1024)).start for _ in range(2)]
    opened.set()


AWKWARD = {
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(1000),
    "NaN": torch.tensor([float("nan"), -0.0, float("inf")]),
    "no dim": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(7, 9).T,
    "odd offset": torch.randn(1001).bfloat16()[1:],
    "many chunks": torch.randn(700_001),
}


def test_bits_shapes_and_dtypes_stay(store) -> None:
    for name, x in AWKWARD.items():
        ticket = store.put(x)
        for _ in range(2):
            y = store.get(ticket)
            assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, False), name
            assert torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (x, y))), name


def test_short_reads_and_writes_continue(monkeypatch, store) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, view, place: write(file, view[:50_001], place))
    monkeypatch.setattr(os, "preadv", lambda file, views, place: read(file, [views[0][:70_003]], place))
    x = torch.randn(500_000)
    assert torch.equal(store.get(store.put(x)), x)


def full(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_and_not_the_end(monkeypatch, store) -> None:
    x = torch.randn(5000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            OffloadError, match=r"the offload file .*could not grow.*No space left.*Free space.*disk:DIR"
        ):
            store.put(x)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        tickets = [store.put(x)]
        with pytest.raises(OffloadError, match=r"the offload file in .*20000 bytes.*written: No space left"):
            store.get(tickets[0])
        with pytest.raises(OffloadError, match="No space left"):
            store.put(x)
        forgotten = store.put(x)
        store.free(forgotten)
        store.free(tickets[0])
    assert torch.equal(store.get(store.put(x)), x)


DAMAGE = {
    "flipped": "are not those that were written",
    "truncated": "only 0 of 98304 bytes at byte 0 could be read",
    "closed": "was closed. Make a new DiskStore",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_an_error(store, tmp_path, kind: str) -> None:
    ticket = store.put(torch.randn(24, 1024))
    ticket.written.result()
    place, fd = 5 * 4096 + 17, store._file._fd
    if kind == "flipped":
        os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1]), place)
    elif kind == "truncated":
        os.truncate(fd, 0)
    else:
        store.close()
    with pytest.raises(OffloadError, match=DAMAGE[kind]) as caught:
        store.get(ticket)
    assert str(tmp_path) in str(caught.value)
    assert kind == "closed" or "memory=Memory(offload='disk:DIR')" in str(caught.value)


def test_a_read_that_fails_or_ends_ends_the_backward(monkeypatch, store) -> None:
    model, (x, cos) = Layers(), inputs()
    loss = model(x, cos, offload_to(store))

    def failing(*_) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for read, reported in ((lambda *_: 0, "only 0 of 76800 bytes"), (failing, "could not be read: Input/output error")):
        monkeypatch.setattr(os, "preadv", read)
        with pytest.raises(OffloadError, match=reported):
            loss.backward(retain_graph=True)


def test_a_change_in_place_is_an_error(monkeypatch, store) -> None:
    opened, write = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *call: opened.wait(30) and write(*call))
    x = torch.randn(8)
    ticket = store.put(x)
    x.add_(1)
    opened.set()
    with pytest.raises(OffloadError, match="changed in place"):
        store.get(ticket)


def test_only_plain_tensors_are_kept_and_a_closed_store_refuses(store) -> None:
    class Other(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="not Other"):
        store.put(torch.randn(3).as_subclass(Other))
    store.close()
    with pytest.raises(OffloadError, match="was closed"):
        store.put(torch.randn(3))


def test_a_store_that_is_collected_removes_its_file(tmp_path) -> None:
    model, (x, cos) = Layers(), inputs()
    loss = model(x, cos, offload_to(DiskStore(tmp_path)))
    gc.collect()
    assert files_in_use(tmp_path) == 1  # the graph still needs it
    assert not [*tmp_path.iterdir()]  # it has no name, so that none outlives its process
    loss.backward()
    del loss
    gc.collect()
    assert not files_in_use(tmp_path)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("disk", "pass 'host', 'disk:DIR'"),
        ("disk:", "pass 'host', 'disk:DIR'"),
        ("gpu", "pass 'host', 'disk:DIR'"),
        ("disk:/no/such/folder", "folder '/no/such/folder': No such file or directory"),
        (f"disk:{__file__}", "Not a directory"),
    ],
)
def test_bad_places_are_refused(where: str, why: str) -> None:
    with pytest.raises(ValueError, match="memory=Memory") as caught:
        offloading(where)
    assert why in str(caught.value) and where in str(caught.value)


def test_host_memory_is_for_gpus() -> None:
    offload = offloading("host")
    with pytest.raises(ValueError, match="'cpu'; pass memory=Memory\\(offload='disk:DIR'\\)"):
        Layers()(*inputs(), offload)
