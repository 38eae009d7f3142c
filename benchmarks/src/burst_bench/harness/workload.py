"""What all ranks of one measurement do, and how much work that is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from burst_train.engines import Engine, Heads, burst, choose, published
from torch import Tensor

from burst_attention.planner.rates import Rates

_YES_OR_NO = {"yes": True, "no": False}
BLOCK = 4096  # positions that are drawn together


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Engines at one sequence length over the ranks at hand.

    Attributes:
        task: ``attention`` (one call, forward and backward), ``train`` (an optimizer step) or ``prefill`` (the forward
            up to the logits of the next token).
        engines: names, each with what :func:`engine_of` takes where it is not the engine's best.
        rounds: timed calls of each engine, taking turns; 0 takes the time of the one by itself, which is a little
            longer.
        resources: first run each engine once by itself, to count its bytes and see its peak memory.
        timeline: write down what each rank does in one more call.
        interface: of the emulated cluster, whose counter is read around each call; None without one.
        dtype: of the computation.
        device: of an attention call beside other packages' (cpu or cuda); all else is on the CPU.
        timeout: seconds that an exchange may take.
        rates: of the ranks and links, that plans are chosen by; None for those of this user or this kind of machine.
    """

    task: str = "attention"
    engines: tuple[str, ...] = ()
    seq_len: int
    rounds: int = 3
    resources: bool = True
    timeline: bool = False
    interface: str | None = None
    layers: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 32
    vocabulary: int = 512
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 0
    timeout: float = 1800.0
    rates: Rates | None = None

    @property
    def hidden(self) -> int:
        """The model's width."""
        return self.heads * self.head_dim

    @property
    def intermediate(self) -> int:
        """Of the feed-forward layers: 2.75 times the width, in multiples of 64."""
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
        """Floating-point operations of one call, over all ranks: the model's own, nothing that is done twice.

        A causal query sees half of the keys on average; a backward is twice a forward.
        """
        s, width = self.seq_len, self.heads * self.head_dim
        attention = 2 * s * (s + 1) * width
        if self.task == "attention":
            return 3.0 * attention
        projections = (
            2 * self.hidden * (2 * width + 2 * self.kv_heads * self.head_dim) + 6 * self.hidden * self.intermediate
        )
        layers = self.layers * (attention + s * projections)
        head = 2 * self.hidden * self.vocabulary
        return float(layers + head) if self.task == "prefill" else 3.0 * (layers + s * head)


def engine_of(spec: str) -> Engine:
    """``ring``, ``ring:contiguous``; of burst also ``burst:heads=4``, ``burst:contiguous,heads=4,keep=no``, and
    ``burst:published``: as in the paper.

    Raises:
        ValueError: there is none such.
    """
    name, _, told = spec.partition(":")
    if spec == "burst:published":
        return published()
    parts = [part.partition("=") for part in told.split(",")] if told else []
    options = {key: value for key, sign, value in parts if sign}
    layouts = [key for key, sign, _ in parts if not sign]
    odd = sorted({*options} - {"heads", "keep", "waves"})
    if odd or len(layouts) > 1 or len(options) + len(layouts) < len(parts):
        raise ValueError(
            "give at most a layout, heads=N, keep=yes or keep=no and waves=N, with commas, such as burst:heads=4"
        )
    layout, heads = (layouts or ["auto"])[0], _cut(options.get("heads", "auto"))
    if not {*options} & {"keep", "waves"}:
        return choose(name, layout=layout, heads=heads)
    keep, waves = options.get("keep", "auto"), options.get("waves", "auto")
    if name != "burst" or keep not in ("auto", *_YES_OR_NO):
        raise ValueError(f"keep={keep} must be yes or no, of burst")
    if waves != "auto" and not waves.isdecimal():
        raise ValueError(f"waves={waves} must be a number of waves, or auto")
    waves = waves if waves == "auto" else int(waves)
    return burst(layout, heads=heads, keep=_YES_OR_NO.get(keep, "auto"), waves=waves)


def _cut(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"heads={text} must be a number of head groups, at least 1, or auto")
    return int(text)


def random_qkv(workload: Workload, positions: Tensor | None = None) -> list[Tensor]:
    """q, k, v, dout [1, heads, S, D] at these (ascending) positions, all if None; the same whoever asks.

    Drawn block by block: a rank's peak memory must not be that of drawing what others hold.
    """
    make = torch.Generator().manual_seed(workload.seed)
    positions = torch.arange(workload.seq_len) if positions is None else positions
    starts = range(0, workload.seq_len, BLOCK)
    cuts = torch.searchsorted(positions, torch.tensor([*starts, workload.seq_len])).tolist()  # where each block's lie
    inputs = []
    for heads in (workload.heads, workload.kv_heads, workload.kv_heads, workload.heads):
        x = torch.empty(1, heads, len(positions), workload.head_dim, dtype=workload.torch_dtype)
        for head in range(heads):
            for start, first, last in zip(starts, cuts[:-1], cuts[1:], strict=True):
                block = torch.randn(min(BLOCK, workload.seq_len - start), workload.head_dim, generator=make)
                x[0, head, first:last] = block[positions[first:last] - start]
        inputs.append(x)
    return inputs
