"""``burst plan``: predict what a training step costs before you rent GPUs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console

from burst_attention.attention.hardware import resolve_rates
from burst_attention.cli.flags import Count, Length, Name, Positive, check_settings, require, whole
from burst_attention.cli.numbers import numbers
from burst_attention.cli.tables import print_table
from burst_attention.launch import local as launch
from burst_attention.plan.layout import BALANCED

from ..config import PackingName, check_balanced, check_strategy
from ..forecast.forecast import fastest, forecasts, recommended, savings
from ..forecast.machines import device_of
from ..forecast.models import model_of
from ..forecast.request import TENSOR, Cluster, ForecastRequest
from ..memory import MemoryConfig, Offload, OptimizerName
from .plan_words import as_dict, command, headline, notes, short_rows, verdict

COMMAND = "burst plan"
MOST_PLANNED = 1 << 16
USUAL_NODE = 8  # ranks
SAVING = ("mlp_chunks", "attention_chunks", "offload", "optimizer", "optimizer_offload")


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Predict a training step's time, traffic and memory for each strategy.

    The command starts no ranks. Numbers may end in K or M (powers of 1024): 128K, 1M.
    """

    seq_len: Length
    """Tokens in the sequence."""
    ranks: Annotated[int, whole(most=MOST_PLANNED)]
    """GPUs (or processes) that share the sequence."""
    nodes: Count | None = None
    """Number of machines. Default: eight ranks per machine."""
    hardware: Name | None = None
    """A preset such as h100-hgx+ethernet-100g, or a file of burst calibrate. Default: its saved file, else a preset."""
    model: Name = "llama-3-8b"
    """A preset, or the folder or hub name of a model. Only its config.json is read."""
    batch: Count = 1
    """Sequences per batch."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype."""
    documents: Count = 1
    """Number of documents packed into the sequence, all of equal length."""
    packing: PackingName = "sequence"
    """As for burst train. balanced: all ranks share the --batch packed sequences."""
    strategy: Name = "auto"
    """The strategy to plan for, as for burst train; others are compared with it. auto: the fastest by prediction."""
    tensor_parallel: Count | None = None
    """Neighbours that cut the layers, as for burst train. Default: compare 2, 4 and 8 of a node, where possible, with
    none."""
    remat: Literal["auto", "none", "keep-attention", "layer"] = "auto"
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
    peak_tflops: Positive | None = None
    """A device's bf16 peak in TFLOP/s (10^12 operations per second). Overrides the preset."""
    device_memory: Positive | None = None
    """A device's memory in GB (10^9 bytes). Overrides the preset."""
    all: bool = False
    """Print all figures of all strategies, and of options that save memory, as JSON."""
    json: Name | None = None
    """Write what --all prints to this file."""

    def check(self) -> None:
        """Raise ValueError if an argument is invalid or contradicts another."""
        check_settings(self)
        check_strategy(self.strategy, "strategy")
        rule = f"is less than one token for each of {self.ranks} ranks; raise it, or lower --ranks"
        require(self.seq_len >= self.ranks, "seq_len", self.seq_len, rule)
        rule = f"is more than --seq-len {self.seq_len}; lower it"
        require(self.documents <= self.seq_len, "documents", self.documents, rule)
        if self.packing == "balanced":
            check_balanced(self.strategy, self.batch)
        unknown = "is not predicted; choose another, such as tensor-sequence"
        require(self.strategy not in ("single", "tensor"), "strategy", self.strategy, unknown)
        most = self.nodes is None or self.nodes <= self.ranks
        require(most, "nodes", self.nodes, f"is more than --ranks {self.ranks}; each node needs at least one rank")
        if self.nodes:
            held = -(-self.ranks // -(-self.ranks // self.nodes))
            some = f"can't hold {self.ranks} ranks with only the last node not full; use {held}"
            require(held == self.nodes, "nodes", self.nodes, some)
        can = self.json is None or (Path(self.json).absolute().parent.is_dir() and not Path(self.json).is_dir())
        require(can, "json", self.json, "can't be written; name a file in an existing folder")

    def request(self) -> ForecastRequest:
        """Convert the arguments into a request for the predictor; ValueError if the model or hardware is unknown."""
        joined = self.batch if self.packing == "balanced" else 1
        documents, seq_len = joined * self.documents, joined * self.seq_len
        borders = tuple(n * seq_len // documents for n in range(documents + 1))
        return ForecastRequest(
            seq_len=seq_len,
            cluster=self._cluster(),
            model=model_of(self.model),
            batch=self.batch // joined,
            joined=joined,
            dtype=getattr(torch, self.dtype),
            borders=borders if documents > 1 else None,
            remat=None if self.remat == "auto" else self.remat,
            saving=MemoryConfig(**{name: getattr(self, name) for name in SAVING}),
            strategy=self.strategy + (f"{TENSOR}{self.tensor_parallel}" if (self.tensor_parallel or 1) > 1 else ""),
            compares_meshes=self.tensor_parallel is None,
            layout=BALANCED if joined > 1 else "auto",
        )

    def _cluster(self) -> Cluster:
        try:
            rates = resolve_rates(self.hardware, on_gpus=torch.cuda.is_available())
        except ValueError as error:
            raise ValueError(f"--hardware {self.hardware}: {error}") from None
        device = device_of(rates)
        if self.peak_tflops is not None:
            device = replace(device, peak=self.peak_tflops * 1e12)
        if self.device_memory is not None:
            device = replace(device, memory=self.device_memory * 1e9)
        per_node = -(-self.ranks // self.nodes) if self.nodes else USUAL_NODE
        return Cluster(ranks=self.ranks, per_node=per_node, rates=rates, device=device)


def main(arguments: list[str]) -> int:
    """Run ``burst plan`` and return the exit status."""
    parsed = tyro.cli(PlanArguments, prog=COMMAND, args=arguments, registry=numbers())
    try:
        parsed.check()
        request = parsed.request()
        found = forecasts(request)
        saving = savings(request) if parsed.all or parsed.json is not None or fastest(found) is None else []
        figures = json.dumps(as_dict(request, found, saving), indent=1)
        if parsed.json is not None:
            Path(parsed.json).write_text(figures + "\n", "utf-8")
    except (ValueError, OSError) as error:
        return launch.print_error(COMMAND, error)
    console, wide = Console(highlight=False), Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{headline(request)}[/]")
    print_table(console, [*short_rows(request, found)])
    for note in notes(request, found):
        wide.print(note, markup=False)
    best = recommended(found, saving)
    wide.print(f"[bold]{verdict(request, found, saving)}[/]")
    if best is not None:
        wide.print(command(request, best.flags), markup=False)
    if parsed.all:
        wide.print(figures, markup=False)
    return 0
