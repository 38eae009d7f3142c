"""Attention for transformers without a plan in the call, like ring-flash-attn's adapter.

The documents are set before the call, by ``update_ring_flash_attn_params``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from burst_attention.integrations.hf.layers.attention import Attention
from burst_attention.integrations.hf.layers.dealt import Step

from ..attention.batch import PlanArgument
from ..attention.plan import Plan
from ..comm.link import connect, resolve_group
from ..integrations import hf
from ..plan.mask import Mask
from .call import plan_for

FLASH = "flash_attention_2"


class _Substitute(Attention):
    """The attention function that every layer calls. It holds the documents' plans."""

    def __init__(self, group: Any) -> None:
        super().__init__((FLASH, hf.NAME), warns=False)
        self._group = group
        self._plans: dict[int | None, Plan] = {}

    def update(self, documents: Any, group: Any) -> None:
        """See :func:`burst_attention.compat.ring_flash_attn.update_ring_flash_attn_params`."""
        transport, agreement = connect(group, None)
        with agreement.entering("update_ring_flash_attn_params"):
            if group is not self._group:
                raise ValueError(
                    f"process_group={group!r} is not the group given to substitute_hf_flash_attn; pass the same one"
                )
            mask = Mask(cu_seqlens=documents)
            total = mask.cu_seqlens[-1] if mask.cu_seqlens else 0
            if total % transport.world:
                raise ValueError(
                    f"cu_seqlens ends at {total}, which is not a multiple of {transport.world} ranks; pad the last "
                    f"document to a multiple of {transport.world} tokens, or pass model(..., plan=make_plan(...))"
                )
        self._plans = {None: plan_for(total, mask, "contiguous", group)}

    def __call__(
        self, *tensors: Any, plan: PlanArgument | Step | None = None, **keywords: Any
    ) -> tuple[torch.Tensor, None]:
        if plan is None:
            plan = self._current_plan(keywords.get("sliding_window"))
        return super().__call__(*tensors, plan=plan, **keywords)

    def _current_plan(self, window: int | None) -> Plan:
        """Return the plan of the current documents with a layer's sliding window."""
        if not self._plans:
            connect(self._group, None)[1].refuse(
                ValueError("cu_seqlens are not set; call update_ring_flash_attn_params before the model")
            )
        if window not in self._plans:
            whole = self._plans[None]
            self._plans[window] = whole.with_mask(replace(whole.mask, window=window))
        return self._plans[window]


def substitute(group: Any) -> None:
    """Register this attention under both names, replacing what was registered."""
    hf.register()  # this also registers the mask function
    attention = _Substitute(resolve_group(group))
    for name in (hf.NAME, FLASH):
        AttentionInterface.register(name, attention)


def update(documents: Any, group: Any) -> None:
    """Set the documents of the next calls in the registered attention."""
    attention = ALL_ATTENTION_FUNCTIONS.get(FLASH)
    resolved = resolve_group(group)
    if not isinstance(attention, _Substitute):
        connect(resolved, None)[1].refuse(
            ValueError(
                "transformers still uses its own attention; call substitute_hf_flash_attn(process_group, 1) first"
            )
        )
    attention.update(documents, resolved)
