"""The workload of one measurement, and its FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from burst_attention.planner.rates import Rates
from burst_train.strategies import Heads

BLOCK = 4096  # positions per block of random numbers


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Strategies at one sequence length."""

    # ``attention`` (one call, forward and backward), ``train`` (an optimizer step) or ``prefill`` (the forward up to
    # the logits of the next token).
    task: str = "attention"
    strategies: tuple[str, ...] = ()  # strategies, as :func:`burst_train.strategies.choose` takes them
    seq_len: int  # tokens of the whole sequence
    # Timed calls of each strategy, in turns. With 0, the time comes from the separate call for ``resources``, which
    # is slightly slower.
    rounds: int = 3
    resources: bool = True  # first run each strategy once alone, to count its bytes and measure its peak memory
    timeline: bool = False  # record a timeline of each rank in one more call
    # Interface of the emulated cluster whose byte counter is read around each call; None without a cluster.
    interface: str | None = None
    layers: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 32
    vocabulary: int = 512
    dtype: str = "bfloat16"  # dtype of the computation
    # cpu or cuda, for an attention call that is compared with other packages; all else runs on the CPU.
    device: str = "cpu"
    seed: int = 0
    timeout: float = 1800.0  # seconds that an exchange may take
    # Rates of ranks and links for the planner; None: this user's calibrated rates, or a preset.
    rates: Rates | None = None

    @property
    def hidden(self) -> int:
        """Return the model's width."""
        return self.heads * self.head_dim

    @property
    def intermediate(self) -> int:
        """Return the width of the feed-forward layers: 2.75 times the hidden size, in multiples of 64."""
        return max(64, round(2.75 * self.hidden / 64) * 64)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def sizes(self) -> Heads:
        return Heads(
            q_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.hidden,
            intermediate=self.intermediate,
        )

    def at(self, seq_len: int, **changes: Any) -> Workload:
        return replace(self, seq_len=seq_len, **changes)

    def flops(self) -> float:
        """Return the floating-point operations of one call over all ranks; recomputation doesn't count.

        A causal query attends to half of the keys on average; a backward takes twice the operations of a forward.
        """
        s, width = self.seq_len, self.heads * self.head_dim
        attention = 2 * s * (s + 1) * width
        if self.task == "attention":
            return 3.0 * attention
        columns = 2 * (2 * width + 2 * self.kv_heads * self.head_dim) + 6 * self.intermediate
        projections = self.hidden * columns
        layers = self.layers * (attention + s * projections)
        head = 2 * self.hidden * self.vocabulary
        return float(layers + head) if self.task == "prefill" else 3.0 * (layers + s * head)


def random_qkv(workload: Workload, positions: Tensor | None = None) -> list[Tensor]:
    """Return random q, k, v and dout [1, heads, S, D] at ascending ``positions``; None: at all positions.

    A position has the same values on every rank. Blocks are drawn one by one, so that a rank's peak memory doesn't
    include other ranks' tokens.
    """
    make = torch.Generator().manual_seed(workload.seed)
    positions = torch.arange(workload.seq_len) if positions is None else positions
    starts = range(0, workload.seq_len, BLOCK)
    bounds = torch.tensor([*starts, workload.seq_len])
    cuts = torch.searchsorted(positions, bounds).tolist()  # of each block in ``positions``
    inputs = []
    for heads in (workload.heads, workload.kv_heads, workload.kv_heads, workload.heads):
        x = torch.empty(1, heads, len(positions), workload.head_dim, dtype=workload.torch_dtype)
        for head in range(heads):
            for start, first, last in zip(starts, cuts[:-1], cuts[1:], strict=True):
                block = torch.randn(min(BLOCK, workload.seq_len - start), workload.head_dim, generator=make)
                x[0, head, first:last] = block[positions[first:last] - start]
        inputs.append(x)
    return inputs
