"""Engines that spread the tokens: burst, RingAttention, Ulysses, USP, one rank. Parameters are sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from burst_attention.attention.batch import shard_batch
from burst_attention.attention.entry import burst_attention
from burst_attention.attention.hardware import RatesGiven
from burst_attention.attention.plan import Plan, make_plan
from burst_attention.loss import Head
from burst_attention.plan.groups import Groups
from burst_attention.plan.layout import LAYOUTS
from burst_attention.planner.choice import HeadsOrAuto, KeepOrAuto, Remat, WavesOrAuto

from .contract import Attend, Heads, PlansByWindow
from .parameters import shard_parameters
from .ulysses import check_ulysses, ulysses_attention, ulysses_sent
from .usp import UspAttention
from .whole import whole_attention


def _nothing(heads: Heads, world: int) -> None:
    """No number of heads is refused."""


@dataclass(frozen=True, kw_only=True)
class SequenceEngine:
    """Each rank holds some tokens; ``attend`` is all in which these engines differ.

    Attributes:
        attend: the attention over shards.
        check_heads: raises ValueError for heads that ``world`` ranks can't share.
        count: bytes that this rank sends in one layer's forward and backward, from (plan, heads, batch, dtype).
        travels: what moves where ``attend`` is :func:`burst_attention`; None: it is another attention.
        heads, keep, waves, remat: as for :func:`burst_attention.make_plan`.
    """

    name: str
    layout: str
    route: str
    attend: Attend
    count: Callable[..., tuple[int, int]]
    check_heads: Callable[[Heads, int], None] = _nothing
    alone: bool = False
    posts: bool = True
    travels: str | None = None
    heads: HeadsOrAuto = 1
    keep: KeepOrAuto = "auto"
    waves: WavesOrAuto = "auto"
    remat: Remat = "none"

    def check(self, heads: Heads, seq_len: int, world: int) -> None:
        if self.alone and world > 1:
            raise ValueError(
                f"--engine {self.name} gives each sequence a rank of its own, not {world}: run it on one rank, or "
                "train with --data-parallel as many as --ranks"
            )
        self.check_heads(heads, world)

    def plan(
        self,
        seqlen: int,
        *,
        group: Any,
        timeout: float | None = None,
        heads: Heads | None = None,
        dtype: torch.dtype | None = None,
        rates: RatesGiven = None,
    ) -> Plan:
        options: dict[str, Any] = {"layout": self.layout, "route": self.route, "heads": self.heads, "keep": self.keep}
        options |= {"waves": self.waves, "remat": self.remat}
        if heads is not None:
            options |= {"q_heads": heads.q_heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
        return make_plan(seqlen, **options, dtype=dtype, group=group, timeout=timeout, rates=rates)

    def spread(
        self,
        wrapper: nn.Module,
        *,
        mesh: DeviceMesh,
        everyone: DeviceMesh,
        dtype: torch.dtype,
        offload: bool = False,
    ) -> None:
        shard_parameters(wrapper, everyone, dtype, offload=offload)

    def shard(self, batch: Mapping[str, Tensor], plans: PlansByWindow) -> dict[str, Tensor]:
        return shard_batch(batch, plans)

    def hidden(self, model: Any, shard: Mapping[str, Tensor], plans: PlansByWindow) -> Tensor:
        return model.model(
            input_ids=shard["input_ids"],
            position_ids=shard["position_ids"],
            use_cache=False,
            plan=plans,
            attend=self.attend,
        ).last_hidden_state

    def head(self, head: Head) -> Head:
        return head

    def sent(self, plans: Sequence[Plan], heads: Heads, *, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        counted = {id(plan): self.count(plan, heads, batch, dtype) for plan in plans}
        forward, backward = (sum(counted[id(plan)][n] for plan in plans) for n in (0, 1))
        return forward, backward


def planned_sent(plan: Plan, heads: Heads, batch: int, dtype: torch.dtype, *, travels: str) -> tuple[int, int]:
    """Of :func:`burst_attention`, as the plan predicts it."""
    traffic = plan.bytes(
        batch=batch,
        q_heads=heads.q_heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        dtype=dtype,
        travels=travels,
    )
    return traffic.forward_sent, traffic.backward_sent


def burst(
    layout: str = "auto",
    route: str = "auto",
    heads: HeadsOrAuto = "auto",
    *,
    keep: KeepOrAuto = "auto",
    waves: WavesOrAuto = "auto",
    travels: str = "auto",
    kernel: str = "auto",
) -> SequenceEngine:
    """BurstAttention, as :func:`burst_attention` runs it; what is left open is chosen by predicted time."""
    return SequenceEngine(
        name="burst",
        layout=layout,
        route=route,
        heads=heads,
        keep=keep,
        waves=waves,
        check_heads=partial(check_cut, heads),
        attend=partial(burst_attention, travels=travels, kernel=kernel),
        count=partial(planned_sent, travels=travels),
        travels=travels,
    )


def published() -> SequenceEngine:
    """BurstAttention as published (arXiv 2403.09347): zigzag, no heads cut, the query side travels in the backward."""
    return burst("zigzag", "auto", 1, travels="query")


def check_cut(cut: HeadsOrAuto, heads: Heads, world: int) -> None:
    """Raise ValueError if heads can't be cut among so many ranks."""
    if cut != "auto" and (world % cut or not Groups.divide(cut, q_heads=heads.q_heads, kv_heads=heads.kv_heads)):
        raise ValueError(
            f"--heads {cut} must divide the {world} ranks, and the {heads.kv_heads} key-value heads, or be a multiple "
            f"of those that divides the {heads.q_heads} query heads; leave it out to have it chosen"
        )


def ring(layout: str = "auto", route: str = "auto", heads: HeadsOrAuto = "auto") -> SequenceEngine:
    """RingAttention: K and V go round the ring, and in the backward dK and dV with them, in fp32.

    Contiguous is the published one; zigzag, which balances a causal mask, the strong one.
    """
    no_cut("ring", heads)
    layout = one_of("ring", "layout", layout, ("zigzag", "contiguous"))
    return SequenceEngine(
        name="ring",
        layout=layout,
        route=one_of("ring", "route", route, ("ring-attention",)),
        attend=partial(burst_attention, travels="key-value"),
        count=partial(planned_sent, travels="key-value"),
        travels="key-value",
    )


def ulysses(layout: str = "auto", route: str = "auto", heads: HeadsOrAuto = "auto") -> SequenceEngine:
    """DeepSpeed-Ulysses: all tokens of some heads, exchanged for some tokens of all heads, and back."""
    no_cut("ulysses", heads)
    return SequenceEngine(
        name="ulysses",
        layout=one_of("ulysses", "layout", layout, ("contiguous",)),
        route=one_of("ulysses", "route", route, ("direct",)),
        attend=ulysses_attention,
        count=ulysses_sent,
        check_heads=check_ulysses,
    )


def usp(layout: str = "auto", route: str = "auto", heads: HeadsOrAuto = "auto") -> SequenceEngine:
    """Unified Sequence Parallelism: Ulysses among ``heads`` neighbours, RingAttention over the groups of them."""
    if heads != "auto" and (isinstance(heads, bool) or not isinstance(heads, int) or heads < 1):
        raise ValueError(f"--heads {heads} must be a number of head groups, at least 1; leave it out to have it chosen")
    attention = UspAttention(heads)
    return SequenceEngine(
        name="usp",
        layout=one_of("usp", "layout", layout, ("zigzag", "contiguous")),
        route=one_of("usp", "route", route, ("ring-attention",)),
        attend=attention,
        count=attention.sent,
        check_heads=attention.check,
    )


def single(layout: str = "auto", route: str = "auto", heads: HeadsOrAuto = "auto") -> SequenceEngine:
    """One rank holds the whole sequence; PyTorch's own attention."""
    no_cut("single", heads)
    return SequenceEngine(
        name="single",
        layout=one_of("single", "layout", layout, tuple(LAYOUTS)),
        route=one_of("single", "route", route, ("direct",)),
        attend=whole_attention,
        count=lambda *_: (0, 0),
        alone=True,
    )


def no_cut(engine: str, heads: HeadsOrAuto) -> None:
    """Raise ValueError if heads are to be cut by an engine of which that is not asked."""
    if heads != "auto":
        raise ValueError(f"--heads {heads} is not for --engine {engine}; leave it out")


def one_of(engine: str, option: str, value: str, choices: Sequence[str]) -> str:
    """``value``, or the first choice for ``auto``."""
    if value == "auto":
        return choices[0]
    if value not in choices:
        raise ValueError(f"--{option} {value} is not for --engine {engine}; leave it out or give {', '.join(choices)}")
    return value
