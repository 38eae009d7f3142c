"""What activation checkpointing keeps: recomputing a layer need not repeat its attention, nor its exchanges."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from . import operator as op


def keep_attention() -> tuple[Any, Any]:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` that keeps (out, lse).

    Everything else of a layer is computed again in the backward; the attention is not, and sends nothing. It costs one
    tensor of out's size and one of lse's for each call; where a plan keeps what a forward fetched, that, too, which is
    as much as q, k and v: ``make_plan(keep=False)`` is for that. With transformers:
    ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})``.
    """
    assert op.attend is not None  # imported, hence registered
    return create_selective_checkpoint_contexts([torch.ops.burst_attention.attend.default])
