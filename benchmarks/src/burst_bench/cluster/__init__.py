"""Emulate a cluster on this machine.

Each node is a network namespace. Pairs of virtual interfaces (veth) connect the nodes to a bridge, and token buckets
limit the rate of each link. The cluster creates and removes all of its namespaces. It never touches the machine's own
network, and no route leads out of the namespaces: traffic flows only between nodes.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .namespaces import ClusterError, call, enter, exit_on_sigterm, inside, name_host, remove, remove_leftovers, tools

__all__ = [
    "INTERFACE",
    "NETWORK",
    "Cluster",
    "ClusterError",
    "Entry",
    "parse_cluster",
    "parse_rate",
    "remove_leftovers",
]

NETWORK = ipaddress.ip_network("198.18.0.0/15")  # reserved for network benchmarks (RFC 2544), so never in use
MOST_NODES = 250
INTERFACE = "burst0"  # a node's only interface except lo; the host has no interface of this name
FIRST_PORT = 29500
_WINDOW = 1 << 20  # bytes that a TCP connection may have in flight
_PACKET = 32768  # bytes of one veth packet; without a network card there is no segmentation
_SETTINGS = {  # for each namespace, under /proc/sys/net
    # IPv6 sends messages on every new link, which the byte counters would include.
    "ipv6/conf/default/disable_ipv6": "1",
    # Fix the algorithm, so that figures don't depend on the host's default. Every kernel has Reno; as these links drop
    # no packets, its window only grows. BBR's pacing slows eight nodes on few cores considerably.
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_rmem": f"4096 131072 {_WINDOW}",
}
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_cluster(text: str) -> tuple[int, int]:
    """Parse ``"8x1"`` into (nodes, ranks per node).

    ValueError: The text has another form, or a number is out of range.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text.strip().lower())
    if match is None:
        raise ValueError(f"--cluster {text!r}: give NODESxRANKS, such as 8x1 for 8 nodes with one rank each")
    nodes, ranks = int(match[1]), int(match[2])
    if not 1 <= nodes <= MOST_NODES or ranks < 1:
        raise ValueError(f"--cluster {text!r}: give 1 to {MOST_NODES} nodes and at least one rank on each")
    return nodes, ranks


def parse_rate(text: str) -> float | None:
    """Parse a rate such as ``"1.5gbit"`` into bits per second; ``"none"`` gives None, no limit.

    ValueError: The text has another form, or the rate is below 10 kbit/s.
    """
    lowered = text.strip().lower()
    if lowered == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmg]?bit)", lowered)
    if match is None:
        raise ValueError(f"--link {text!r}: give a number with kbit, mbit or gbit, such as 100mbit, or none")
    rate = float(match[1]) * _UNITS[match[2]]
    if rate < 1e4:
        raise ValueError(f"--link {text!r}: give at least 10kbit, or none for no limit")
    return rate


@dataclass(frozen=True)
class Entry:
    """Move a process into its node; call it before starting any thread that communicates."""

    namespace: str  # name of the node's namespace under /run/netns
    interface: str  # network interface for gloo
    rendezvous: str  # address on which rank 0 listens, as ``init_method`` of ``init_process_group``

    def __call__(self) -> str:
        """Enter the node and return the rendezvous.

        OSError: The namespace no longer exists; send nothing then.
        """
        enter(self.namespace)
        name_host(self.namespace)  # ranks compare host names to find out who shares their node
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        return self.rendezvous


class Cluster:
    """Emulated hosts with the same number of ranks each; a context manager.

    Rank r is on node r // ranks. Ranks of one node communicate over loopback, which has no limit and isn't counted.
    Without a ``with`` block, call :meth:`close`.

    Args:
        nodes: Number of hosts, 1 to 250.
        ranks: Ranks on each host.
        rate: Rate of each node's link in bits per second, in each direction; None for no limit.

    ValueError: An argument is out of range.
    ClusterError: The process isn't root, iproute2 is missing, or the kernel refused; nothing is left behind.
    """

    def __init__(self, nodes: int, ranks: int, *, rate: float | None = None) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise ValueError(f"nodes={nodes}: give 1 to {MOST_NODES}")
        if ranks < 1:
            raise ValueError(f"ranks={ranks}: give at least 1 on each node")
        _check_rate(rate)
        self.nodes, self.ranks, self.rate = nodes, ranks, rate
        self._tools = tools()
        self._owner = os.getpid()
        self._prefix = f"burst-{self._owner}-{secrets.token_hex(3)}-"
        self._switch = f"{self._prefix}switch"
        self._port = FIRST_PORT
        self._handlers = ExitStack()
        remove_leftovers()
        atexit.register(self.close)
        try:
            self._handlers.enter_context(exit_on_sigterm())
            self._make()
            if rate is not None:
                self.set_rate(rate)
        except BaseException:
            self.close()
            raise

    @property
    def world(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.ranks

    def entry(self, rank: int, *, port: int = FIRST_PORT) -> Entry:
        """Return the entry of ``rank``'s process into its node.

        Args:
            rank: Rank of the process.
            port: Port on which rank 0 listens; each process group needs another.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank={rank}: this cluster has ranks 0 to {self.world - 1}")
        return Entry(self._node(rank // self.ranks), INTERFACE, f"tcp://{NETWORK[1]}:{port}")

    def entries(self) -> list[Entry]:
        """Return an entry for each rank of a new process group."""
        port, self._port = self._port, self._port + 1
        return [self.entry(rank, port=port) for rank in range(self.world)]

    def set_rate(self, rate: float | None) -> None:
        """Limit each node's link to ``rate`` bits per second in each direction; None for no limit.

        The limit takes effect immediately, also on open connections.
        """
        _check_rate(rate)
        kind = "noqueue" if rate is None else self._bucket(rate)
        self._batch("tc", self._switch, [f"qdisc replace dev node{k} root {kind}" for k in range(self.nodes)])
        for k in range(self.nodes):
            self._batch("tc", self._node(k), [f"qdisc replace dev {INTERFACE} root {kind}"])
        self.rate = rate

    def close(self) -> None:
        """Remove all namespaces; processes in them lose their links."""
        if os.getpid() != self._owner:  # a forked copy must not remove its parent's cluster
            return
        remove(self._prefix, self._tools["ip"])
        self._handlers.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _node(self, k: int) -> str:
        return f"{self._prefix}{k}"

    def _make(self) -> None:
        """Create the namespaces, the bridge and the links."""
        ip, names = self._tools["ip"], [self._switch, *map(self._node, range(self.nodes))]
        for name in names:
            call([ip, "netns", "add", name])
            _configure(name)
        lines = ["link set lo up", "link add bridge0 type bridge stp_state 0 mcast_snooping 0", "link set bridge0 up"]
        for k in range(self.nodes):
            lines += [
                f"link add node{k} type veth peer name {INTERFACE} netns {self._node(k)}",
                f"link set node{k} gso_max_size {_PACKET} master bridge0 up",
            ]
        self._batch("ip", self._switch, lines)
        for k in range(self.nodes):
            address = f"{NETWORK[k + 1]}/{NETWORK.prefixlen}"
            up = f"link set {INTERFACE} gso_max_size {_PACKET} up"
            lines = ["link set lo up", f"address add {address} dev {INTERFACE}", up]
            self._batch("ip", self._node(k), lines)

    def _bucket(self, rate: float) -> str:
        """Return the token bucket's description for ``tc``.

        Its burst is one packet with headers, or a millisecond of a fast link. Its queue holds all TCP windows that can
        be open to a node, so the link delays packets but never drops them.
        """
        connections = self.ranks * max(1, self.world - self.ranks)
        burst, limit = max(_PACKET * 9 // 8, round(rate / 8e3)), min(_WINDOW * connections, 1 << 30)
        return f"tbf rate {round(rate)}bit burst {burst} limit {limit}"

    def _batch(self, tool: str, namespace: str, lines: Sequence[str]) -> None:
        call([self._tools[tool], "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")


def _configure(namespace: str) -> None:
    with inside(namespace):
        for name, value in _SETTINGS.items():
            path = Path("/proc/sys/net") / name
            try:
                path.write_text(value)
            except FileNotFoundError:  # some kernels have no IPv6
                if not name.startswith("ipv6"):
                    raise
            except OSError as error:
                raise ClusterError(f"can't set {path} to {value!r} in a new network namespace: {error}") from error


def _check_rate(rate: float | None) -> None:
    if rate is not None and not 1e4 <= rate < float("inf"):
        raise ValueError(f"rate={rate}: give at least 10000 bits per second, or None for no limit")
