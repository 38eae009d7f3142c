"""What a user needs to check a cluster, and our tests with it: the fp64 oracle, bounds, a pool of local ranks."""

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
