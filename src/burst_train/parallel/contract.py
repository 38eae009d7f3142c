"""What all strategies share: the sizes of a model, and the attention call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from torch import Tensor

from burst_attention.attention.batch import Reach
from burst_attention.attention.plan import Plan
from burst_attention.plan.groups import Groups

PlansByWindow = Mapping[Reach, Plan]

_WITH_SINKS = ("deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash")


class Attend(Protocol):
    """An attention call: this rank's q [B, Hq, S', D], k and v [B, Hkv, S', D] -> out [B, Hq, S', D]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The sizes of a model that strategies need.

    Attributes:
        head_dim: of queries and keys; ``v_head_dim`` is that of values, ``head_dim`` if None.
        intermediate: columns of the feed-forward layers; 0 if the configuration does not say.
        family: the configuration's ``model_type``.
        options: of ``softcap`` and ``sinks`` those that the attention has.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    v_head_dim: int | None = None
    family: str = "llama"
    options: tuple[str, ...] = ()

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
        """Return the sizes of one of ``chunks`` chunks of heads.

        Raises:
            ValueError: the heads can't be split so.
        """
        if not Groups.divide(chunks, q_heads=self.q_heads, kv_heads=self.kv_heads):
            raise ValueError(
                f"--attention-chunks {chunks} must divide the {self.kv_heads} key-value heads, or be a multiple of "
                f"them that divides the {self.q_heads} query heads"
            )
        return replace(self, q_heads=self.q_heads // chunks, kv_heads=max(1, self.kv_heads // chunks))
