"""An emulated cluster on this machine: a network namespace per node, veth pairs on a bridge, token buckets as links.

Everything lies in namespaces that the cluster makes and removes itself; the machine's own network is neither seen nor
touched. There is no route out of them: traffic can go only from node to node.
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

NETWORK = ipaddress.ip_network("198.18.0.0/15")  # for benchmarks of networks (RFC 2544): nobody's address
MOST_NODES = 250
INTERFACE = "burst0"  # a node's only one but lo; a name that no machine's own interface has
FIRST_PORT = 29500
_WINDOW = 1 << 20  # bytes that a TCP connection may have under way
_PACKET = 32768  # bytes that cross a veth as one (segmentation is left to a network card that isn't there)
_SETTINGS = {  # of each namespace, under /proc/sys/net
    # IPv6 would chat on every new link of its own accord, and be counted.
    "ipv6/conf/default/disable_ipv6": "1",
    # The host's default would make the figures the host's. Reno is in every kernel and, as nothing is dropped here,
    # only opens its window; BBR's pacing costs eight nodes on few cores much of their rate.
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_rmem": f"4096 131072 {_WINDOW}",
}
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_cluster(text: str) -> tuple[int, int]:
    """``"8x1"``: (nodes, ranks of each node).

    Raises:
        ValueError: another form, or a number out of range.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text.strip().lower())
    if match is None:
        raise ValueError(f"--cluster {text!r}: give NODESxRANKS, such as 8x1 for 8 nodes with a rank each")
    nodes, ranks = int(match[1]), int(match[2])
    if not 1 <= nodes <= MOST_NODES or ranks < 1:
        raise ValueError(f"--cluster {text!r}: give 1 to {MOST_NODES} nodes and at least one rank on each")
    return nodes, ranks


def parse_rate(text: str) -> float | None:
    """``"100mbit"``, ``"1.5gbit"``: bits per second; ``"none"``: None, no limit.

    Raises:
        ValueError: another form, or too little.
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
    """How a process enters its node; called as the first thing in it, before any thread that is to talk is started.

    Attributes:
        namespace: the node's, under /run/netns.
        interface: the one that gloo shall use.
        rendezvous: where rank 0 listens, as ``init_method`` of ``init_process_group``.
    """

    namespace: str
    interface: str
    rendezvous: str

    def __call__(self) -> str:
        """Enter; return the rendezvous. OSError if the namespace is gone: nothing may then be sent."""
        enter(self.namespace)
        name_host(self.namespace)  # by which ranks see who shares a node with them
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        return self.rendezvous


class Cluster:
    """``nodes`` emulated hosts with ``ranks`` ranks each. Use as a context manager, or close it.

    Rank r is on node r // ranks. Ranks of one node talk over its loopback, which has no limit and isn't counted.

    Args:
        nodes: how many hosts, 1 to 250.
        ranks: ranks of each.
        rate: of each node's link in bits per second, each way; None for no limit.

    Raises:
        ValueError: an argument is out of range.
        ClusterError: not root, no iproute2, or the kernel refused; nothing is then left behind.
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
        """Ranks in all."""
        return self.nodes * self.ranks

    def entry(self, rank: int, *, port: int = FIRST_PORT) -> Entry:
        """How ``rank``'s process enters its node. ``port``: where rank 0 listens; each group needs its own."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank={rank}: this cluster has ranks 0 to {self.world - 1}")
        return Entry(self._node(rank // self.ranks), INTERFACE, f"tcp://{NETWORK[1]}:{port}")

    def entries(self) -> list[Entry]:
        """One for each rank of a new group."""
        port, self._port = self._port, self._port + 1
        return [self.entry(rank, port=port) for rank in range(self.world)]

    def set_rate(self, rate: float | None) -> None:
        """Limit what each node sends and what it receives to ``rate`` bits per second each; None for no limit.

        Takes effect at once, on open connections too.
        """
        _check_rate(rate)
        kind = "noqueue" if rate is None else self._bucket(rate)
        self._batch("tc", self._switch, [f"qdisc replace dev node{k} root {kind}" for k in range(self.nodes)])
        for k in range(self.nodes):
            self._batch("tc", self._node(k), [f"qdisc replace dev {INTERFACE} root {kind}"])
        self.rate = rate

    def close(self) -> None:
        """Remove everything. Processes inside lose their links."""
        if os.getpid() != self._owner:  # a fork's copy: it isn't its to remove
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
        """Namespaces, bridge and links."""
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
        """The token bucket. What it lets pass at once is a packet with its headers, or a millisecond of a fast link.

        Its queue holds every window that can be open to a node, so a link delays and never drops.
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
            except FileNotFoundError:  # IPv6 is left out of some kernels
                if not name.startswith("ipv6"):
                    raise
            except OSError as error:
                raise ClusterError(f"{path} can't be set to {value!r} in a new network namespace: {error}") from error


def _check_rate(rate: float | None) -> None:
    if rate is not None and not 1e4 <= rate < float("inf"):
        raise ValueError(f"rate={rate}: give at least 10000 bits per second, or None for no limit")
