"""Ranks share the tokens by a strategy of the library, and the parameters by FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from burst_attention.attention.batch import Plans, check_tokens, shard_tokens
from burst_attention.attention.call import burst_attention
from burst_attention.attention.hardware import CallShape, Hardware, RatesGiven
from burst_attention.attention.new_plan import make_plan
from burst_attention.attention.plan import Plan
from burst_attention.loss import Head
from burst_attention.plan.groups import Groups
from burst_attention.plan.strategy import Strategy
from burst_attention.planner.planner import Remat

from .contract import Attend, Heads, PlansByWindow, whole_attention

AUTO = Strategy()
NAMES = {"softcap": "soft cap", "sinks": "sinks"}


@dataclass(frozen=True, kw_only=True)
class SequenceParallelism:
    """Each rank holds some tokens of a sequence; strategy and remat are those of :func:`burst_attention.make_plan`."""

    name: str  # as it was asked for
    strategy: Strategy = AUTO
    attend: Attend = burst_attention  # over shards
    remat: Remat = "none"
    attention_chunks: int = 1  # of heads, each an attention call
    tensor_parallel: int = 1  # ranks that share the same tokens, and cut the heads
    posts: bool = True  # whether activations use the plan's transport

    @property
    def alone(self) -> bool:
        """Whether one rank holds each whole sequence, with PyTorch's own attention."""
        return self.attend is whole_attention

    def check(self, heads: Heads, seq_len: int, world: int) -> None:
        """Raise ValueError if ``world`` ranks can't share the heads or the sequence; it names the strategy and why."""
        if self.alone and world > 1:
            raise ValueError(
                f"--strategy {self.name} runs each sequence on one rank, not {world}; use one rank, or set "
                "--data-parallel to the number of --ranks"
            )
        if self.alone and heads.options:
            lacking = NAMES[heads.options[0]]
            raise ValueError(
                f"--strategy {self.name} has no {lacking}, which the attention of a {heads.family} has; "
                "choose another strategy"
            )
        if heads.q_heads:
            self._check_degree(heads.of_chunk(self.attention_chunks), world)

    def _check_degree(self, heads: Heads, world: int) -> None:
        """Raise ValueError if the ranks can't split these heads into the Ulysses degree that was asked for."""
        degree = self.strategy.over(world).ulysses_degree
        if isinstance(degree, int) and (
            world % degree or not Groups.divide(degree, q_heads=heads.q_heads, kv_heads=heads.kv_heads)
        ):
            raise ValueError(
                f"--strategy {self.name} has the Ulysses degree {degree}, which must divide the {world} ranks, and "
                f"divide the {heads.kv_heads} key-value heads or be a multiple of them that divides the "
                f"{heads.q_heads} query heads; choose another number of ranks or another strategy"
            )

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
        """Make the plan: which tokens this rank embeds and computes the loss of. Every rank of the group must call it.

        ``heads``, ``dtype``, ``rates``: of model and machine, by which the planner chooses what is open.
        """
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
        """Distribute the parameters of ``wrapper.model`` in place. Gradients are then *sums* over ranks.

        ``mesh``: (data, context) over all ranks; ``everyone``: these ranks as one axis. ``dtype``: of the computation;
        weights keep theirs. ``offload``: weights and gradients stay in host memory when the GPU does not use them.
        """
        from .body import shard_parameters  # imports transformers

        shard_parameters(wrapper, everyone, dtype, offload=offload)

    def shard(self, batch: Mapping[str, Tensor], plans: PlansByWindow) -> dict[str, Tensor]:
        """Return this rank's input of :meth:`hidden` and ``shift_labels``.

        The batch has ``input_ids`` and ``labels`` [B, S], equal on all ranks of a group: callers have compared them.
        """
        plan = Plans.of(plans).one
        check_tokens(plan)
        return shard_tokens(batch["input_ids"], plan.shift_labels(batch["labels"]), plan)

    def hidden(self, model: Any, shard: Mapping[str, Tensor], plans: PlansByWindow) -> Tensor:
        """Return hidden states after the last norm [B, S_local, E] for this rank's tokens in the plan."""
        from .body import hidden_states  # imports transformers

        return hidden_states(model, shard, plans, self.attend)

    def head(self, head: Head) -> Head:
        """Return the head unchanged: every rank has all of it."""
        return head

    def sent(self, plans: Sequence[Plan], heads: Heads, *, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        """Return the bytes that attention sends in (forward, backward), as the plans predict them."""
        sizes: dict[str, Any] = {"q_heads": heads.q_heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
        sizes |= {"v_head_dim": heads.v_head_dim} if heads.v_head_dim else {}
        more: dict[str, Any] = {"lse": "sinks" in heads.options, "attention_chunks": self.attention_chunks}
        counted = {id(plan): plan.bytes(batch=batch, **sizes, dtype=dtype, **more) for plan in plans}
        traffic = [counted[id(plan)] for plan in plans]
        return sum(each.forward_sent for each in traffic), sum(each.backward_sent for each in traffic)
