"""Exact attention over shards: the public call, its torch operator, plans, and the sweep that computes it (GAO)."""

from .call import burst_attention
from .new_plan import make_plan
from .plan import Plan

__all__ = ["Plan", "burst_attention", "make_plan"]
