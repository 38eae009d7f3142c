"""Exact distributed attention for sequences that no longer fit one device (BurstAttention, arXiv 2403.09347)."""

from importlib.metadata import PackageNotFoundError, version

from .attention import burst_attention
from .attention.plan import Plan, make_plan
from .comm.agreement import DisagreementError, PeerError
from .comm.transport import ExchangeError
from .plan.mask import Mask

try:
    __version__ = version("burst-attention")
except PackageNotFoundError:  # imported from a source tree that nobody installed
    __version__ = "0+source"

__all__ = ["DisagreementError", "ExchangeError", "Mask", "PeerError", "Plan", "burst_attention", "make_plan"]
