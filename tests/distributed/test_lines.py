"""Lines between the ranks of a host carry small messages as gloo does."""

import os
import random
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from burst_bench.pool import WorkerPool

from burst_attention.comm import lines as lines_module
from burst_attention.comm.lines import LIMIT, Lines, open_lines
from burst_attention.comm.link import connect
from burst_attention.comm.transport import ExchangeError, Receive, Send

BYTES = torch.uint8


def _transport(timeout=None):
    """Return a transport of all ranks, with lines."""
    transport, agreement = connect(dist.group.WORLD, timeout)
    if transport.health.lines is None:
        transport.health.lines = open_lines(agreement)
    return transport


def _content(source, target, number, size):
    generator = torch.Generator().manual_seed(source + 10 * target + 100 * number)
    return torch.randint(256, (size,), dtype=BYTES, generator=generator)


def _drawn(seed, sizes):
    """Exchange messages of drawn sizes, in orders that differ between the two sides; return what came wrong."""
    transport, draw = _transport(), random.Random(seed)
    rank, world, carried, wrong = dist.get_rank(), dist.get_world_size(), 0, []
    pending = []
    for number in range(40):
        tag = draw.randrange(3)
        chosen = {(a, b): draw.choice(sizes) for a in range(world) for b in range(world) if a != b}
        buffers = {a: torch.zeros(size, dtype=BYTES) for (a, b), size in chosen.items() if b == rank}
        sends = [Send(b, _content(a, b, number, size)) for (a, b), size in chosen.items() if a == rank]
        receives = [Receive(a, x) for a, x in buffers.items()]
        carried += sum(transport.health.lines.carries(each.tensor, each.peer) for each in sends)
        transport.tag = tag
        orders = [(sends, receives), (sends, []), ([], receives)]
        parts = orders[:1] if draw.random() < 0.5 else orders[1:][:: 1 if rank % 2 else -1]
        labels = [transport.post(*part, label=f"exchange {number}") for part in parts]
        pending.append((number, labels, buffers, chosen))
        if draw.random() < 0.4:
            wrong += _finished(transport, pending, rank)
    return carried, wrong + _finished(transport, pending, rank)


def _gathered(lines):
    """Gather messages of several sizes, computed after their receives; return how many had begun by then."""
    transport, agreement = connect(dist.group.WORLD, 20.0)
    health = transport.health
    health.lines = (health.lines or open_lines(agreement)) if lines else None
    begun = []
    for number, size in enumerate((3, 0, LIMIT, LIMIT + 1)):
        every = [torch.zeros(size, dtype=BYTES) for _ in range(transport.world)]
        expected = transport.expect(every, label="a gathering")
        begun.append(len(expected.works))
        every[transport.rank] = _content(transport.rank, 0, number, size)
        transport.gather(expected, every[transport.rank])
        assert all(torch.equal(x, _content(rank, 0, number, size)) for rank, x in enumerate(every))
    assert transport.sent == transport.received == (transport.world - 1) * (3 + 0 + LIMIT + LIMIT + 1)
    return begun


@pytest.mark.parametrize(("lines", "begun"), [(False, [2, 0, 2, 2]), (True, [0, 0, 0, 2])])
def test_receives_of_gloo_begin_before_the_sends(pools, lines, begun):
    assert pools(3).run(_gathered, lines) == [begun] * 3


def _finished(transport, pending, rank):
    wrong = []
    for number, waits, buffers, chosen in pending:
        for wait in waits:
            transport.wait(wait)
        for source, x in buffers.items():
            if not torch.equal(x, _content(source, rank, number, chosen[source, rank])):
                wrong.append((number, source))
    pending.clear()
    return wrong


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sizes", [(1, 7, 300), (1, LIMIT - 1, LIMIT, LIMIT + 1), (LIMIT,)])
def test_messages_arrive_whatever_their_sizes_tags_and_order(pools, world, sizes):
    for carried, wrong in pools(world).run(_drawn, 5, sizes):
        assert carried and not wrong


def _flooded(count):
    """Both ranks send more than a socket's buffer takes before either waits."""
    transport, peer = _transport(), 1 - dist.get_rank()
    buffers = [torch.zeros(LIMIT, dtype=BYTES) for _ in range(count)]
    sends = [
        transport.post([Send(peer, torch.full((LIMIT,), n, dtype=BYTES))], [], label="flood") for n in range(count)
    ]
    for wait in sends:
        transport.wait(wait)  # the peer takes them by waiting for its own
    for n, x in enumerate(buffers):
        transport.wait(transport.post([], [Receive(peer, x)], label="flood"))
        assert (x == n).all()
    return transport.sent


def test_more_than_the_buffers_of_both_sides_take(pools):
    assert pools(2).run(_flooded, 40) == [40 * LIMIT] * 2


def _alone():
    """Let each rank of this process's group be on a host of its own."""
    lines_module.host = lambda: str(dist.get_rank())


def _apart(sizes):
    _alone()
    carried, wrong = _drawn(6, sizes)
    ends = [line.end for line in _transport().health.lines.lines.values()]
    return (
        carried,
        wrong,
        {end.family for end in ends},
        [end.getsockopt(socket.SOL_TCP, socket.TCP_NODELAY) for end in ends],
    )


def test_ranks_of_several_hosts_connect_by_the_network():
    with WorkerPool(3, timeout=30) as pool:
        for carried, wrong, families, at_once in pool.run(_apart, (1, 300, LIMIT, LIMIT + 1), timeout=120):
            assert carried and not wrong
            assert families == {socket.AF_INET} and all(at_once) and len(at_once) == 2


def test_a_host_whose_name_nobody_knows_has_the_address_that_gloo_takes(monkeypatch):
    def unknown(_):
        raise socket.gaierror

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with lines_module._network_listener() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(lines_module, "_address_of_name", None)
    with lines_module._network_listener() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def _in_pairs():
    lines_module.host = lambda: str(dist.get_rank() // 2)
    return [line.end.family for _, line in sorted(_transport().health.lines.lines.items())]


def test_each_peer_has_the_line_of_its_place():
    near, far = socket.AF_UNIX, socket.AF_INET
    with WorkerPool(3, timeout=30) as pool:
        assert pool.run(_in_pairs, timeout=120) == [[near, far], [near, far], [far, far]]


def _unreached():
    _alone()
    if dist.get_rank() == 0:
        lines_module._network_listener = lambda: None
    return _over_gloo()


def _refused():
    lines_module.OPENING = 1.0
    lines_module._check_user = _raise  # the kernel says that another user holds the other end
    return _over_gloo()


def _raise(_):
    raise PermissionError


def _unnamed():
    if dist.get_rank() == 0:
        lines_module._listener = lambda: None
    return _over_gloo()


def _over_gloo():
    transport, x, peer = _transport(), torch.zeros(3), 1 - dist.get_rank()
    sends = [Send(peer, torch.full((3,), float(peer)))]
    transport.wait(transport.post(sends, [Receive(peer, x)], label="without lines"))
    return len(transport.health.lines.lines), x.tolist()


@pytest.mark.parametrize("use", [_unreached, _refused, _unnamed])
def test_ranks_that_cannot_connect_keep_to_gloo(use):
    with WorkerPool(2, timeout=30) as pool:
        assert pool.run(use, timeout=120) == [(0, [0.0] * 3), (0, [1.0] * 3)]


def test_a_stranger_is_no_rank():
    listener = lines_module._listener()
    secrets = [["host", "a" * 32], ["host", "b" * 32]]
    with listener:
        for text in (b"hello", b"b" * 32 + b"        7", b"c" * 32 + b"        1", b"b" * 32 + b"        1"):
            caller = socket.socket(socket.AF_UNIX)
            caller.connect(listener.getsockname())
            caller.sendall(text)
        rank, end = lines_module._taken(listener, secrets)
        end.close()
    assert rank == 1


def _waits_for_rank_1(timeout, instead):
    """Wait for a message of rank 1, which does something else; return the error's peer and text, and its seconds."""
    transport = _transport(timeout)
    if dist.get_rank() == 1:
        instead()
        return None
    started = time.monotonic()
    try:
        transport.wait(transport.post([], [Receive(1, torch.zeros(3))], label="the wait"))
    except ExchangeError as error:
        return error.peer, str(error), time.monotonic() - started
    return None


def _dies():
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def _sleeps():
    time.sleep(3)


def test_a_rank_that_ends_is_named_at_once():
    with WorkerPool(3, timeout=30) as pool:
        results, errors, lost = pool.gather(_waits_for_rank_1, 3.0, _dies, timeout=120)
    assert set(lost) == {1} and not errors
    assert all(peer == 1 and "the wait" in text and seconds < 2.5 for peer, text, seconds in results.values())


def test_a_rank_that_sends_nothing_is_named_by_the_deadline():
    with WorkerPool(2, timeout=30) as pool:
        (peer, text, seconds), _ = pool.run(_waits_for_rank_1, 1.0, _sleeps, timeout=120)
    assert peer == 1 and "timed out" in text and 1.0 <= seconds < 3.0


def test_a_message_of_another_size_is_an_error():
    ends = socket.socketpair()
    one, two = (Lines({1 - n: end}, lambda: 5.0) for n, end in enumerate(ends))
    one.post(torch.zeros(4), 1, 7, sends=True).wait()
    with pytest.raises(RuntimeError, match="a message of 16 bytes met a buffer of 12"):
        two.post(torch.zeros(3), 0, 7, sends=False).wait()
    for each in (one, two):
        each.close()
