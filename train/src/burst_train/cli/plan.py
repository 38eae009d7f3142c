"""``burst plan``: what a sequence over so many GPUs will cost, before anything is rented."""

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
from burst_attention.plan.assignment import TravelsOrAuto
from burst_attention.plan.layout import LayoutOrAuto
from burst_attention.plan.route import RouteOrAuto

from ..forecast.forecast import Forecast, forecasts
from ..forecast.machines import Device, device_of
from ..forecast.models import Model, model_of
from ..forecast.request import Cluster, Question
from .plan_page import page
from .plan_words import as_dict, assumptions, command, headline, rows, verdict

COMMAND = "burst plan"
MOST_RANKS = 1 << 16
USUAL_NODE = 8  # ranks
DEFAULT_MODEL = "llama-3-8b"
RematOrAuto = Literal["auto", "none", "keep-attention", "layer"]
Share = Annotated[float, number(lambda value: 0 < value <= 1, "must be above 0 and at most 1")]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a training step on one long sequence costs over many GPUs: seconds, bytes, memory, by engine.

    Nothing is launched, nothing is fetched. Numbers may be written 128K and 1M, in powers of 1024. The model is Llama 3
    8B unless --model names another, or --q-heads asks for attention alone.
    """

    seq_len: Length
    """Tokens of the sequence."""
    ranks: Annotated[int, whole(most=MOST_RANKS)]
    """GPUs (or processes) that share it."""
    nodes: Count | None = None
    """Machines that these are on. Default: as many as eight ranks each need."""
    hardware: Name | None = None
    """A preset, as h100-hgx or a100-nvlink+ethernet-100g, or a TOML file of burst calibrate. Default: what burst
    calibrate wrote for this user, else what is usual for this machine."""
    model: Name | None = None
    """llama-3-8b or another name that is known, or a folder with a config.json, or that file."""
    q_heads: Count | None = None
    """Query heads of attention alone, in place of --model."""
    kv_heads: Count | None = None
    """Key-value heads; --q-heads if not given."""
    head_dim: Count | None = None
    """128 if not given."""
    v_head_dim: Count | None = None
    """--head-dim if not given."""
    layers: Count | None = None
    """Layers of attention alone; 1 if not given."""
    batch: Count = 1
    """Sequences that are computed at once."""
    dtype: DtypeName = "bfloat16"
    """bfloat16 or float32; of attention alone any."""
    causal: bool = True
    window: Count | None = None
    """Keys that a query sees, in all layers."""
    documents: Count = 1
    """Pack this many equal documents."""
    layout: LayoutOrAuto = "auto"
    """Of burst, as for burst train; auto: what is predicted to be fastest."""
    route: RouteOrAuto = "auto"
    """Of burst."""
    travels: TravelsOrAuto = "auto"
    """Of burst, in the backward."""
    heads: Count | None = None
    """Groups into which burst cuts heads. Default: as many as are predicted to be fastest."""
    remat: RematOrAuto = "auto"
    """What is recomputed; auto: the least that fits."""
    mlp_chunks: Count = 1
    """As for burst train."""
    matmul_efficiency: Share = 0.4
    """Share of the peak that the rest of the model reaches; 0.4 fits published training speeds on H100."""
    peak_tflops: Positive | None = None
    """A device's peak in bf16, in 10^12 operations a second, where the preset does not say it."""
    device_memory: Positive | None = None
    """What a device holds, in GB (10^9 bytes), where the preset does not say it."""
    json: Name | None = None
    """A file to write all figures to."""
    html: Name | None = None
    """A file to write a page to: who computes what when, what travels, where time and memory go."""

    def check(self) -> None:
        """Raise ValueError for what can't be."""
        check_settings(self)
        require(
            self.seq_len >= self.ranks, "seq_len", self.seq_len, f"is less than a token for each of {self.ranks} ranks"
        )
        require(self.documents <= self.seq_len, "documents", self.documents, f"is more than --seq-len {self.seq_len}")
        require(self.causal or self.window is None, "window", self.window, "looks back only; leave --no-causal out")
        most = self.nodes is None or self.nodes <= self.ranks
        require(most, "nodes", self.nodes, f"is more than --ranks {self.ranks}: each has one at least")
        if self.nodes:
            held = -(-self.ranks // -(-self.ranks // self.nodes))
            some = f"can't share {self.ranks} ranks so that only the last has fewer; {held} can"
            require(held == self.nodes, "nodes", self.nodes, some)
        for name in ("json", "html"):
            given = getattr(self, name)
            can = given is None or (Path(given).absolute().parent.is_dir() and not Path(given).is_dir())
            require(can, name, given, "can't be written; name a file in a folder that is there")
        if self.q_heads is None:
            for name in ("kv_heads", "head_dim", "v_head_dim", "layers"):
                alone = "is of attention alone, which --q-heads asks for; --model says it of a model"
                require(getattr(self, name) is None, name, getattr(self, name), alone)
            require(self.causal, "causal", "no", "is for attention alone (--q-heads): the models here are causal")
            known = "is of attention alone (--q-heads): a model's memory is known in bfloat16 and float32"
            require(self.dtype in ("bfloat16", "float32"), "dtype", self.dtype, known)
            return
        require(self.model is None, "q_heads", self.q_heads, "is for attention alone; leave it out, or --model")
        multiple = f"must be a multiple of --kv-heads {self.kv_heads}"
        require(self.q_heads % (self.kv_heads or self.q_heads) == 0, "q_heads", self.q_heads, multiple)
        require(self.mlp_chunks == 1, "mlp_chunks", self.mlp_chunks, "is of a model; leave it out, or --q-heads")
        require(self.remat in ("auto", "none"), "remat", self.remat, "is of a model; leave it out, or --q-heads")

    def question(self) -> Question:
        """What is asked.

        Raises:
            ValueError: there is no such model or hardware.
        """
        model = None if self.q_heads is not None else model_of(self.model or DEFAULT_MODEL)
        borders = tuple(n * self.seq_len // self.documents for n in range(self.documents + 1))
        return Question(
            seq_len=self.seq_len,
            cluster=self._cluster(),
            model=model,
            **self._sizes(model),
            batch=self.batch,
            dtype=getattr(torch, self.dtype),
            causal=self.causal,
            window=self.window,
            borders=borders if self.documents > 1 else None,
            remat=None if self.remat == "auto" else self.remat,
            mlp_chunks=self.mlp_chunks,
            layout=self.layout,
            route=self.route,
            heads="auto" if self.heads is None else self.heads,
            travels=self.travels,
        )

    def _sizes(self, model: Model | None) -> Mapping[str, Any]:
        if model is not None:
            names = ("q_heads", "kv_heads", "head_dim", "layers")
            return {name: getattr(model, name) for name in names}
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
            ),
            efficiency=self.matmul_efficiency,
        )


def main(arguments: list[str]) -> int:
    """Run ``burst plan``; returns the exit status."""
    parsed = tyro.cli(Arguments, prog=COMMAND, args=arguments, registry=numbers())
    try:
        parsed.check()
        question = parsed.question()
        found = forecasts(question)
        notes = [*assumptions(question, found)]
        if parsed.json:
            Path(parsed.json).write_text(json.dumps(as_dict(question, found, notes), indent=1) + "\n", "utf-8")
        if parsed.html:
            drawn = page(headline(question), verdict(question, found), [*rows(question, found)], question, found, notes)
            Path(parsed.html).write_text(drawn, "utf-8")
    except (ValueError, OSError) as error:
        return launch.refuse(COMMAND, error)
    _show(question, found, notes)
    return 0


def _show(question: Question, found: list[Forecast], notes: list[str]) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{headline(question)}[/]")
    names = ("a rank, in a step", *(each.engine for each in found if not each.refused))
    for table in _tables(names, [*rows(question, found)], console.width):
        console.print(table)
    wide = Console(highlight=False, soft_wrap=True)
    for each in found:
        if each.refused:
            wide.print(f"{each.engine}: not here: {each.refused}", markup=False)
    wide.print(f"[bold]{verdict(question, found)}[/]")
    for each in found:
        if not each.refused:
            run = f": {command(question, each.flags)}" if each.flags else ""
            wide.print(f"{each.engine}, {each.way}{run}", markup=False)
    for note in notes:
        wide.print(f"- {note}", markup=False)


def _tables(names: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> Iterator[Table]:
    """Yield tables of whole columns: as many engines in each as fit ``width``, so that no word is broken."""
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
