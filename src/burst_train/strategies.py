"""How ranks share a model and a sequence: the tokens by a strategy of the library, or the layers, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch

from burst_attention import CallShape, Hardware, Plan, Strategy, make_plan
from burst_attention.attention import chosen_bytes
from burst_attention.plan.cost import Traffic
from burst_attention.plan.groups import Groups
from burst_attention.plan.indexed import Indexed
from burst_attention.plan.layout import BALANCED
from burst_attention.plan.strategy import NAMED, strategy_of
from burst_attention.planner.planner import Remat

SINGLE, MEGATRON = "single", ("tensor", "tensor-sequence")
FOREIGN = (SINGLE, *MEGATRON)  # those that ``make_plan`` does not know
STRATEGIES = (*NAMED, *FOREIGN)
AUTO = Strategy()
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose projections MEGATRON knows
_WITH_SINKS = ("deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The sizes of a model that strategies need."""

    q_heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    hidden: int
    intermediate: int  # columns of the feed-forward layers; 0 if the configuration does not say
    v_head_dim: int | None = None  # of values; None: ``head_dim``
    family: str = "llama"  # the configuration's ``model_type``
    options: tuple[str, ...] = ()  # of ``softcap`` and ``sinks`` those that the attention has

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Read the sizes from a transformers configuration; 0 heads if it has no attention."""
        config = config.get_text_config(decoder=True)
        q_heads = getattr(config, "num_attention_heads", 0)
        latent = getattr(config, "qk_rope_head_dim", None)
        head_dim = getattr(config, "attention_head_dim", None) or getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // max(1, q_heads)
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        if latent:  # keys are projected from a latent vector, for every query head
            head_dim = config.qk_nope_head_dim + latent
        return cls(
            q_heads=q_heads,
            kv_heads=q_heads if latent else getattr(config, "num_key_value_heads", None) or q_heads,
            head_dim=head_dim,
            v_head_dim=config.v_head_dim if latent else None,
            hidden=config.hidden_size,
            intermediate=getattr(config, "intermediate_size", None) or 0,
            family=config.model_type,
            options=("softcap",) * capped + ("sinks",) * (config.model_type in _WITH_SINKS),
        )

    def of_rank(self, ranks: int) -> Self:
        """Return the sizes that a rank's attention sees if ``ranks`` ranks cut the heads."""
        return replace(self, q_heads=self.q_heads // ranks, kv_heads=self.kv_heads // ranks)

    def of_chunk(self, chunks: int) -> Self:
        """Return the sizes of one of ``chunks`` chunks of heads; ValueError if the heads can't be split so."""
        if not Groups.divide(chunks, q_heads=self.q_heads, kv_heads=self.kv_heads):
            raise ValueError(
                f"--attention-chunks {chunks} must divide the {self.kv_heads} key-value heads, or be a multiple of "
                f"them that divides the {self.q_heads} query heads"
            )
        return replace(self, q_heads=self.q_heads // chunks, kv_heads=max(1, self.kv_heads // chunks))


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How ranks share a sequence; ``remat`` and ``attention_chunks`` are those of ``CallShape``."""

    name: str  # as it was asked for
    strategy: Strategy = AUTO
    remat: Remat = "none"
    attention_chunks: int = 1
    tensor_parallel: int = 1  # ranks that share the same tokens, and cut the heads

    @property
    def cuts_layers(self) -> bool:
        """Whether each rank computes some columns of all layers for all tokens, by Megatron-LM's schemes."""
        return self.name in MEGATRON

    def check(self, heads: Heads, seq_len: int, world: int) -> None:
        """Raise ValueError if ``world`` ranks can't share the heads or the sequence; it names the strategy and why."""
        if self.cuts_layers:
            self._check_divided(heads, seq_len, world)
            return
        if self.name == SINGLE and world > 1:
            raise ValueError(
                f"--strategy {self.name} runs each sequence on one rank, not {world}; use one rank, or set "
                "--data-parallel to the number of --ranks"
            )
        if heads.q_heads:
            self._check_degree(heads.of_chunk(self.attention_chunks), world)

    def _check_divided(self, heads: Heads, seq_len: int, world: int) -> None:
        """Raise ValueError unless the ranks divide the heads, the feed-forward columns and the sequence."""
        if heads.family not in FAMILIES:
            raise ValueError(
                f"--strategy {self.name} can't share the projections of a {heads.family}, only those of "
                f"{', '.join(FAMILIES)}; choose another strategy"
            )
        sizes = {
            "query heads": heads.q_heads,
            "key-value heads": heads.kv_heads,
            "feed-forward columns": heads.intermediate,
            "tokens (--seq-len)": seq_len,
        }
        for what, size in sizes.items():
            if size % world:
                raise ValueError(
                    f"--strategy {self.name} shares {size} {what} equally, but {world} ranks don't divide them; "
                    "use a number of ranks that does, or another strategy"
                )

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
        rates: Any = None,
    ) -> Plan:
        """Make the plan: which tokens this rank embeds and computes the loss of. Every rank of the group must call it.

        ``heads``, ``dtype``, ``rates``: of model and machine, by which the planner chooses what is open.
        """
        if self.cuts_layers:  # the loss alone is shared by tokens
            strategy = Strategy(layout="contiguous", route="direct")
            return make_plan(seqlen, group=group, timeout=timeout, strategy=strategy)
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

    def sent(
        self,
        plans: Sequence[Plan],
        heads: Heads,
        *,
        batch: int,
        dtype: torch.dtype,
        indexed: Sequence[Indexed | None] = (),
    ) -> tuple[int, int]:
        """Return the bytes that a rank sends in (forward, backward) of layers with these plans.

        ``indexed``: how each layer attends to chosen keys; None, as for all by default: it attends to all keys.
        """
        if self.cuts_layers:
            # The bytes of a gather or scatter.
            moved = (plans[0].world - 1) * batch * plans[0].length * heads.hidden * dtype.itemsize
            # Each layer has two sums in the forward and two in the backward; a sum is a scatter and a gather. Without
            # sequence parallelism the backward also gathers the gradients of the last hidden states.
            return len(plans) * 4 * moved, len(plans) * 4 * moved + (0 if self.name == "tensor-sequence" else moved)
        sizes: dict[str, Any] = {"q_heads": heads.q_heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
        sizes |= {"v_head_dim": heads.v_head_dim} if heads.v_head_dim else {}
        more: dict[str, Any] = {"lse": "sinks" in heads.options, "attention_chunks": self.attention_chunks}

        @cache
        def bytes_of(plan: Plan, call: Indexed | None) -> Traffic:
            if call is not None:
                chunks = self.attention_chunks
                return chosen_bytes(plan, call, batch=batch, dtype=dtype, attention_chunks=chunks)
            return plan.bytes(batch=batch, **sizes, dtype=dtype, **more)

        traffic = [bytes_of(*layer) for layer in zip(plans, indexed or [None] * len(plans), strict=True)]
        return sum(each.forward_sent for each in traffic), sum(each.backward_sent for each in traffic)


def choose(name: str, *, balanced: bool = False, remat: Remat = "none", attention_chunks: int = 1) -> Sharing:
    """Return how ranks share a sequence; ValueError if the strategy is unknown.

    ``name``: a strategy of :func:`burst_attention.make_plan`, by name or by its fields; ``tensor`` (Megatron-LM, arXiv
    1909.08053), ``tensor-sequence`` (the same with sequence parallelism, arXiv 2205.05198), or ``single`` (one rank for
    each sequence). The planner takes recompute policy and chunks of heads into account.
    """
    if name in MEGATRON:
        return Sharing(name=name)
    if name == SINGLE:
        return Sharing(name=name, remat=remat, attention_chunks=attention_chunks)
    try:
        strategy = strategy_of(name)
    except ValueError as error:
        more = "" if "=" in name else f"; or {', '.join(FOREIGN)}"
        raise ValueError(f"{error}{more}") from None
    if balanced:
        strategy = replace(strategy, layout=BALANCED)
    return Sharing(name=name, strategy=strategy, remat=remat, attention_chunks=attention_chunks)
