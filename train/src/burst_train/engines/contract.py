"""What an engine promises: the same loss and gradients, whatever is spread over the ranks and whatever travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from burst_attention.attention.hardware import RatesGiven
from burst_attention.attention.plan import Plan
from burst_attention.loss import Head

PlansByWindow = Mapping[int | None, Plan]


class Attend(Protocol):
    """One attention call: q [B, Hq, S', D], k and v [B, Hkv, S', D] of this rank -> out [B, Hq, S', D]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The sizes of a model that engines ask for."""

    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Of a transformers configuration."""
        return cls(
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
        )


class Engine(Protocol):
    """One way to spread a causal language model and its sequence over the ranks of a group."""

    @property
    def name(self) -> str: ...

    @property
    def layout(self) -> str: ...

    @property
    def posts(self) -> bool:
        """Whether activations move by the plan's transport, which counts them; else by collectives."""
        ...

    def check(self, heads: Heads, seq_len: int, world: int) -> None:
        """Raise ValueError naming the engine and what ``world`` ranks that share ``seq_len`` tokens can't do."""
        ...

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
        """Which tokens this rank embeds and has the loss of. Every rank of the group must call it.

        Args:
            heads, dtype: of the model, by which a layout is chosen that was left open.
            rates: of the machine, as for :func:`burst_attention.make_plan`.
        """
        ...

    def spread(
        self,
        wrapper: nn.Module,
        *,
        mesh: DeviceMesh,
        everyone: DeviceMesh,
        dtype: torch.dtype,
        offload: bool = False,
    ) -> None:
        """Spread the parameters of ``wrapper.model``, a causal language model of transformers, in place.

        Args:
            mesh: (data, context) over all ranks.
            everyone: the same ranks as one axis.
            dtype: of the computation; weights keep theirs. Gradients are *sums* over ranks.
            offload: whether weights and gradients lie in host memory, between their uses on a GPU.
        """
        ...

    def shard(self, batch: Mapping[str, Tensor], plans: PlansByWindow) -> dict[str, Tensor]:
        """What :meth:`hidden` takes of a global batch of ``input_ids`` and ``labels`` [B, S], and ``shift_labels``."""
        ...

    def hidden(self, model: Any, shard: Mapping[str, Tensor], plans: PlansByWindow) -> Tensor:
        """Hidden states after the last norm [B, S_local, E], of the tokens that the plan gives this rank."""
        ...

    def head(self, head: Head) -> Head:
        """The model's head as its loss takes it: weight and bias whole; gradients of them are summed over ranks."""
        ...

    def sent(self, plans: Sequence[Plan], heads: Heads, *, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes that this rank sends for activations in a forward and in a backward; ``plans`` are the layers'.

        Of collectives: as the ring algorithm sends them.
        """
        ...
