"""The emulated cluster: traffic where it belongs, links at their rate, and nothing left behind however it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from burst_bench.cluster import INTERFACE, NETWORK, Cluster, ClusterError, parse_cluster, parse_rate, remove_leftovers
from burst_bench.cluster.namespaces import inside, interface_bytes
from burst_bench.pool import WorkerPool


def obstacle() -> str | None:
    """Why no cluster can be made here; None if one can."""
    try:
        Cluster(1, 1).close()
    except ClusterError as error:
        return str(error)
    return None


OBSTACLE = obstacle()
emulated = pytest.mark.skipif(OBSTACLE is not None, reason=f"no emulated cluster here: {OBSTACLE}")


def namespaces(pid: int | None = None) -> list[str]:
    folder = Path("/run/netns")
    return [path.name for path in folder.glob(f"burst-{pid or os.getpid()}-*")] if folder.exists() else []


def counters(cluster: Cluster) -> list[tuple[int, int]]:
    """Bytes that each node has (sent, received) so far, Ethernet headers included."""
    counts = []
    for name in dict.fromkeys(cluster.entry(rank).namespace for rank in range(cluster.world)):
        with inside(name):
            received, sent = interface_bytes(Path("/proc/thread-self/net/dev").read_text())[INTERFACE]
        counts.append((sent, received))
    return counts


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[tuple[Cluster, WorkerPool]]:
    with Cluster(2, 2) as cluster, WorkerPool(4, timeout=30, entries=cluster.entries()) as pool:
        pool.run(send, 0, 3, 1000)  # gloo opens its connections
        pool.run(send, 0, 1, 1000)
        yield cluster, pool


def send(source: int, target: int, size: int) -> float | None:
    """A message of ``size`` bytes; the seconds that the receiver waited for it, None elsewhere."""
    rank = dist.get_rank()
    message = torch.full((size,), 7 if rank == source else 0, dtype=torch.uint8)
    answer = torch.zeros(1)
    start = time.perf_counter()
    if rank == source:
        dist.send(message, target)
        dist.recv(answer, target)
    if rank == target:
        dist.recv(message, source)
        assert bool((message == 7).all())
        seconds = time.perf_counter() - start
        dist.send(answer, source)
        return seconds
    return None


def total() -> float:
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return float(tensor[-1])


def network() -> tuple[str, str, list[str]]:
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    own = os.readlink("/proc/thread-self/ns/net")
    return own, os.environ["GLOO_SOCKET_IFNAME"], sorted(line.split(":")[0].strip() for line in lines)


@emulated
@pytest.mark.long
def test_ranks_of_a_node_share_its_network_and_all_reduce_crosses(two_by_two: tuple[Cluster, WorkerPool]) -> None:
    _, pool = two_by_two
    assert pool.run(total) == [10.0] * 4
    found = pool.run(network)
    assert len({own for own, _, _ in found} | {os.readlink("/proc/self/ns/net")}) == 3
    assert found[0] == found[1] and found[2] == found[3]
    hosts = pool.run(socket.gethostname)  # by which a plan's route is chosen
    assert hosts[0] == hosts[1] and hosts[2] == hosts[3] and hosts[0] != hosts[2]
    assert socket.gethostname() not in hosts
    assert all(names == ["burst0", "lo"] and chosen == "burst0" for _, chosen, names in found)


@emulated
@pytest.mark.long
def test_counters_see_what_crosses_and_nothing_else(two_by_two: tuple[Cluster, WorkerPool]) -> None:
    cluster, pool = two_by_two
    size, before = 4_000_000, counters(cluster)
    pool.run(send, 0, 3, size)
    crossed = counters(cluster)
    pool.run(send, 2, 3, size)
    pool.run(send, 0, 1, size)
    inside = counters(cluster)
    sent, received = crossed[0][0] - before[0][0], crossed[1][1] - before[1][1]
    assert size <= sent <= 1.08 * size and size <= received <= 1.08 * size
    assert crossed[1][0] - before[1][0] < 0.08 * size  # acknowledgements
    assert max(b - a for node in zip(crossed, inside, strict=True) for a, b in zip(*node, strict=True)) < 10_000


@emulated
@pytest.mark.slow
def test_rate_holds_both_ways_and_changes_under_open_connections(two_by_two: tuple[Cluster, WorkerPool]) -> None:
    cluster, pool = two_by_two

    def seconds(source: int, target: int) -> float:
        return pool.run(send, source, target, 2_000_000)[target]

    cluster.set_rate(80e6)
    try:
        for source, target in ((0, 2), (3, 1)):
            assert 0.17 < seconds(source, target) < 0.35
        assert seconds(2, 3) < 0.1  # loopback has no link
        cluster.set_rate(20e6)
        assert 0.7 < seconds(0, 2) < 1.2
    finally:
        cluster.set_rate(None)
    assert min(seconds(0, 2) for _ in range(3)) < 0.1


@contextmanager
def connected(cluster: Cluster, source: int, target: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection between two nodes."""
    with inside(cluster.entry(target).namespace):
        server = socket.create_server(("", 0))
    with inside(cluster.entry(source).namespace):
        sender = socket.create_connection((str(NETWORK[1 + target]), server.getsockname()[1]), timeout=10)
    receiver, _ = server.accept()
    server.close()
    receiver.settimeout(10)
    with sender, receiver:
        yield sender, receiver


def transfer(cluster: Cluster, pairs: list[tuple[int, int]], size: int) -> float:
    """The seconds in which every pair's source sends ``size`` bytes to its target, all at once."""

    def drain(receiver: socket.socket) -> None:
        left = size
        while left:
            left -= len(receiver.recv(min(left, 1 << 16)))

    with ExitStack() as stack:
        ends = [stack.enter_context(connected(cluster, *pair)) for pair in pairs]
        threads = [threading.Thread(target=sender.sendall, args=(bytes(size),)) for sender, _ in ends]
        threads += [threading.Thread(target=drain, args=(receiver,)) for _, receiver in ends]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start


@emulated
@pytest.mark.slow
def test_peers_share_a_nodes_rate_both_ways() -> None:
    size = 1_000_000
    with Cluster(8, 1, rate=200e6) as cluster:
        for pairs in ([(k, 0) for k in range(1, 8)], [(0, k) for k in range(1, 8)]):
            before = counters(cluster)
            # 7 MB at 200 Mbit/s take 0.28 s; if only the other side of the pairs were limited it would be 0.04.
            assert 0.25 < transfer(cluster, pairs, size) < 0.5
            sent = sum(after[0] - was[0] for was, after in zip(before, counters(cluster), strict=True))
            assert 7 * size <= sent < 1.02 * 7 * size  # the queue holds all that is under way: nothing is sent twice


@emulated
@pytest.mark.long
def test_nothing_is_left_after_exit_exception_or_failed_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    others = set(namespaces())
    links = Path("/proc/net/dev").read_text().count(":")
    with Cluster(2, 1, rate=1e8):
        assert len(set(namespaces()) - others) == 3
        assert Path("/proc/net/dev").read_text().count(":") == links  # no link of ours in the machine's own network
    assert set(namespaces()) == others
    with pytest.raises(KeyError), Cluster(2, 1):
        raise KeyError
    assert set(namespaces()) == others

    made: list[set[str]] = []

    def fail(*_: object) -> None:
        made.append(set(namespaces()) - others)
        raise KeyboardInterrupt

    monkeypatch.setattr(Cluster, "_batch", fail)
    with pytest.raises(KeyboardInterrupt):
        Cluster(2, 1)
    assert len(made[0]) == 3
    assert set(namespaces()) == others


# Python takes SIGINT only if whoever started it did not ignore it, as shells do for what runs in the background.
HEEDS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
CHILD = f"""
{HEEDS}
import sys, time
from burst_bench.cluster import Cluster
with Cluster(2, 1, rate=1e8):
    print("made", flush=True)
    time.sleep(60)
"""


def child_ended_by(number: signal.Signals) -> tuple[int, int]:
    """(pid, exit code) of a process that was in a cluster when the signal came."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"made\n"
        assert len(namespaces(child.pid)) == 3
        child.send_signal(number)
        return child.pid, child.wait(timeout=20)


@emulated
@pytest.mark.long
def test_nothing_is_left_by_a_process_that_is_stopped() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        pid, code = child_ended_by(number)
        assert code != 0
        assert not namespaces(pid)


def alive(group: int) -> list[str]:
    """Return the processes of a process group, except zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # ended meanwhile
        if int(number) == group and state != "Z":
            found.append(folder.name)
    return found


@emulated
@pytest.mark.slow
def test_a_bench_in_a_cluster_ends_with_control_c(tmp_path: Path) -> None:
    """As from a terminal: the signal goes to the command and to its ranks, which are in the middle of a call."""
    sizes = [
        "--cluster",
        "2x1",
        "--link",
        "20mbit",
        "--seq-lens",
        "8192",
        "--strategies",
        "burst",
        "--out",
        str(tmp_path),
    ]
    run = "runpy.run_module('burst_bench.cluster', run_name='__main__')"
    command = [sys.executable, "-c", f"{HEEDS}; import runpy, sys; sys.argv[1:] = {['train', *sizes]}; {run}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None and child.stderr is not None
        while b"8,192 tokens" not in child.stdout.readline():
            assert child.poll() is None, child.stderr.read()
        time.sleep(1.0)
        os.killpg(child.pid, signal.SIGINT)
        reported = child.stderr.read()
        assert child.wait(timeout=30) == 130
    assert b"Traceback" not in reported
    assert not namespaces(child.pid)
    deadline = time.monotonic() + 10
    while alive(child.pid):
        assert time.monotonic() < deadline, "ranks are left"
        time.sleep(0.1)


@emulated
@pytest.mark.long
def test_what_a_killed_process_left_goes_with_the_next_cluster() -> None:
    """And ranks can't enter a node that is gone."""
    pid, _ = child_ended_by(signal.SIGKILL)
    assert len(namespaces(pid)) == 3
    with Cluster(1, 1) as cluster:
        assert not namespaces(pid)
        assert remove_leftovers() == []  # ours is alive
        assert counters(cluster) == [(0, 0)]
        entry = cluster.entry(0)
    with pytest.raises(FileNotFoundError, match=re.escape(entry.namespace)):
        entry()


def test_without_iproute2_or_root(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda name, path: None if name == "tc" else f"/bin/{name}")
        with pytest.raises(ClusterError, match="needs tc of iproute2; install"):
            Cluster(2, 1)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda name, path: f"/bin/{name}")
        patch.setattr("os.geteuid", lambda: 1000)
        with pytest.raises(ClusterError, match="needs root"):
            Cluster(2, 1)


def test_cluster_and_rate_are_parsed() -> None:
    assert (parse_cluster("8x1"), parse_cluster(" 2X4 ")) == ((8, 1), (2, 4))
    for text in ("8", "x1", "0x1", "1x0", "-1x2", "2x1.5", "251x1", ""):
        with pytest.raises(ValueError, match=f"--cluster {re.escape(repr(text))}: give"):
            parse_cluster(text)
    assert [parse_rate(text) for text in ("100mbit", "1.5gbit", "64 Kbit", "NONE")] == [100e6, 1.5e9, 64e3, None]
    for text in ("100", "fast", "-1mbit", "0mbit", "100mb", "1e3mbit", "9kbit", ""):
        with pytest.raises(ValueError, match=f"--link {re.escape(repr(text))}: give"):
            parse_rate(text)


def test_arguments_are_checked() -> None:
    for nodes, ranks, rate, name in ((0, 1, None, "nodes"), (251, 1, None, "nodes"), (1, 0, None, "ranks")):
        with pytest.raises(ValueError, match=f"{name}="):
            Cluster(nodes, ranks, rate=rate)
    for rate in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="rate="):
            Cluster(1, 1, rate=rate)
