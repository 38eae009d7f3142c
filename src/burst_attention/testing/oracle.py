"""The oracle: dense attention from its definition, in fp64, with gradients by autograd."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..plan.mask import Mask

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@dataclass(frozen=True)
class Gradients:
    """out, lse and the gradients of q, k, v and sinks, for the whole sequence or one shard. None: not computed."""

    out: Tensor
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None

    def items(self) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) for all tensors that are not None."""
        named = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, x) for name, x in named if x is not None]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return differentiable (out, lse) of q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] in their dtype.

    Queries have positions ``query_offset`` to ``query_offset`` + Sq - 1, keys 0 to Sk - 1. A query that
    sees nothing gets out 0 and lse -inf. ``sinks`` [Hq] are the logits of a last column without a value.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seen = seen_of(mask, q, k, query_offset)
    blind = ~seen.any(-1)
    scores = q @ k.mT * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*q.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2) if v.shape[2] else v.new_zeros(*v.shape[:2], 1, v.shape[3])
        seen, blind = torch.nn.functional.pad(seen, (0, 1), value=True), torch.zeros_like(blind)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(blind.unsqueeze(-1), 0.0)
    lse = torch.logsumexp(scores, -1) if q.shape[2] else scores.sum(-1)  # no tokens: [B, Hq, 0], differentiable
    p = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(blind.unsqueeze(-1), 0.0)
    return p @ v, lse.masked_fill(blind, -math.inf)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_offset: int = 0,
) -> Gradients:
    """Compute dense attention in fp64, with gradients if ``dout`` or ``dlse`` is given."""
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    q, k, v, *rest = leaves = tuple(x.detach().double().requires_grad_() for x in inputs)
    sinks = rest[0] if rest else None
    out, lse = dense_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, query_offset=query_offset)
    return _with_gradients(leaves, out, lse, dout, dlse)


def seen_of(mask: Mask, q: Tensor, k: Tensor, query_offset: int = 0) -> Tensor:
    """Return which keys each query sees, bool [Sq, Sk]."""
    last = query_offset + q.shape[2]
    seen = mask.dense(max(last, k.shape[2]))[query_offset:last, : k.shape[2]]
    return torch.from_numpy(seen).to(q.device)


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    dout: Tensor,
    scale: float | None = None,
    query_offset: int = 0,
) -> Gradients:
    """Run PyTorch's own kernel on one device in the tensors' dtype. Its error sets the bound for that dtype."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    seen = None
    if mask != Mask() or query_offset or q.shape[2] != k.shape[2]:
        seen = seen_of(mask, q, k, query_offset)
    # On a GPU, masks with grouped queries may select a kernel that computes in fp32; its error is too small a bound.
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) if q.is_cuda else x for x in (k, v))
    grouped = q.shape[1] != keys.shape[1]
    fused = sdpa_kernel(FUSED) if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) else nullcontext()
    with fused:
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=grouped
        )
    return _with_gradients((q, k, v), out, None, dout, None)


def _with_gradients(
    leaves: tuple[Tensor, ...], out: Tensor, lse: Tensor | None, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    loss = out.new_zeros(())
    if dout is not None:
        loss = loss + (out * dout.to(out.dtype)).sum()
    if dlse is not None and lse is not None:
        # A row that sees nothing has lse -inf and no gradient, but -inf * 0 is NaN.
        loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * dlse.to(lse.dtype)).sum()
    if dout is None and dlse is None:
        return Gradients(out.detach(), None if lse is None else lse.detach())
    # The lse does not depend on v, so autograd may have no gradient for v.
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return Gradients(out.detach(), None if lse is None else lse.detach(), *grads)
