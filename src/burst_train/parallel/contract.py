"""What all strategies share: the sizes of a model, and the attention call; also PyTorch's own, their reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_attention.attention.batch import Reach
from burst_attention.attention.call import signless
from burst_attention.attention.plan import Plan
from burst_attention.plan.groups import Groups
from burst_attention.plan.mask import Mask

PlansByWindow = Mapping[Reach, Plan]
WINDOW_ROWS = 1024

_WITH_SINKS = ("deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash")


class Attend(Protocol):
    """An attention call: this rank's q [B, Hq, S', D], k and v [B, Hkv, S', D] -> out [B, Hq, S', D]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor: ...


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


def whole_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor:
    """Compute ``scaled_dot_product_attention`` for each document: q [B, Hq, S, D], k and v [B, Hkv, S, D].

    ValueError: ``plan`` has several ranks, or a mask of blocks.
    """
    if plan.world > 1:
        raise ValueError(f"plan shards the sequence over {plan.world} ranks; whole_attention needs a plan of one rank")
    if plan.mask.block is not None:
        raise ValueError(f"mask={plan.mask!r}: whole_attention supports no blocks; use burst_attention")
    if scale is not None:
        q, scale = signless(q, scale)
    parts = []
    for rows, columns, mask in _calls(plan.mask, plan.seqlen):
        parts.append(
            scaled_dot_product_attention(
                q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                attn_mask=None if mask is None else mask.to(q.device),
                is_causal=mask is None and plan.mask.causal,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _calls(mask: Mask, seqlen: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the calls that cover the mask: (rows, columns, bool [rows, columns] or None for ``is_causal``)."""
    for start, stop in itertools.pairwise(mask.cu_seqlens or (0, seqlen)):
        window = mask.window
        if window is None or window >= stop - start:
            whole = slice(start, stop)
            if stop > start or not seqlen:  # without tokens, one empty call so that the result has gradients
                yield whole, whole, torch.from_numpy(mask.dense(seqlen)) if mask.prefix else None
            continue
        for top in range(start, stop, WINDOW_ROWS):  # one mask of all rows would need memory quadratic in the length
            bottom, left = min(top + WINDOW_ROWS, stop), max(top - window + 1, start)
            distance = torch.arange(top, bottom).unsqueeze(1) - torch.arange(left, bottom)
            yield slice(top, bottom), slice(left, bottom), (distance >= 0) & (distance < window)
