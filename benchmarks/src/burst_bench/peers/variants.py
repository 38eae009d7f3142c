"""Every way of computing one causal attention over W ranks that ``peers.py`` compares: the packages' and ours.

A variant says which tokens a rank holds, in what layout of memory its package wants them, and how it is called. All
functions but :func:`positions` and :func:`refusal` run on a rank, where a process group is at hand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

import burst_attention
from burst_attention import make_plan

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
FLASH_ATTN = ("ring_flash_attn", "yunchang")  # the packages that import flash_attn
REQUIREMENTS = {  # the versions that these calls were written for
    "ring_flash_attn": "ring-flash-attn==0.1.8",
    "yunchang": "yunchang==0.6.4",
    "ring_attention_pytorch": "ring-attention-pytorch==0.5.20",
}


@dataclass(frozen=True)
class Call:
    """What a variant's ``build`` makes on a rank.

    Attributes:
        attention: (q, k, v), this rank's shards, -> out.
        plan: ours; None for a package's.
        detail: what was chosen, in words.
    """

    attention: Attention
    plan: burst_attention.Plan | None = None
    detail: str = ""


@dataclass(frozen=True)
class Size:
    """The whole problem: tokens and heads over all ranks, batch 1."""

    world: int
    seq_len: int
    heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way.

    Attributes:
        package: what it imports.
        build: (size) -> Call, on every rank at the same time.
        order: ``contiguous``, ``zigzag`` or ``striped`` over the ring.
        ulysses: ranks of one head-parallel group, (size) -> int; neighbours in the ring's shard share it out.
        heads_first: tensors are [B, H, S, D] rather than [B, S, H, D].
        backward: whether it has one that is right over several ranks.
    """

    name: str
    package: str
    build: Callable[[Size], Call]
    order: str = "contiguous"
    ulysses: Callable[[Size], int] = lambda size: 1
    heads_first: bool = False
    backward: bool = True

    @property
    def is_ours(self) -> bool:
        return self.package == "burst_attention"


def positions(order: str, size: Size, ulysses: int, rank: int) -> Tensor:
    """int64 [S / W]: the global positions of ``rank``'s tokens, in the order in which it holds them."""
    ring, member, part = size.world // ulysses, rank // ulysses, rank % ulysses
    everything = torch.arange(size.seq_len)
    if order == "contiguous":
        shard = everything.chunk(ring)[member]
    elif order == "zigzag":
        chunks = everything.chunk(2 * ring)
        shard = torch.cat([chunks[member], chunks[2 * ring - 1 - member]])
    elif order == "striped":
        shard = everything[member::ring]
    else:
        raise ValueError(f"order={order!r} is unknown; choose one of contiguous, zigzag, striped")
    return shard.chunk(ulysses)[part]


def refusal(variant: Variant, size: Size, device: str) -> str | None:
    """Why ``variant`` can't run, as far as that is known beforehand."""
    if importlib.util.find_spec(variant.package) is None:
        return f"not installed: pip install {REQUIREMENTS[variant.package]}"
    if device == "cuda" and variant.package in FLASH_ATTN and importlib.util.find_spec("flash_attn") is None:
        return "on a GPU it needs flash-attn: pip install flash-attn --no-build-isolation"
    ulysses = variant.ulysses(size)
    if variant.order != "contiguous" and size.world < 2 * ulysses:
        return f"needs at least {2 * ulysses} ranks, not {size.world}"
    if size.world % ulysses:
        return f"needs a multiple of {ulysses} ranks, not {size.world}"
    if size.heads % ulysses:
        return f"needs a multiple of {ulysses} heads, not {size.heads}"
    if not variant.is_ours and size.seq_len % (2 * size.world):
        return f"needs a multiple of {2 * size.world} tokens, not {size.seq_len}"
    return None


def package_version(package: str) -> str:
    """Of an installed package; ours as it says of itself."""
    return version(package.replace("_", "-"))


def _burst(route: str = "auto", travels: str = "auto") -> Callable[[Size], Call]:
    def build(size: Size) -> Call:
        plan = make_plan(size.seq_len, layout="zigzag", route=route)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return burst_attention.burst_attention(q, k, v, plan, travels=travels)

        return Call(attention, plan, f"route {plan.route}, travels {travels}")

    return build


def _ring_flash_attn(name: str) -> Callable[[Size], Call]:
    def build(_: Size) -> Call:
        import ring_flash_attn

        function = getattr(ring_flash_attn, name)
        return Call(lambda q, k, v: function(q, k, v, causal=True))

    return build


def _yunchang(ring: str, ulysses: Callable[[Size], int]) -> Callable[[Size], Call]:
    def build(size: Size) -> Call:
        import yunchang

        degree = ulysses(size)
        rank = torch.distributed.get_rank()
        yunchang.set_seq_parallel_pg(degree, size.world // degree, rank, size.world)
        layer = yunchang.LongContextAttention(ring_impl_type=ring)  # takes the groups that were set last
        return Call(
            lambda q, k, v: layer(q, k, v, causal=True), None, f"ulysses {degree} x ring {size.world // degree}"
        )

    return build


def _yunchang_ulysses(_: Size) -> Call:
    import yunchang

    layer = yunchang.UlyssesAttention(sequence_process_group=torch.distributed.group.WORLD)
    return Call(lambda q, k, v: layer(q, k, v, causal=True))


def _ring_attention_pytorch(_: Size) -> Call:
    from ring_attention_pytorch import ring_flash_attn

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Its products mix fp32 probabilities with values in the io dtype, which only autocast resolves.
        with torch.autocast(q.device.type, q.dtype, enabled=q.dtype != torch.float32):
            return ring_flash_attn(q, k, v, causal=True, ring_reduce_col=True)

    return Call(attention)


def _ring_attention_pytorch_zigzag(size: Size) -> Call:
    from ring_attention_pytorch.zig_zag_attention import zig_zag_attn

    held = [positions("zigzag", size, 1, rank) for rank in range(size.world)]
    seen = held[torch.distributed.get_rank()][:, None] >= torch.cat(held)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zig_zag_attn(q, k, v, attn_mask=seen.to(q.device))

    return Call(attention)


def _ours(name: str, **options: Any) -> Variant:
    backward = options.pop("backward", True)
    return Variant(
        name=name,
        package="burst_attention",
        build=_burst(**options),
        order="zigzag",
        heads_first=True,
        backward=backward,
    )


def _theirs(name: str, build: Callable[[Size], Call], **options: Any) -> Variant:
    return Variant(name=name, package=name.split()[0].replace("-", "_"), build=build, **options)


OURS, OURS_FORWARD, STRONGEST = "burst", "burst, forward only", "ring-flash-attn zigzag"
VARIANTS = (
    _ours(OURS),
    _ours("burst, as RingAttention", route="ring-attention", travels="key-value"),
    _theirs("ring-flash-attn basic", _ring_flash_attn("ring_flash_attn_func")),
    _theirs(STRONGEST, _ring_flash_attn("zigzag_ring_flash_attn_func"), order="zigzag"),
    _theirs("ring-flash-attn stripe", _ring_flash_attn("stripe_flash_attn_func"), order="striped"),
    _theirs("yunchang basic", _yunchang("basic", lambda size: 1)),
    _theirs("yunchang zigzag", _yunchang("zigzag", lambda size: 1), order="zigzag"),
    _theirs("yunchang stripe", _yunchang("strip", lambda size: 1), order="striped"),
    _theirs("yunchang ulysses", _yunchang_ulysses, ulysses=lambda size: size.world, order="contiguous"),
    _theirs("yunchang hybrid zigzag", _yunchang("zigzag", lambda size: 2), ulysses=lambda size: 2, order="zigzag"),
    _ours(OURS_FORWARD, backward=False),
    _theirs("ring-attention-pytorch ring", _ring_attention_pytorch, backward=False),
    _theirs(
        "ring-attention-pytorch zigzag",
        _ring_attention_pytorch_zigzag,
        order="zigzag",
        heads_first=True,
        backward=False,
    ),
)
