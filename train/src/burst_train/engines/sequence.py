"""Engines that shard the tokens: burst, RingAttention, Ulysses, USP, one rank. FSDP2 shards the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from burst_attention.attention.batch import Plans, check_tokens, shard_tokens
from burst_attention.attention.entry import burst_attention
from burst_attention.attention.hardware import CallShape, Hardware, RatesGiven
from burst_attention.attention.new_plan import make_plan
from burst_attention.attention.plan import Plan
from burst_attention.loss import Head
from burst_attention.plan.groups import Groups
from burst_attention.plan.layout import LAYOUTS
from burst_attention.plan.strategy import NAMED, DegreeOrAuto, Strategy
from burst_attention.planner.planner import Remat

from .contract import Attend, Heads, PlansByWindow
from .parameters import shard_parameters
from .ulysses import check_ulysses, ulysses_attention, ulysses_sent
from .usp import UspAttention
from .whole import whole_attention

NAMES = {"softcap": "soft cap", "sinks": "sinks"}


def _nothing(heads: Heads, world: int) -> None:
    """Accept any number of heads."""


@dataclass(frozen=True, kw_only=True)
class SequenceEngine:
    """An engine in which each rank holds some tokens; such engines differ in their attention only.

    Attributes:
        attend: the attention over shards.
        check_heads: raises ValueError for heads that ``world`` ranks can't share.
        count: returns the bytes that this rank sends in one layer's (forward, backward), from (plan, heads, batch,
            dtype).
        alone: whether one rank holds each whole sequence.
        posts: whether activations use the plan's transport.
        strategy, remat: as for :func:`burst_attention.make_plan`.
        ours: whether ``attend`` is :func:`burst_attention`.
        attention_chunks: the number of chunks of heads, each an attention call.
    """

    name: str
    strategy: Strategy
    attend: Attend
    count: Callable[..., tuple[int, int]]
    check_heads: Callable[[Heads, int], None] = _nothing
    alone: bool = False
    posts: bool = True
    ours: bool = False
    remat: Remat = "none"
    attention_chunks: int = 1

    def check(self, heads: Heads, seq_len: int, world: int) -> None:
        """Raise ValueError if the ranks can't share the heads or the sequence."""
        if self.alone and world > 1:
            raise ValueError(
                f"--engine {self.name} runs each sequence on one rank, not {world}; use one rank, or set "
                "--data-parallel to the number of --ranks"
            )
        for option in heads.options:
            if option not in inspect.signature(self.attend).parameters:
                raise ValueError(
                    f"--engine {self.name} has no {NAMES[option]}, which the attention of a {heads.family} has; use "
                    "--engine burst or ring"
                )
        if heads.q_heads:
            self.check_heads(heads.of_chunk(self.attention_chunks), world)

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
        """Make the plan of one sequence over ``group``."""
        sizes = {}
        if heads is not None and heads.q_heads:
            heads = heads.of_chunk(self.attention_chunks)
            sizes = {name: getattr(heads, name) for name in ("q_heads", "kv_heads", "head_dim")}
        return make_plan(
            seqlen,
            strategy=self.strategy,
            call=CallShape(**sizes, dtype=dtype, remat=self.remat, attention_chunks=self.attention_chunks),
            hardware=Hardware(rates=rates),
            group=group,
            timeout=timeout,
        )

    def spread(
        self,
        wrapper: nn.Module,
        *,
        mesh: DeviceMesh,
        everyone: DeviceMesh,
        dtype: torch.dtype,
        offload: bool = False,
    ) -> None:
        """Shard or replicate the parameters over the mesh."""
        shard_parameters(wrapper, everyone, dtype, offload=offload)

    def shard(self, batch: Mapping[str, Tensor], plans: PlansByWindow) -> dict[str, Tensor]:
        """Return this rank's part of a batch."""
        plan = Plans.of(plans).one
        check_tokens(plan)
        return shard_tokens(batch["input_ids"], plan.shift_labels(batch["labels"]), plan)

    def hidden(self, model: Any, shard: Mapping[str, Tensor], plans: PlansByWindow) -> Tensor:
        """Return the last hidden states of this rank's tokens."""
        from .body import hidden_states  # imports transformers

        return hidden_states(model, shard, plans, self.attend)

    def head(self, head: Head) -> Head:
        """Return the head unchanged: every rank has all of it."""
        return head

    def sent(self, plans: Sequence[Plan], heads: Heads, *, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        """Return the attention bytes that a rank sends in (forward, backward)."""
        chunks = {} if self.attention_chunks == 1 else {"attention_chunks": self.attention_chunks}
        counted = {id(plan): self.count(plan, heads, batch, dtype, **chunks) for plan in plans}
        forward, backward = (sum(counted[id(plan)][n] for plan in plans) for n in (0, 1))
        return forward, backward


def planned_sent(
    plan: Plan, heads: Heads, batch: int, dtype: torch.dtype, *, attention_chunks: int = 1
) -> tuple[int, int]:
    """Bytes that :func:`burst_attention` sends in a forward and a backward, as the plan predicts them."""
    sizes = {"q_heads": heads.q_heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
    sizes |= {"v_head_dim": heads.v_head_dim} if heads.v_head_dim else {}
    traffic = plan.bytes(
        batch=batch, **sizes, dtype=dtype, attention_chunks=attention_chunks, lse="sinks" in heads.options
    )
    return traffic.forward_sent, traffic.backward_sent


def burst(strategy: Strategy | None = None, *, kernel: str = "auto") -> SequenceEngine:
    """Return the engine that uses :func:`burst_attention`; the planner chooses what the strategy leaves open."""
    strategy = strategy or Strategy()
    return SequenceEngine(
        name="burst",
        strategy=strategy,
        check_heads=partial(check_degree, strategy.ulysses_degree),
        attend=partial(burst_attention, kernel=kernel),
        count=planned_sent,
        ours=True,
    )


def published() -> SequenceEngine:
    """Return BurstAttention as published (arXiv 2403.09347): zigzag, whole heads; the query side circulates."""
    return burst(NAMED["burst-attention"])


def check_degree(degree: DegreeOrAuto, heads: Heads, world: int) -> None:
    """Raise ValueError if ``world`` ranks can't split these heads into this many groups."""
    if not isinstance(degree, int):
        return
    if world % degree or not Groups.divide(degree, q_heads=heads.q_heads, kv_heads=heads.kv_heads):
        raise ValueError(
            f"--ulysses-degree {degree} must divide the {world} ranks, and divide the {heads.kv_heads} key-value heads "
            f"or be a multiple of them that divides the {heads.q_heads} query heads; leave it out to have it chosen"
        )


def ring(asked: Strategy) -> SequenceEngine:
    """Return RingAttention: K and V circulate round the ring, in the backward together with dK and dV in fp32.

    The contiguous layout is the published one. Zigzag is the stronger baseline, because it balances a causal mask.
    """
    strategy = of_engine("ring", asked, layouts=("zigzag", "contiguous"), route="ring-attention")
    return SequenceEngine(
        name="ring",
        strategy=replace(strategy, circulate="key-value"),
        attend=burst_attention,
        count=planned_sent,
        ours=True,
    )


def ulysses(asked: Strategy) -> SequenceEngine:
    """Return DeepSpeed-Ulysses: an all-to-all gives each rank all tokens of some heads; a second one reverts it."""
    return SequenceEngine(
        name="ulysses",
        strategy=of_engine("ulysses", asked, layouts=("contiguous",), route="direct"),
        attend=ulysses_attention,
        count=ulysses_sent,
        check_heads=check_ulysses,
    )


def usp(asked: Strategy) -> SequenceEngine:
    """Return Unified Sequence Parallelism: Ulysses among neighbours, RingAttention between their groups."""
    degree = asked.ulysses_degree if isinstance(asked.ulysses_degree, int) else None
    attention = UspAttention(degree)
    return SequenceEngine(
        name="usp",
        strategy=of_engine(
            "usp", replace(asked, ulysses_degree="auto"), layouts=("zigzag", "contiguous"), route="ring-attention"
        ),
        attend=attention,
        count=attention.sent,
        check_heads=attention.check,
    )


def single(asked: Strategy) -> SequenceEngine:
    """Return the engine in which one rank holds the whole sequence and uses PyTorch's own attention."""
    return SequenceEngine(
        name="single",
        strategy=of_engine("single", asked, layouts=tuple(LAYOUTS), route="direct"),
        attend=whole_attention,
        count=lambda *_: (0, 0),
        alone=True,
    )


def of_engine(engine: str, asked: Strategy, *, layouts: Sequence[str], route: str) -> Strategy:
    """Return the strategy of an engine other than burst; ``layouts``: those it supports, the default first.

    Raises:
        ValueError: something else was asked for.
    """
    if asked.ulysses_degree != "auto":
        raise ValueError(f"--ulysses-degree {asked.ulysses_degree} is not for --engine {engine}; leave it out")
    layout = one_of(engine, "layout", asked.layout, layouts)
    return Strategy(layout=layout, route=one_of(engine, "route", asked.route, (route,)), ulysses_degree=1)


def one_of(engine: str, option: str, value: str, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of the choices, or the first choice for ``auto``."""
    if value == "auto":
        return choices[0]
    if value not in choices:
        raise ValueError(f"--{option} {value} is not for --engine {engine}; leave it out or give {', '.join(choices)}")
    return value
