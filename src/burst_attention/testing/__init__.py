"""Tools to check a cluster, also used by our tests: the fp64 oracle, error bounds, ranks as threads."""

from .check import Case, Report, check, compare
from .local import LocalWorld, WorkerError, local_world
from .oracle import Gradients, attend, dense_attention

__all__ = [
    "Case",
    "Gradients",
    "LocalWorld",
    "Report",
    "WorkerError",
    "attend",
    "check",
    "compare",
    "dense_attention",
    "local_world",
]
