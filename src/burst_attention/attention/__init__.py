"""Exact attention over shards: the public call, its torch operator, plans, and the sweep that computes it (GAO)."""

from .batch import Reach, mask_of, widest_of
from .call import burst_attention
from .chosen import choose_blocks, choose_keys, chosen_attention, chosen_bytes
from .dealt import dealt_bytes
from .footprint import peak_bytes
from .hardware import known_rates, shape_of, usual_rates
from .new_plan import make_plan
from .plan import Plan

__all__ = [
    "Plan",
    "Reach",
    "burst_attention",
    "choose_blocks",
    "choose_keys",
    "chosen_attention",
    "chosen_bytes",
    "dealt_bytes",
    "known_rates",
    "make_plan",
    "mask_of",
    "peak_bytes",
    "shape_of",
    "usual_rates",
    "widest_of",
]
