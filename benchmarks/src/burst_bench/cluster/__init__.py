"""An emulated cluster on one Linux machine, with limited link rates; needs root and iproute2."""

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
