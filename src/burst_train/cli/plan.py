"""``burst plan``: predict what a training step costs before you rent GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Column, Table

from burst_attention.attention.checks import DtypeName
from burst_attention.attention.hardware import resolve_rates
from burst_attention.cli.flags import Count, Length, Name, Positive, check_settings, number, require, whole
from burst_attention.cli.numbers import numbers
from burst_attention.launch import local as launch
from burst_attention.plan.layout import BALANCED

from ..config import PackingName, check_balanced, check_strategy
from ..forecast.forecast import Forecast, fastest, forecasts, recommended, savings
from ..forecast.machines import MATMUL_EFFICIENCY, Device, device_of
from ..forecast.models import Model, model_of
from ..forecast.request import Cluster, ForecastRequest, sizes_of
from ..memory import Offload, OptimizerName
from .plan_words import SAVING, SHORT, as_dict, assumptions, command, headline, rows, saving_rows, short_rows, verdict

COMMAND = "burst plan"
MOST_PLANNED = 1 << 16
USUAL_NODE = 8  # ranks
DEFAULT_MODEL = "llama-3-8b"
RematOrAuto = Literal["auto", "none", "keep-attention", "layer"]
Share = Annotated[float, number(lambda value: 0 < value <= 1, "must be above 0 and at most 1")]


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Predict a training step's time, traffic and memory for each strategy.

    The command starts no ranks. Numbers may end in K or M (powers of 1024): 128K, 1M. The model is Llama 3 8B by
    default. Use --model for another model, or --q-heads for attention only.
    """

    seq_len: Length
    """Tokens in the sequence."""
    ranks: Annotated[int, whole(most=MOST_PLANNED)]
    """GPUs (or processes) that share the sequence."""
    nodes: Count | None = None
    """Number of machines. Default: eight ranks per machine."""
    hardware: Name | None = None
    """A preset such as h100-hgx+ethernet-100g, or a file of burst calibrate. Default: its saved file, else a preset."""
    model: Name | None = None
    """A preset such as llama-3-8b, or the folder or hub name of a model. Only its config.json is read."""
    q_heads: Count | None = None
    """Query heads. Plans attention only; do not combine with --model."""
    kv_heads: Count | None = None
    """Key-value heads, for attention only. Default: --q-heads."""
    head_dim: Count | None = None
    """Head dimension, for attention only. Default: 128."""
    v_head_dim: Count | None = None
    """Head dimension of the values, for attention only. Default: --head-dim."""
    layers: Count | None = None
    """Layers, for attention only. Default: 1."""
    batch: Count = 1
    """Sequences per batch."""
    dtype: DtypeName = "bfloat16"
    """Compute dtype: bfloat16 or float32. Attention only: any of the choices."""
    causal: bool = True
    window: Count | None = None
    """Sliding window of every layer: the number of keys that each query attends to."""
    documents: Count = 1
    """Number of documents packed into the sequence, all of equal length."""
    packing: PackingName = "sequence"
    """As for burst train. balanced: all ranks share the --batch packed sequences."""
    strategy: Name = "auto"
    """The strategy to plan for, as for burst train; others are compared with it. auto: the fastest by prediction."""
    remat: RematOrAuto = "auto"
    """Activations to recompute. auto: the policy that recomputes least and still fits."""
    mlp_chunks: Count = 1
    """Chunks of tokens in feed-forward layers and norms, as for burst train."""
    attention_chunks: Count = 1
    """Chunks of heads in each layer's attention, as for burst train."""
    offload: Offload = "none"
    """Where recomputed layers' inputs are kept, as for burst train: none, host or disk:DIR."""
    optimizer: OptimizerName = "adamw"
    """Optimizer, as for burst train. adamw-8bit: 2 bytes per weight for AdamW's moments instead of 8."""
    optimizer_offload: bool = False
    """Weights, gradients and AdamW's moments in host memory, as for burst train."""
    matmul_efficiency: Share = MATMUL_EFFICIENCY
    """Share of the peak that matrix products outside attention reach."""
    peak_tflops: Positive | None = None
    """A device's bf16 peak in TFLOP/s (10^12 operations per second). Overrides the preset."""
    device_memory: Positive | None = None
    """A device's memory in GB (10^9 bytes). Overrides the preset."""
    link_rate: Positive | None = None
    """Rate of copies between device and host memory in GB/s, one way. Default: 50 with PCIe 5, 25 with PCIe 4."""
    disk_rate: Positive | None = None
    """Rate of a rank's share of the disk that --offload disk:DIR uses, in GB/s. Default: 3."""
    json: Name | None = None
    """Write all figures to this JSON file."""
    all: bool = False
    """Print all figures of all strategies, their commands, options that save memory, and the assumptions."""

    def check(self) -> None:
        """Raise ValueError if an argument is invalid or contradicts another."""
        check_settings(self)
        check_strategy(self.strategy, "strategy")
        require(
            self.seq_len >= self.ranks,
            "seq_len",
            self.seq_len,
            f"is less than one token for each of {self.ranks} ranks; raise it, or lower --ranks",
        )
        require(
            self.documents <= self.seq_len,
            "documents",
            self.documents,
            f"is more than --seq-len {self.seq_len}; lower it",
        )
        if self.packing == "balanced":
            check_balanced(self.strategy, self.batch)
        unknown = "is not predicted; choose another, such as tensor-sequence"
        require(self.strategy not in ("single", "tensor"), "strategy", self.strategy, unknown)
        require(self.causal or self.window is None, "window", self.window, "needs a causal mask; leave --no-causal out")
        most = self.nodes is None or self.nodes <= self.ranks
        require(most, "nodes", self.nodes, f"is more than --ranks {self.ranks}; each node needs at least one rank")
        if self.nodes:
            held = -(-self.ranks // -(-self.ranks // self.nodes))
            some = f"can't hold {self.ranks} ranks with only the last node not full; use {held}"
            require(held == self.nodes, "nodes", self.nodes, some)
        can = self.json is None or (Path(self.json).absolute().parent.is_dir() and not Path(self.json).is_dir())
        require(can, "json", self.json, "can't be written; name a file in an existing folder")
        if self.q_heads is None:
            for name in ("kv_heads", "head_dim", "v_head_dim", "layers"):
                alone = "is for attention only; give --q-heads with it, or leave it out: a model has this size already"
                require(getattr(self, name) is None, name, getattr(self, name), alone)
            require(self.causal, "causal", "no", "is for attention only (--q-heads); the models here are causal")
            known = "is for attention only (--q-heads); with a model use bfloat16 or float32"
            require(self.dtype in ("bfloat16", "float32"), "dtype", self.dtype, known)
            return
        require(self.model is None, "q_heads", self.q_heads, "is for attention only; leave it or --model out")
        multiple = f"must be a multiple of --kv-heads {self.kv_heads}"
        require(self.q_heads % (self.kv_heads or self.q_heads) == 0, "q_heads", self.q_heads, multiple)
        for name in ("mlp_chunks", "attention_chunks", "offload", "optimizer", "optimizer_offload"):
            given, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            require(given == default, name, given, "needs a model; leave it or --q-heads out")
        require(self.remat in ("auto", "none"), "remat", self.remat, "needs a model; leave it or --q-heads out")

    def request(self) -> ForecastRequest:
        """Convert the arguments into a request for the predictor.

        Raises:
            ValueError: the model or the hardware is unknown.
        """
        model = None if self.q_heads is not None else model_of(self.model or DEFAULT_MODEL)
        joined = self.batch if self.packing == "balanced" else 1
        documents, seq_len = joined * self.documents, joined * self.seq_len
        borders = tuple(n * seq_len // documents for n in range(documents + 1))
        return ForecastRequest(
            seq_len=seq_len,
            cluster=self._cluster(),
            **self._sizes(model),
            batch=self.batch // joined,
            joined=joined,
            dtype=getattr(torch, self.dtype),
            causal=self.causal,
            window=self.window,
            borders=borders if documents > 1 else None,
            remat=None if self.remat == "auto" else self.remat,
            mlp_chunks=self.mlp_chunks,
            attention_chunks=self.attention_chunks,
            offload=self.offload,
            optimizer=self.optimizer,
            optimizer_offload=self.optimizer_offload,
            strategy=self.strategy,
            layout=BALANCED if joined > 1 else "auto",
        )

    def _sizes(self, model: Model | None) -> Mapping[str, Any]:
        if model is not None:
            return sizes_of(model)
        return {
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads or self.q_heads,
            "head_dim": self.head_dim or 128,
            "v_head_dim": self.v_head_dim,
            "layers": self.layers or 1,
        }

    def _cluster(self) -> Cluster:
        try:
            rates = resolve_rates(self.hardware, on_gpus=torch.cuda.is_available())
        except ValueError as error:
            raise ValueError(f"--hardware {self.hardware}: {error}") from None
        known = device_of(rates)
        return Cluster(
            ranks=self.ranks,
            per_node=-(-self.ranks // self.nodes) if self.nodes else USUAL_NODE,
            rates=rates,
            device=Device(
                peak=known.peak if self.peak_tflops is None else self.peak_tflops * 1e12,
                memory=known.memory if self.device_memory is None else self.device_memory * 1e9,
                bandwidth=known.bandwidth,
                link=known.link if self.link_rate is None else self.link_rate * 1e9,
                disk=known.disk if self.disk_rate is None else self.disk_rate * 1e9,
            ),
            efficiency=self.matmul_efficiency,
        )


def main(arguments: list[str]) -> int:
    """Run ``burst plan`` and return the exit status."""
    parsed = tyro.cli(PlanArguments, prog=COMMAND, args=arguments, registry=numbers())
    try:
        parsed.check()
        request = parsed.request()
        found = forecasts(request)
        shown = parsed.all or parsed.json is not None
        saving = savings(request) if shown or fastest(found) is None else []
        notes = [*assumptions(request, found)]
        if parsed.json:
            Path(parsed.json).write_text(json.dumps(as_dict(request, found, saving, notes), indent=1) + "\n", "utf-8")
    except (ValueError, OSError) as error:
        return launch.print_error(COMMAND, error)
    console, wide = Console(highlight=False), Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{headline(request)}[/]")
    table = Table(*(Column(name, no_wrap=True) for name in SHORT))
    for line in short_rows(request, found):
        table.add_row(*line)
    console.print(table)
    best = recommended(found, saving)
    wide.print(f"[bold]{verdict(request, found, saving)}[/]")
    if best is not None and best.flags:
        wide.print(command(request, best.flags), markup=False)
    if parsed.all:
        _show_all(console, wide, request, found, saving, notes)
    return 0


def _show_all(
    console: Console,
    wide: Console,
    request: ForecastRequest,
    found: list[Forecast],
    saving: list[tuple[str, Forecast]],
    notes: list[str],
) -> None:
    names = ("per rank and step", *(each.strategy for each in found if not each.refused))
    for table in _tables(names, [*rows(request, found)], console.width):
        console.print(table)
    for each in found:
        if each.refused:
            wide.print(f"{each.strategy}: not possible: {each.refused}", markup=False)
    if saving:
        table = Table(*(Column(name, no_wrap=True) for name in SAVING))
        for line in saving_rows(request, saving):
            table.add_row(*line)
        console.print(table)
    for each in found:
        if not each.refused:
            run = f": {command(request, each.flags)}" if each.flags else ""
            wide.print(f"{each.strategy}, {each.way}{run}", markup=False)
    for note in notes:
        wide.print(f"- {note}", markup=False)


def _tables(names: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> Iterator[Table]:
    """Yield tables of at most ``width`` characters, each with as many strategies as fit; no word is broken."""
    widths = [max(len(name), *(len(line[n]) for line in lines)) + 3 for n, name in enumerate(names)]
    first = 1
    while first < len(names):
        last, left = first + 1, width - 1 - widths[0] - widths[first]
        while last < len(names) and widths[last] <= left:
            left -= widths[last]
            last += 1
        table = Table(Column(names[0], no_wrap=True), *(Column(name, no_wrap=True) for name in names[first:last]))
        for line in lines:
            table.add_row(line[0], *line[first:last])
        yield table
        first = last
