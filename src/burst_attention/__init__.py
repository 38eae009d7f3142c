"""Exact distributed attention for sequences too long for one device (BurstAttention, arXiv 2403.09347)."""

from importlib.metadata import PackageNotFoundError, version

from .attention import burst_attention
from .attention.hardware import CallShape, Hardware
from .attention.new_plan import make_plan
from .attention.plan import Plan
from .comm.agreement import DisagreementError, PeerError
from .comm.transport import ExchangeError
from .plan.mask import Mask
from .plan.strategy import Strategy

try:
    __version__ = version("burst-attention")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+source"

__all__ = [
    "CallShape",
    "DisagreementError",
    "ExchangeError",
    "Hardware",
    "Mask",
    "PeerError",
    "Plan",
    "Strategy",
    "burst_attention",
    "make_plan",
]
