"""``burst plan``: predict what a training step, or generation, costs before you rent GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from burst_attention.attention import known_rates, usual_rates
from burst_attention.cli.flags import NUMBERS, Count, Length, Name, Positive, check_settings, require, whole
from burst_attention.cli.tables import print_table
from burst_attention.inference import SHORT
from burst_attention.launch import local as launch
from burst_attention.planner.choice import TIE
from burst_attention.planner.presets import NETWORKS, NODES
from burst_attention.planner.rates import Rates

from ..config import MODELS, PackingName, RopeScaling, check_balanced, check_strategy
from ..figures import bytes_text, digits, seconds_text, tokens_text
from ..forecast.forecast import Forecast, fastest, forecasts, recommended, savings
from ..forecast.models import Model, model_of
from ..forecast.request import TENSOR, USABLE, Cluster, ForecastRequest, device_of
from ..forecast.serving import served
from ..memory import Saving
from ..presets import PRESETS
from ..step.positions import check_scaled
from .plan_generate import generate_flags, served_dict, served_legend, served_notes, served_rows, served_verdict

COMMAND = "burst plan"
MOST_PLANNED = 1 << 16
USUAL_NODE = 8  # ranks
_OF_TRAINING = ("documents", "packing", "strategy", "tensor_parallel", "remat")


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Predict a training step's time, traffic and memory for each strategy; with --generate, those of generation.

    The command starts no ranks. Numbers may end in K or M (powers of 1024): 128K, 1M.
    """

    seq_len: Length
    """Tokens in the sequence."""
    ranks: Annotated[int, whole(most=MOST_PLANNED)]
    """GPUs (or processes) that share the sequence."""
    nodes: Count | None = None
    """Number of machines. Default: eight ranks per machine."""
    hardware: Name | None = None
    """A preset such as h100-hgx+ethernet-100g, or a file of burst calibrate. Default: what it saved for this machine,
    else a preset for this machine's device: without a GPU, ranks on CPUs."""
    model: Annotated[Name, tyro.conf.arg(help=f"{MODELS} Only its config.json is read.")] = "llama-3-8b"
    rope_scaling: RopeScaling | None = None
    """As for burst train: yarn:FACTOR, for a sequence longer than the model's positions."""
    batch: Count = 1
    """Sequences per batch."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype."""
    documents: Count = 1
    """Number of documents packed into the sequence, all of equal length."""
    packing: PackingName = "sequence"
    """As for burst train. balanced: all ranks share the --batch packed sequences."""
    strategy: Name = "auto"
    """The strategy to plan for, as for burst train; others are compared with it. auto: the fastest attention as
    predicted, without cached q, k and v if memory then allows a shorter step."""
    tensor_parallel: Count | None = None
    """Neighbours that cut the layers, as for burst train. Default: compare 2, 4 and 8 of a node, where possible, with
    none."""
    remat: Literal["auto", "none", "keep-attention", "layer"] = "auto"
    """Activations to recompute. auto: the policy that recomputes least and still fits."""
    peak_tflops: Positive | None = None
    """A device's bf16 peak in TFLOP/s (10^12 operations per second). Overrides the preset."""
    device_memory: Positive | None = None
    """A device's memory in GB (10^9 bytes). Overrides the preset."""
    generate: bool = False
    """Predict burst generate after a prompt of --seq-len tokens: memory, time to the first token and of each further
    one, with whole weights on every rank and with --shard-weights."""
    all: bool = False
    """Print all figures of all strategies, and of options that save memory, as JSON."""
    json: Name | None = None
    """Write what --all prints to this file."""
    saving: Saving = field(default_factory=Saving)

    def check(self) -> None:
        """Raise ValueError if an argument is invalid or contradicts another."""
        check_settings(self)
        check_settings(self.saving)
        check_strategy(self.strategy, "strategy")
        rule = f"is less than one token for each of {self.ranks} ranks; raise it, or lower --ranks"
        require(self.seq_len >= self.ranks, "seq_len", self.seq_len, rule)
        rule = f"is more than --seq-len {self.seq_len}; lower it"
        require(self.documents <= self.seq_len, "documents", self.documents, rule)
        if self.packing == "balanced":
            check_balanced(self.strategy, self.batch)
        unknown = "is not predicted; choose another, such as tensor-sequence"
        require(self.strategy not in ("single", "tensor"), "strategy", self.strategy, unknown)
        if self.nodes:
            held = -(-self.ranks // -(-self.ranks // self.nodes))
            some = f"can't hold {self.ranks} ranks with only the last node not full; use {held}"
            require(held == self.nodes, "nodes", self.nodes, some)
        if self.generate:
            self._check_generate()
        can = self.json is None or (Path(self.json).absolute().parent.is_dir() and not Path(self.json).is_dir())
        require(can, "json", self.json, "can't be written; name a file in an existing folder")

    def _check_generate(self) -> None:
        """Raise ValueError if an option is of training alone, or the prompt too short for shards."""
        for name in _OF_TRAINING:
            usual = {each.name: each.default for each in fields(self)}[name]
            rule = "is of a training step; leave it out, or leave --generate out"
            require(getattr(self, name) == usual, name, getattr(self, name), rule)
        for each in fields(self.saving):
            value = getattr(self.saving, each.name)
            require(value == each.default, each.name, value, "is of a training step; leave it out with --generate")
        least = max(SHORT, self.ranks)
        rule = f"must be above {least} with --generate: every rank computes the whole of a shorter prompt"
        require(self.seq_len > least, "seq_len", self.seq_len, rule)

    def request(self) -> ForecastRequest:
        """Convert the arguments into a request for the predictor; ValueError if the model or hardware is unknown."""
        rates, assumed = self._rates()
        device = device_of(rates)
        if self.peak_tflops is not None:
            device = replace(device, peak=self.peak_tflops * 1e12)
        if self.device_memory is not None:
            device = replace(device, memory=self.device_memory * 1e9)
        per_node = -(-self.ranks // self.nodes) if self.nodes else USUAL_NODE
        joined = self.batch if self.packing == "balanced" else 1
        documents, seq_len = joined * self.documents, joined * self.seq_len
        borders = tuple(n * seq_len // documents for n in range(documents + 1))
        return ForecastRequest(
            seq_len=seq_len,
            cluster=Cluster(ranks=self.ranks, per_node=per_node, rates=rates, device=device),
            model=self._model(),
            batch=self.batch // joined,
            joined=joined,
            dtype=getattr(torch, self.dtype),
            borders=borders if documents > 1 else None,
            remat=None if self.remat == "auto" else self.remat,
            saving=self.saving,
            rope_scaling=self.rope_scaling,
            assumed=assumed,
            strategy=self.strategy + (f"{TENSOR}{self.tensor_parallel}" if (self.tensor_parallel or 1) > 1 else ""),
            compares_meshes=self.tensor_parallel is None,
        )

    def _rates(self) -> tuple[Rates, str]:
        """Return the rates to plan by, and what they are if ``--hardware`` was left out."""
        on_gpus = torch.cuda.is_available()
        try:
            own_rates = known_rates(self.hardware, on_gpus=on_gpus)
        except ValueError as error:
            raise ValueError(f"--hardware {self.hardware}: {error}") from None
        rates = own_rates or usual_rates(on_gpus=on_gpus)
        if self.hardware is not None:
            return rates, ""
        device = "this machine's GPU" if on_gpus else "ranks on CPUs, because this machine has no GPU"
        saved = "what burst calibrate saved for this machine"
        names = f"{', '.join(NODES)}, each with +{' or +'.join(NETWORKS)}"
        return rates, f"No --hardware was given: this plans for {saved if own_rates else device}. Presets: {names}."

    def _model(self) -> Model:
        model = model_of(self.model, self.rope_scaling)
        if self.rope_scaling is not None and model.positions is not None:
            check_scaled(model.positions, self.rope_scaling, model=self.model, seq_len=self.seq_len)
        return model


def headline(request: ForecastRequest) -> str:
    """Return one line that names the model, sequence, ranks, hardware and dtype."""
    cluster = request.cluster
    nodes, length = cluster.nodes, tokens_text(request.seq_len // request.joined)
    uneven = nodes > 1 and cluster.last < cluster.per_node
    fewer = f" (the last with {cluster.last} of {cluster.per_node})" if uneven else ""
    tokens = f"{request.joined} packed sequences of {length}" if request.joined > 1 else length
    return (
        f"{request.model.name}, {tokens} tokens over "
        f"{cluster.ranks:,} rank{'s' * (cluster.ranks > 1)} on {nodes:,} node{'s' * (nodes > 1)}{fewer}, "
        f"{cluster.rates.name}, {str(request.dtype).removeprefix('torch.')}"
    )


def short_rows(request: ForecastRequest, results: list[Forecast]) -> Iterator[dict[str, str]]:
    """Yield a row of figures for each strategy."""
    for prediction in results:
        row = {"strategy": prediction.strategy, "step": "-", "tokens/s": "-", "memory": "-", "--remat": "-"}
        if not prediction.refused:
            row["step"] = seconds_text(prediction.seconds)
            row["tokens/s"] = digits(prediction.tokens_per_second * request.cluster.ranks)
            row["memory"] = "unknown" if prediction.bytes is None else bytes_text(prediction.bytes)
            row["--remat"] = prediction.remat
        fits = {None: "unknown", True: "fits", False: "too large"}[prediction.fits]
        yield row | {"verdict": "refused" if prediction.refused else fits}


def legend(request: ForecastRequest) -> Mapping[str, str]:
    """Return what the columns of :func:`short_rows` mean."""
    memory, rates = request.cluster.device.memory, request.cluster.rates.name
    unknown = f"; unknown, as {rates} names no memory: give a rank's in GB by --device-memory" if memory is None else ""
    return {
        "step": "time of a training step",
        "tokens/s": "of all ranks",
        "memory": "of a rank at its peak" + (f", of {bytes_text(memory)}" if memory else ""),
        "--remat": "what the backward recomputes" + (": the least that fits" if request.remat is None else ""),
        "verdict": f"fits if it takes at most {USABLE:.0%} of the memory{unknown}",
    }


def verdict(request: ForecastRequest, results: list[Forecast], saving: list[tuple[str, Forecast]]) -> str:
    """Return the recommendation, and whether it fits in memory."""
    first, best = fastest(results), recommended(results, saving)
    if best is None:
        return _does_not_fit(request, results, saving)
    text = f"Recommended: {best.strategy} ({best.way}), {seconds_text(best.seconds)} per step"
    if first is not None and first is not best:
        text += (
            f" ({first.strategy} is {1 - first.seconds / best.seconds:.1%} faster, but a difference of up to "
            f"{TIE - 1:.0%} is within the error of these predictions)"
        )
    if request.limit is None:
        return f"{text}. Give --device-memory to check whether it fits."
    if best.bytes is None:
        return f"{text}. No formula gives its memory: try one step."
    added = [] if first is not None else [flags for flags, _ in saving[: [each for _, each in saving].index(best) + 1]]
    remat = [f"--remat {best.remat}"] if not added and best.remat != "none" else []
    needed = f" with {' '.join(added or remat)}" if added or remat else ""
    memory = bytes_text(request.cluster.device.memory or 0)
    return f"{text}. It fits{needed}: {bytes_text(best.bytes)} of {memory} per rank."


def _does_not_fit(request: ForecastRequest, results: list[Forecast], saving: list[tuple[str, Forecast]]) -> str:
    able = [each for each in results if not each.refused] + [each for _, each in saving]
    best = max(able, key=lambda each: each.longest or 0)
    fits = ""
    if longest := best.longest:
        in_k_or_m = f"{longest >> 20}M" if longest >= 64 << 20 else f"{longest >> 10:,}K"  # rounded down
        fits = f"the longest sequence that fits is {in_k_or_m} tokens"
    options = " even with all options that save memory" if saving else ""
    return (
        f"It does not fit{options}: {best.strategy} needs {bytes_text(best.bytes or 0)} per rank; "
        f"{fits or 'no sequence length fits'}. Use more ranks or a shorter --seq-len."
    )


def as_dict(request: ForecastRequest, results: list[Forecast], saving: list[tuple[str, Forecast]]) -> Mapping[str, Any]:
    """Return all figures as plain values in seconds, bytes and FLOP."""
    best = recommended(results, saving)
    return {
        "asked": headline(request),
        "seq_len": request.seq_len // request.joined,
        "joined": request.joined,
        "ranks": request.cluster.ranks,
        "ranks_of_a_node": request.cluster.per_node,
        "rates": request.cluster.rates.as_dict(),
        "model": {"name": request.model.name, "parameters": request.model.size},
        "flops_of_a_step": request.flops,
        "recommended": None if best is None else best.strategy,
        "strategies": [asdict(each) | {"seconds": each.seconds} for each in results],
        "savings": [{"flags": flags, "longest": each.longest, "step": each.seconds} for flags, each in saving],
        "notes": [*notes(request, results)],
    }


def notes(request: ForecastRequest, results: list[Forecast]) -> Iterator[str]:
    """Yield why strategies are refused, and what the figures rest on that was not measured or simulated."""
    yield from [request.assumed] * bool(request.assumed)
    for prediction in results:
        if prediction.refused:
            yield f"{prediction.strategy}: not possible: {prediction.refused}"
    rates = request.cluster.rates
    if unmeasured := rates.source.count("estimated"):
        what = "some of these rates were not measured with this library: what depends on them"
        if unmeasured > 1:
            what = "this hardware was not measured with this library: every figure here"
        yield f"Rates of {rates.name}: {rates.source}; {what} is a prediction."
    if request.model.chooses and results:
        every, again = (bytes_text(request.choices(remat)) for remat in ("none", "layer"))
        yield f"The memory of a rank includes {every} of chosen keys until the backward; with --remat layer {again}."
    if request.model.mixtures and results:
        yield "The seconds of experts were compared in one small case alone: small or many experts take longer."
    name, positions = request.model.name, request.model.positions
    if request.too_long and request.rope_scaling is None:
        factor = ceil(request.seq_len / request.joined / (positions or 1))
        yield (
            f"The sequence is longer than the {positions:,} positions that {name} was made for. If its RoPE is not "
            f"scaled yet, give --rope-scaling yarn:{factor}."
        )
    if name in PRESETS and results:
        yield (
            f"{name} is a preset: the command below trains random weights, on bytes unless --tokenizer names a "
            "tokenizer. To fine-tune, give --model a folder or a name on the hub."
        )
    for few, many in sorted({prediction.standing for prediction in results if prediction.standing}):
        names = ", ".join(prediction.strategy for prediction in results if prediction.standing == (few, many))
        yield (
            f"The attention of {names} is not simulated over all {request.cluster.ranks:,} ranks: it is extrapolated "
            f"from simulations of {few} and {many} ranks."
        )


def command(request: ForecastRequest, flags: str) -> str:
    """Return the shell command that runs ``burst`` with these flags. A comment says if a last node has fewer."""
    cluster = request.cluster
    nodes, ranks = cluster.nodes, min(cluster.ranks, cluster.per_node)
    meet = " --rdzv-backend c10d --rdzv-endpoint HOST:29400" if nodes > 1 else ""
    start = f"torchrun --nnodes {nodes} --nproc-per-node {ranks}{meet} -m burst_attention.cli"
    fewer = f"  # on the last node: --nproc-per-node {cluster.last}" if cluster.last != ranks else ""
    return f"{start} {flags}{fewer}"


def main(arguments: list[str]) -> int:
    """Run ``burst plan`` and return the exit status."""
    flat = (tyro.conf.OmitArgPrefixes,)
    parsed = tyro.cli(PlanArguments, prog=COMMAND, args=arguments, registry=NUMBERS, config=flat)
    try:
        parsed.check()
        request = parsed.request()
        if parsed.generate:
            return _generation(parsed, request)
        results = forecasts(request)
        saving = savings(request) if parsed.all or parsed.json is not None or fastest(results) is None else []
        figures = _written(parsed, as_dict(request, results, saving))
    except (ValueError, OSError) as error:
        return launch.print_error(COMMAND, error)
    console, wide = Console(highlight=False), Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{headline(request)}[/]")
    print_table(console, [*short_rows(request, results)], legend=legend(request))
    for note in notes(request, results):
        wide.print(note, markup=False)
    best = recommended(results, saving)
    wide.print(f"[bold]{verdict(request, results, saving)}[/]")
    if best is not None:
        wide.print(command(request, f"train {best.flags} --data DATA --out runs/mine"), markup=False)
    if parsed.all:
        wide.print(figures, markup=False)
    return 0


def _written(parsed: PlanArguments, values: Mapping[str, Any]) -> str:
    """Return values as JSON, after they were written to the file of ``--json``."""
    figures = json.dumps(values, indent=1)
    if parsed.json is not None:
        Path(parsed.json).write_text(figures + "\n", "utf-8")
    return figures


def _generation(parsed: PlanArguments, request: ForecastRequest) -> int:
    """Print what generation costs; return the exit status."""
    results, asked = served(request), headline(request)
    said = [*notes(request, []), *served_notes(results)]
    figures = _written(parsed, {**served_dict(request, results, asked), "notes": said})
    console, wide = Console(highlight=False), Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]Generation, {asked}[/]")
    print_table(console, [*served_rows(results)], legend=served_legend(request))
    for note in said:
        wide.print(note, markup=False)
    wide.print(f"[bold]{served_verdict(request, results)}[/]")
    if (flags := generate_flags(request, results)) is not None:
        wide.print(command(request, f"generate {flags}"), markup=False)
    if parsed.all:
        wide.print(figures, markup=False)
    return 0
