"""Measure how much slower a training step is while a checkpoint is being written.

A Llama of about a hundred million parameters with random weights takes steps: some alone, then as many as the writing
of a checkpoint takes, and so on in turn. Only steps during which a rank was writing all the time count. A round's ratio
divides the median of its steps during the writing by that of the steps alone around it, because the machine's speed
drifts. The program prints the median and the range over the rounds.

    burst bench saving [--rounds 9] [--ranks 2] [--seq-len 512] [--dtype float32] [--out FOLDER]"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from burst_train.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from rich.console import Console

from burst_attention.testing import WorkerPool

from ..tables import terminal
from ..texts import spread

ALONE = 3  # steps between two checkpoints


@dataclass(frozen=True, kw_only=True)
class SavingArguments:
    rounds: int = 9
    ranks: int = 2
    seq_len: int = 512
    dtype: str = "float32"
    layers: int = 12
    out: Path | None = None
    """A folder on the disk to measure; files written there are removed. Default: a temporary folder."""


@dataclass(frozen=True)
class Round:
    """Seconds of steps alone, of steps during the writing, and of the copy and the seal, for which all ranks wait."""

    alone: list[float]
    beside: list[float]
    copying: float
    writing: float
    sealing: float


def make_model(folder: Path, layers: int) -> None:
    """Save a Llama with random weights that works with the byte tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 640, "intermediate_size": 1792, "num_attention_heads": 10, "num_hidden_layers": layers}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32_000, **sizes)).save_pretrained(folder)


def config_of(a: SavingArguments, model: Path, out: Path) -> TrainConfig:
    return TrainConfig(
        run=RunConfig(steps=10**6, out=str(out)),
        data=DataConfig(seq_len=a.seq_len, tokenizer="bytes"),
        model=ModelConfig(model=str(model), dtype=a.dtype),  # type: ignore[arg-type]  # a name of its choices
        parallel=ParallelConfig(device="cpu", timeout=600.0),
    )


def measure(config: TrainConfig, rounds: int) -> tuple[int, list[Round]]:
    """Run on each rank: return the number of parameters and the rounds."""
    from burst_train.checkpoint.generators import read_generators
    from burst_train.checkpoint.manifest import discard
    from burst_train.checkpoint.snapshot import state_of, tensors_of
    from burst_train.checkpoint.writer import CheckpointWriter
    from burst_train.step.loop import Trainer

    from burst_attention.launch.join import join

    with join(device="cpu", timeout=600.0) as context:
        trainer = Trainer(config, context)
        steps = (record.seconds for record in trainer.steps())
        list(itertools.islice(steps, 2))  # the first steps are slower
        found = []
        for _ in range(rounds):
            alone, began = list(itertools.islice(steps, ALONE)), time.perf_counter()
            state = state_of(trainer, context.collect(read_generators()))
            tensors = tensors_of(trainer.model, trainer.optimizer)
            draft = CheckpointWriter(Path(config.run.out), tensors, state, step=trainer.step, context=context)
            copying = time.perf_counter() - began
            draft.write_during_training()
            beside = list(_while_written(steps, draft, context.greatest))
            began = time.perf_counter()
            folder = draft.seal()
            found.append(Round(alone, beside, copying, draft.seconds, time.perf_counter() - began))
            if context.rank == 0:
                discard(folder)
        return sum(parameter.numel() for parameter in trainer.model.parameters()), found


def _while_written(steps: Iterator[float], draft, greatest) -> Iterator[float]:  # type: ignore[no-untyped-def]
    """Yield the seconds of steps that end while some rank still writes."""
    for seconds in steps:
        if not greatest(int(draft.is_being_written))[0]:
            return
        yield seconds


def ratios_of(rounds: list[Round]) -> list[float]:
    """Divide each round's median step during the writing by that of the steps alone before and after it."""
    after = [each.alone for each in rounds[1:]] + [[]]
    return [
        statistics.median(each.beside) / statistics.median(each.alone + following)
        for each, following in zip(rounds, after, strict=True)
        if each.beside
    ]


def main(arguments: list[str]) -> None:
    a = tyro.cli(SavingArguments, prog="burst bench saving", description=__doc__, args=arguments)
    if a.out is not None:
        a.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="burst-saving-", dir=a.out))
    try:
        make_model(folder / "model", a.layers)
        with WorkerPool(a.ranks, timeout=600) as pool:
            parameters, rounds = pool.run(
                measure, config_of(a, folder / "model", folder / "run"), a.rounds, timeout=3600
            )[0]
    finally:
        shutil.rmtree(folder)
    alone = [seconds for each in rounds for seconds in each.alone]
    beside = [seconds for each in rounds for seconds in each.beside]
    found = ratios_of(rounds)
    if not found:
        raise SystemExit("no step ran entirely while a checkpoint was being written; lower --seq-len or raise --layers")
    figures = {
        "a step alone, s": alone,
        "a step while a checkpoint is written, s": beside,
        "ratio, by round": found,
        "writing, s": [each.writing for each in rounds],
        "all wait for the copy, s": [each.copying for each in rounds],
        "all wait for the name, s": [each.sealing for each in rounds],
    }
    rows = ({"what": name, "median (range)": spread(values)} for name, values in figures.items())
    title = (
        f"{parameters / 1e6:.0f} M parameters, {a.dtype}, {a.ranks} ranks, S={a.seq_len}, {len(beside)} while writing"
    )
    Console().print(terminal(rows, title=title))
