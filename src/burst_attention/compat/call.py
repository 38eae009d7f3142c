"""Translate a flash-attn call: its options to a mask, its shards to a plan, the result to its shapes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..attention.call import burst_attention
from ..attention.new_plan import make_plan
from ..attention.plan import Plan
from ..attention.sweep import DeviceIndices
from ..comm.link import connect, resolve_group
from ..plan.mask import Mask
from ..plan.schedule import Schedule
from ..plan.strategy import Strategy
from ..planner.planner import Planner

MOST_PLANS = 16  # cached per group; a step's micro-batches may alternate between masks and lengths
_Planned = OrderedDict[tuple[int, Mask, str], tuple[Schedule, Planner, DeviceIndices]]

# Plans by group. The emulated functions take no plan, so we cache plans here. The cache is small, refers weakly to each
# group and holds no transport; a destroyed group therefore leaves nothing behind.
_PLANNED: weakref.WeakKeyDictionary[Any, _Planned] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Options:
    """The options of flash-attn's functions, in their order, as callers may pass them by position."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Any = None
    deterministic: bool = False  # on a GPU it needs torch.use_deterministic_algorithms(True)
    return_attn_probs: bool = False
    group: Any = None
    softcap: float = 0.0

    def mask(self, documents: tuple[int, ...] | None) -> Mask:
        """Return the mask of these options for ``documents`` with these borders; refuse those that have none."""
        if self.dropout_p:
            raise ValueError(f"dropout_p={self.dropout_p}: dropout is not supported; pass dropout_p=0.0")
        if self.alibi_slopes is not None:
            raise ValueError(
                "alibi_slopes: ALiBi is not supported; pass alibi_slopes=None and use rotary embeddings for positions"
            )
        if not isinstance(self.window_size, (tuple, list)) or len(self.window_size) != 2:
            raise TypeError(f"window_size={self.window_size!r} must be (left, right), such as (-1, -1) for no window")
        left, right = self.window_size
        causal = bool(self.causal) or right == 0  # right=0 means no key after the query
        if not causal and left != right and (left >= 0 or right >= 0):
            raise ValueError(
                f"window_size={self.window_size} with causal=False: both sides must be equal; pass causal=True, or "
                f"window_size=({max(left, right)}, {max(left, right)})"
            )
        return Mask(causal=causal, window=left + 1 if left >= 0 else None, cu_seqlens=documents)


def attend(
    name: str,
    layout: str,
    tensors: tuple[Any, ...],
    options: Options,
    *,
    documents: Callable[[int, int], tuple[int, ...]] | None = None,
) -> Any:
    """Compute attention over a sequence of which every rank holds ``S_local`` tokens, in ``layout``.

    ``name``: of the called function. ``tensors``: q, k, v; or q and kv; or qkv. ``documents``: returns the global
    borders, given S_local and the number of ranks; then no tensor has a batch dimension.
    """
    group = resolve_group(options.group)
    transport, agreement = connect(group, None)
    with agreement.entering(name):
        q, k, v = (_batched(x, documents is not None) for x in _unpacked(tensors, packed_dim=1 if documents else 2))
        length = q.shape[2]
        borders = None if documents is None else documents(length, transport.world)
        if options.deterministic and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
            raise ValueError("deterministic=True: call torch.use_deterministic_algorithms(True)")
        mask = options.mask(borders)
        if transport.world > 1 and layout.startswith("zigzag"):
            _check_halves(borders or (0, length * transport.world), transport.world)
    plan = plan_for(length * transport.world, mask, layout, group)
    out, lse = burst_attention(
        q, k, v, plan, scale=options.softmax_scale, softcap=options.softcap or None, return_lse=True
    )
    out = out.transpose(1, 2).contiguous()
    if documents is not None:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse, None) if options.return_attn_probs else out


def plan_for(seqlen: int, mask: Mask, layout: str, group: Any) -> Plan:
    """Return a cached plan for these arguments. All ranks must request the same plans in the same order."""
    if group is None or group.size() == 1:  # nothing is exchanged
        return make_plan(seqlen, mask=mask, group=group, strategy=Strategy(layout=layout))
    planned, key = _PLANNED.setdefault(group, OrderedDict()), (seqlen, mask, layout)
    if key not in planned:
        plan = make_plan(seqlen, mask=mask, group=group, strategy=Strategy(layout=layout))
        planned[key] = plan.schedule, plan.planner, plan.indices
        if len(planned) > MOST_PLANS:
            planned.popitem(last=False)
    planned.move_to_end(key)
    schedule, planner, indices = planned[key]
    return Plan(schedule, planner, *connect(group, None), indices=indices)


def _unpacked(tensors: tuple[Any, ...], *, packed_dim: int) -> list[Any]:
    """Return q, k and v. The last of ``tensors`` may be packed along ``packed_dim``."""
    *single, last = tensors
    count = 3 - len(single)
    if count == 1:
        return [*tensors]
    if not isinstance(last, Tensor) or last.ndim != packed_dim + 3 or last.shape[packed_dim] != count:
        shape = list(last.shape) if isinstance(last, Tensor) else type(last).__name__
        name = "kv" if single else "qkv"
        raise ValueError(f"{name} is {shape}; it must have {packed_dim + 3} dims, and dim {packed_dim} must be {count}")
    return [*single, *last.unbind(packed_dim)]


def _batched(x: Any, of_documents: bool) -> Tensor:
    """Convert [B, S, H, D], or [S, H, D] of documents, to [B, H, S, D]."""
    wanted = "[tokens, heads, head dim]" if of_documents else "[batch, S_local, heads, head dim]"
    if not isinstance(x, Tensor) or x.ndim != wanted.count(",") + 1:
        shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"q, k and v must be {wanted}, but one is {shape}")
    return (x.unsqueeze(0) if of_documents else x).transpose(1, 2)


def _check_halves(borders: tuple[int, ...], world: int) -> None:
    """Refuse documents that can't be cut into 2 * world equal chunks: their zigzag shards are ambiguous."""
    for start, stop in pairwise(borders):
        if (stop - start) % (2 * world):
            raise ValueError(
                f"{stop - start} tokens can't be cut into 2 x {world} equal chunks, two for each of {world} ranks; "
                f"pad them to a multiple of {2 * world}, or use burst_attention, which takes any length"
            )
