"""An emulated cluster on one machine, for what differs only where bytes cost time: root and iproute2 on Linux."""

from .emulated import INTERFACE, NETWORK, Cluster, Entry, parse_cluster, parse_rate
from .namespaces import ClusterError, remove_leftovers

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
