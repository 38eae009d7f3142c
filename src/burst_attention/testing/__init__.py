"""Tools to check a cluster, also used by our tests: the fp64 oracle, error bounds, a pool of local ranks."""

from .check import Case, Report, check, compare
from .local import LocalWorld, local_world
from .oracle import Gradients, attend, dense_attention
from .pool import WorkerError, WorkerPool

__all__ = [
    "Case",
    "Gradients",
    "LocalWorld",
    "Report",
    "WorkerError",
    "WorkerPool",
    "attend",
    "check",
    "compare",
    "dense_attention",
    "local_world",
]
