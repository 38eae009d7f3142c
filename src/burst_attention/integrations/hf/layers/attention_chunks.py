"""Compute the attention of a layer in chunks of heads, where an indexer chooses the keys of some layer.

The layer's own code runs once, for all heads, and so does its indexer: each chunk attends to the keys of one choice.
So a layer's queries are whole, unlike in :mod:`.head_chunks`, and whatever follows its attention is left alone.

Where keys are latents (:mod:`.indexed`), queries and outputs as wide as these exist for one chunk at a time. A chunk
keeps its outputs for the backward, which projects its queries again and repeats no exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from burst_attention.attention.call import keep_attention
from burst_attention.attention.head_chunks import added
from burst_attention.plan.groups import Groups

from ..classes import become
from .indexed import attend_to_latents, sizes_of_calls, to_chosen_rows


class InHeadChunks(nn.Module):
    """An attention of transformers whose call of the attention interface runs in chunks of heads."""

    head_chunks: int


def convert(module: nn.Module, chunks: int) -> None:
    """Let an attention compute its heads in chunks; raise ValueError if it can't."""
    sizes = sizes_of_calls(module)
    heads, of_keys = sizes["q_heads"], sizes["kv_heads"]
    if not Groups.divide(chunks, q_heads=heads, kv_heads=of_keys):
        keys, divisors = f" and {of_keys} key-value heads", f"{of_keys}, or a multiple of it that divides {heads}"
        if hasattr(module, "kv_b_proj") or heads == of_keys:
            keys, divisors = "", f"{heads}"
        raise ValueError(
            f"memory=Memory(attention_chunks={chunks}) can't split the {heads} query heads{keys} of "
            f"{type(module).__name__} evenly; choose a divisor of {divisors}"
        )
    become(module, InHeadChunks, head_chunks=chunks)


@torch.compiler.disable
def attend_in_chunks(
    attend: Callable[..., Tensor],
    chunks: int,
    weight: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Any,
    *,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute the attention [B, H, S_local, Dv] of q, k, v in chunks of heads.

    ``weight``: of :func:`attend_to_latents`, if k and v are the latent and the rotary part; it then takes the place of
    ``attend``, which gets the arguments of :func:`burst_attention`. ``indices``: the choice, if there is one, [B,
    S_local, count], or [B, Hkv, S_local, count] of each key-value head.
    """
    of_heads = indices is not None and indices.dim() == 4 and indices.shape[1] > 1
    parts: list[Sequence[Any]] = [_of_chunks(x, chunks) for x in (q, k, v)]
    weights = None if weight is None else weight.split(q.shape[1] // chunks)
    of_sinks = None if sinks is None else sinks.split(q.shape[1] // chunks)
    choices = _of_chunks(indices, chunks) if indices is not None and of_heads else [indices] * chunks
    outs = []
    for n, tensors in enumerate(zip(*parts, strict=True)):
        more = options | ({} if of_sinks is None else {"sinks": of_sinks[n]})
        more |= {} if indices is None else {"indices": choices[n]}
        if weights is None:
            outs.append(attend(*tensors, plan, **more))
        else:
            outs.append(_projecting_again(weights[n], *tensors, plan, **more))
    return torch.cat(outs, 1)


def _projecting_again(*arguments: Any, **options: Any) -> Tensor:
    """Return what :func:`attend_to_latents` does; its backward projects queries and outputs again."""
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": keep_attention}
    out: Tensor = checkpoint(attend_to_latents, *arguments, attend=to_chosen_rows, **options, **how)
    return out


def _of_chunks(x: Tensor, chunks: int) -> list[Tensor]:
    """Return each chunk's heads of [B, H, ...]. Chunks may share a head."""
    heads = x.split(max(1, x.shape[1] // chunks), 1)
    times = chunks // len(heads)
    return [copy for part in heads for copy in (_Shared.apply(part, times) if times > 1 else [part])]


class _Shared(torch.autograd.Function):
    """A tensor for each of some chunks; its gradients are summed in fp32 at least, in their order, and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total: Tensor | None = None
        for grad in grads:
            total = added(total, grad)
        assert total is not None
        return total.to(grads[0].dtype), None
