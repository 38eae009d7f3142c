"""transformers' attention without a plan in the call: documents are set in advance, as in ring-flash-attn's adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention.batch import PlanArgument
from ..attention.plan import Plan
from ..comm.link import connect, resolve_group
from ..integrations import hf
from ..integrations.hf.attention import Attention
from ..plan.mask import Mask
from .call import plan_for

FLASH = "flash_attention_2"


class _Substitute(Attention):
    """The function that every layer calls. The documents are kept in it, and it in transformers' registry."""

    def __init__(self, group: Any) -> None:
        super().__init__((FLASH, hf.NAME))
        self._group = group
        self._plans: dict[int | None, Plan] = {}

    def update(self, documents: Any, group: Any) -> None:
        """See :func:`burst_attention.compat.ring_flash_attn.update_ring_flash_attn_params`."""
        transport, agreement = connect(group, None)
        with agreement.entering("update_ring_flash_attn_params"):
            if group is not self._group:
                raise ValueError(f"process_group={group!r} is not that of substitute_hf_flash_attn; pass the same one")
            mask = Mask(cu_seqlens=documents)
            total = mask.cu_seqlens[-1] if mask.cu_seqlens else 0
            if total % transport.world:
                raise ValueError(
                    f"cu_seqlens ends at {total}, which {transport.world} ranks can't share equally; pad the last "
                    f"document to a multiple of {transport.world} tokens, or pass model(..., plan=make_plan(...))"
                )
        self._plans = {None: plan_for(total, mask, "contiguous", group)}

    def __call__(self, *tensors: Any, plan: PlanArgument | None = None, **keywords: Any) -> tuple[torch.Tensor, None]:
        if plan is None:
            plan = self._told(keywords.get("sliding_window"))
        return super().__call__(*tensors, plan=plan, **keywords)

    def _told(self, window: int | None) -> Plan:
        """Return the plan of the documents set last, under a layer's window."""
        if not self._plans:
            connect(self._group, None)[1].refuse(
                ValueError("cu_seqlens are not known; call update_ring_flash_attn_params before the model")
            )
        if window not in self._plans:
            whole = self._plans[None]
            self._plans[window] = whole.with_mask(replace(whole.mask, window=window))
        return self._plans[window]


def substitute(group: Any) -> None:
    """Register the attention under both names, in place of what was there."""
    hf.register()  # and what asks for its masks
    attention = _Substitute(resolve_group(group))
    for name in (hf.NAME, FLASH):
        AttentionInterface.register(name, attention)


def update(documents: Any, group: Any) -> None:
    """Tell the registered attention which documents come next."""
    attention = ALL_ATTENTION_FUNCTIONS.get(FLASH)
    resolved = resolve_group(group)
    if not isinstance(attention, _Substitute):
        connect(resolved, None)[1].refuse(
            ValueError(
                "the attention of transformers is its own; call substitute_hf_flash_attn(process_group, 1) first"
            )
        )
    attention.update(documents, resolved)
