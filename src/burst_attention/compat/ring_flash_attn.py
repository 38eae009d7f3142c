"""The functions of ring-flash-attn 0.1.8, computed by :func:`burst_attention.burst_attention`.

    from burst_attention.compat.ring_flash_attn import zigzag_ring_flash_attn_func   # was: from ring_flash_attn import

Names, arguments, argument order and token layouts are that package's. ``q`` is [B, S_local, Hq, D], ``k``
and ``v`` [B, S_local, Hkv, D] (packed: ``kv`` [B, S_local, 2, Hkv, D], ``qkv`` [B, S_local, 3, H, D]); the ``varlen``
functions take [local tokens, ...], without B. All take flash-attn's options after their tensors, see
:class:`burst_attention.compat.call.Options`. Dropout and ALiBi are refused. ``window_size`` must be
causal or have equal sides. ``causal`` defaults to False. Each rank holds:

========================  ====================================================================================
``ring_``                 a consecutive part of the sequence, in rank order
``zigzag_ring_``          chunks ``rank`` and ``2 * world - 1 - rank`` of 2 * world
``stripe_``               tokens ``rank``, ``rank + world``, ...
``ring_..._varlen``       a consecutive part of each document; ``cu_seqlens`` are this rank's borders, the global ones
                          divided by world
``zigzag_..._varlen``     two chunks of each document
``llama3_..._varlen``     a consecutive part of the concatenated documents
========================  ====================================================================================

The result is out in q's shape and dtype. With ``return_attn_probs=True`` it is (out, lse, None); lse is
[B, Hq, S_local], or [Hq, local tokens] of varlen functions, in fp32 (fp64 for fp64 inputs). Both are differentiable.
Every rank of ``group`` (None: the default group) must make the call. An invalid argument raises TypeError or ValueError
on all ranks. Surplus arguments and unknown names raise on this rank only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor

from ..comm.link import connect, resolve_group
from ..plan.mask import Mask
from .call import Options, attend, plan_for

Borders = tuple[int, ...]
_PREPARE = "must be what llama3_flash_attn_prepare_cu_seqlens returns on this rank, with the call's causal"


def _batch(name: str, layout: str, tensors: tuple[Any, ...], options: Options) -> Any:
    return attend(name, layout, tensors, options)


def _varlen(
    name: str, layout: str, tensors: tuple[Any, ...], options: Options, *, cu_seqlens: Any, max_seqlen: Any
) -> Any:
    """``max_seqlen`` is ignored."""

    def documents(length: int, world: int) -> Borders:
        local = _borders(cu_seqlens)
        if local[-1] != length:
            raise ValueError(
                f"cu_seqlens ends at {local[-1]}, but this rank has {length} tokens; pass this rank's borders: the "
                "global ones divided by the number of ranks"
            )
        return tuple(border * world for border in local)

    return attend(name, layout, tensors, options, documents=documents)


def _llama3(
    name: str,
    layout: str,
    tensors: tuple[Any, ...],
    options: Options,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    heads_k_stride: Any,
    local_k_slice: slice,
) -> Any:
    """The ranks exchange the starts of documents in every call: one byte per token.

    ``max_seqlen_q``, ``max_seqlen_k`` and ``heads_k_stride`` (heads per gather) are ignored.
    """
    group = resolve_group(options.group)
    transport, agreement = connect(group, None)
    message = f"cu_seqlens_q={cu_seqlens_q}, cu_seqlens_k={cu_seqlens_k} and local_k_slice={local_k_slice} {_PREPARE}"
    with agreement.entering(name):
        queries, keys = _borders(cu_seqlens_q), _borders(cu_seqlens_k)
        if not isinstance(local_k_slice, slice) or len(queries) != len(keys):
            raise ValueError(message)
        length = queries[-1]
        begins = torch.zeros(length, dtype=torch.uint8)
        begins[[border for border in queries[1:] if border < length]] = 1
        begins[:1] = local_k_slice.start == transport.rank * length
    # A rank's arguments don't say where its first document starts or where its last one ends.
    everywhere = plan_for(length * transport.world, Mask(), layout, group).unshard(begins, 0)
    borders = torch.tensor([*everywhere.nonzero().flatten().tolist(), len(everywhere)])
    with agreement.entering(name):
        right = llama3_flash_attn_prepare_cu_seqlens(borders, options.causal, transport.rank, transport.world)
        # Empty documents have no first token, so drop them from the given borders as well.
        pairs = dict.fromkeys(zip(queries, keys, strict=True))
        if (*pairs,) != (*zip(*(x.tolist() for x in right[:2]), strict=True),) or local_k_slice != right[4]:
            raise ValueError(message)
    return attend(name, layout, tensors, options, documents=lambda *_: (*borders.tolist(),))


def _functions(prefix: str, layout: str, run: Callable[..., Any] = _batch) -> list[Callable[..., Any]]:
    """Make ``prefix``_func, _kvpacked_func and _qkvpacked_func."""
    own = [name for name, each in Signature.from_callable(run).parameters.items() if each.kind is each.KEYWORD_ONLY]
    made = []
    for packing, tensors in (("", ("q", "k", "v")), ("kvpacked_", ("q", "kv")), ("qkvpacked_", ("qkv",))):
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in (*tensors, *own)]
        for field in fields(Options)[:-1]:  # except softcap, which no function takes
            parameters.append(Parameter(field.name, Parameter.POSITIONAL_OR_KEYWORD, default=field.default))
        made.append(_function(f"{prefix}_{packing}func", layout, tensors, own, Signature(parameters), run))
    return made


def _function(
    name: str, layout: str, tensors: Iterable[str], own: Iterable[str], signature: Signature, run: Callable[..., Any]
) -> Callable[..., Any]:
    def function(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        values = bound.arguments
        inputs, rest = tuple(values.pop(each) for each in tensors), {each: values.pop(each) for each in own}
        return run(name, layout, inputs, Options(**values), **rest)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"See :mod:`{__name__}`. {run.__doc__ or ''}".strip()
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _functions(
    "ring_flash_attn", "contiguous"
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _functions(
    "zigzag_ring_flash_attn", "zigzag"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _functions(
    "stripe_flash_attn", "striped"
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _functions(
    "ring_flash_attn_varlen", "contiguous-per-document", _varlen
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _functions("zigzag_ring_flash_attn_varlen", "zigzag-per-document", _varlen)
llama3_flash_attn_varlen_func, llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = (
    _functions("llama3_flash_attn_varlen", "contiguous", _llama3)
)


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return one rank's arguments of the ``llama3`` functions, from the global borders. No communication.

    Returns:
        cu_seqlens_q: borders of the documents' parts among this rank's tokens, counted from its first token.
        cu_seqlens_k: borders of the keys that these tokens see, counted from the first document's start.
        max_seqlen_q, max_seqlen_k: the maximum length of each.
        local_k_slice: the positions of the keys.

    Raises:
        ValueError: the number of tokens is not a multiple of ``world_size``.
    """
    total = int(cu_seqlens[-1])
    if total % world_size:
        raise ValueError(
            f"cu_seqlens ends at {total}, which is not a multiple of {world_size} ranks; pad the last document to a "
            f"multiple of {world_size} tokens, or use burst_attention, which takes any length"
        )
    start, stop = rank * total // world_size, (rank + 1) * total // world_size
    first, last = (int(torch.searchsorted(cu_seqlens, border)) for border in (start, stop))
    first -= int(cu_seqlens[first]) > start
    borders = cu_seqlens[first : last + 1]
    queries = borders.clamp(start, stop) - start
    keys = (borders.clamp(max=stop) if causal else borders) - borders[0]
    seen = slice(int(borders[0]), int(borders[0]) + int(keys[-1]))
    return queries, keys, int(queries.diff().max()), int(keys.diff().max()), seen


def _borders(cu_seqlens: Any) -> Borders:
    """Convert borders to integers; check that they start with 0 and never decrease."""
    borders = Mask(cu_seqlens=cu_seqlens).cu_seqlens
    assert isinstance(borders, tuple)
    return borders


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int) -> None:
    """Run ``flash_attention_2`` of transformers' models over a group; ``burst`` then works without a plan too.

    Needs transformers 5. ``heads_k_stride`` is ignored. An unsupported model raises when it is called.
    """
    from .hf import substitute

    substitute(process_group)


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Any) -> None:
    """Set the documents of the next model calls: global borders [0, ..., S], the same on all ranks.

    Each rank then passes a consecutive part of the concatenated documents. ``position_ids`` may restart at each
    document, but need not. Every rank of the group must call this function.

    Raises:
        TypeError, ValueError: the number of tokens is not a multiple of the number of ranks, or
            :func:`substitute_hf_flash_attn` was not called for this group. Every rank raises the same class.
    """
    from .hf import update

    update(cu_seqlens, process_group)
