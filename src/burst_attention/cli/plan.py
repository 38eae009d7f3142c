"""``burst plan``: what a sequence over so many ranks will cost, before anything is rented."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from rich.console import Console
from rich.table import Table

from burst_attention import Mask
from burst_attention.attention.checks import DtypeName
from burst_attention.attention.footprint import peak_memory
from burst_attention.attention.hardware import shape_of
from burst_attention.plan.assignment import TravelsOrAuto
from burst_attention.plan.cost import Shape
from burst_attention.plan.estimate import RankCost, estimate
from burst_attention.plan.layout import LayoutName
from burst_attention.plan.route import RouteName
from burst_attention.plan.schedule import make_schedule
from burst_attention.training.flags import Count, Positive, Ranks, check_settings, require

from ..launch import local as launch

COMMAND = "burst plan"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Work, bytes and memory of exact attention over many ranks, per rank, and beside it RingAttention's.

    Nothing is launched. Defaults are Llama 3 8B's heads.
    """

    seq_len: Count
    """Tokens of the sequence."""
    ranks: Ranks
    """Ranks that share it."""
    layers: Count = 32
    batch: Count = 1
    q_heads: Count = 32
    kv_heads: Count = 8
    head_dim: Count = 128
    v_head_dim: Count | None = None
    """--head-dim if not given."""
    dtype: DtypeName = "bfloat16"
    causal: bool = True
    window: Count | None = None
    """Keys that a query sees."""
    documents: Count = 1
    """Pack this many equal documents."""
    layout: LayoutName = "zigzag"
    route: RouteName = "direct"
    travels: TravelsOrAuto = "auto"
    tflops: Positive | None = None
    """What a rank's kernels reach, in 10^12 operations a second; with it, compute time is told."""
    gbytes_per_second: Positive | None = None
    """What a rank's link carries each way, in 10^9 bytes a second; with it, time on the wire is told."""

    def check(self) -> None:
        """Raise ValueError for what can't be."""
        check_settings(self)
        require(self.documents <= self.seq_len, "documents", self.documents, f"is more than --seq-len {self.seq_len}")
        require(self.causal or self.window is None, "window", self.window, "looks back only; leave --no-causal out")
        multiple = f"must be a multiple of --kv-heads {self.kv_heads}"
        require(self.q_heads % self.kv_heads == 0, "q_heads", self.q_heads, multiple)

    def shape(self) -> Shape:
        """What moves per row."""
        heads = {"batch": self.batch, "q_heads": self.q_heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return shape_of(getattr(torch, self.dtype), **heads, v_head_dim=self.v_head_dim)

    def mask(self) -> Mask:
        """What a query sees."""
        borders = [n * self.seq_len // self.documents for n in range(self.documents + 1)]
        return Mask(self.causal, self.window, borders if self.documents > 1 else None)


def main(arguments: list[str]) -> int:
    """Run ``burst plan``; returns the exit status."""
    parsed = tyro.cli(Arguments, prog=COMMAND, args=arguments)
    try:
        parsed.check()
        chosen, mine = _costs(parsed, parsed.route, parsed.travels)
        _, ring = _costs(parsed, "ring-attention", "key-value")
    except ValueError as error:
        return launch.refuse(COMMAND, error)
    title = f"{parsed.seq_len:,} tokens over {parsed.ranks} ranks, {parsed.mask()}, {parsed.layout}, {parsed.dtype}"
    table = Table("per rank, all layers (memory: one layer)", f"{parsed.route}, {chosen} travels", "RingAttention")
    for row in zip(_NAMES, mine, ring, strict=True):
        table.add_row(*row)
    Console().print(f"[bold]{title}[/]", table)
    return 0


def _costs(arguments: Arguments, route: str, travels: str) -> tuple[str, list[str]]:
    """(what travels, the column's figures)."""
    mask, world = arguments.mask(), arguments.ranks
    schedule = make_schedule(arguments.seq_len, mask=mask, layout=arguments.layout, route=route, rank=0, world=world)
    shape = arguments.shape()
    chosen = schedule.choose_travels(shape) if travels == "auto" else travels
    memory = peak_memory(schedule, shape, getattr(torch, arguments.dtype), chosen)
    return chosen, _figures(arguments, estimate(schedule, shape, chosen), memory)


_NAMES = (
    "tokens, most",
    "attention, forward, TFLOP (mean, busiest)",
    "attention, backward, TFLOP (mean, busiest)",
    "sent, forward, GB (mean, busiest)",
    "sent, backward, GB (mean, busiest)",
    "compute time, s, busiest",
    "time on the wire, s, busiest",
    "memory at the peak, GB",
)


def _figures(arguments: Arguments, costs: list[RankCost], memory: int) -> list[str]:
    layers = arguments.layers

    def pair(values: list[int], unit: float) -> str:
        return f"{layers * sum(values) / len(values) / unit:,.3g}, {layers * max(values) / unit:,.3g}"

    def seconds(amount: int, rate: float | None, unit: float) -> str:
        return "-" if rate is None else f"{layers * amount / (rate * unit):,.3g}"

    busiest_link = max(max(c.traffic.sent, c.traffic.received) for c in costs)
    return [
        f"{max(c.tokens for c in costs):,}",
        pair([c.forward_flops for c in costs], 1e12),
        pair([c.backward_flops for c in costs], 1e12),
        pair([c.traffic.forward_sent for c in costs], 1e9),
        pair([c.traffic.backward_sent for c in costs], 1e9),
        seconds(max(c.forward_flops + c.backward_flops for c in costs), arguments.tflops, 1e12),
        seconds(busiest_link, arguments.gbytes_per_second, 1e9),
        f"{memory / 1e9:,.3g}",
    ]
