"""Activation checkpointing that recomputes a layer without repeating its attention or exchanges."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from . import operator as op


def keep_attention() -> tuple[Any, Any]:
    """Save (out, lse) in activation checkpointing.

    Pass this function as ``context_fn`` to ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``. The
    backward recomputes the rest of the layer. It does not recompute the attention, which sends nothing again.

    Each call saves one tensor of out's size and one of lse's. If the plan caches the fetched q, k and v, they are saved
    too. They are as large as the call's own q, k and v. Use ``make_plan(strategy=Strategy(cache_qkv=False))`` to avoid
    that.

    With transformers: ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})``.
    """
    assert op.attend is not None  # importing the module registers the operator
    return create_selective_checkpoint_contexts([torch.ops.burst_attention.attend.default])
