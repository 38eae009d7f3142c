"""What ``burst eval`` is asked, and what it answers: plain values, written as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

from burst_attention.cli.flags import (
    Count,
    DeviceOrAuto,
    Length,
    Name,
    Natural,
    Ranks,
    Seconds,
    check_settings,
    distinct,
    number,
    require,
)

from ..config import (
    DataConfig,
    DtypeOrAuto,
    ModelConfig,
    PackName,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from ..engines import ENGINES, EngineName

HeldOut = Annotated[float, number(lambda value: 0 < value <= 1, "must be above 0 and at most 1: 1 evaluates all")]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure one model's perplexity over documents with each engine, and how far they are apart token by token.

    Started plainly it launches its own local workers. Under torchrun it uses the ranks that it finds:
    torchrun --nproc-per-node 2 -m burst_attention.cli eval [OPTIONS].
    """

    model: Name
    """The folder or hub name of a model, as `burst train` writes one, or a preset with random weights."""
    data: Name
    """FILE.txt, a directory, *.jsonl, either as .gz, hf:NAME[:CONFIG][@SPLIT], or stdlib: Python's own source files."""
    engines: Annotated[tuple[EngineName, ...], distinct] = ENGINES
    """Which to run; single, or else the first that can run, is what the others are compared with."""
    seq_len: Length = 4096
    """Tokens of a sequence."""
    sequences: Count = 100
    """At most this many are evaluated."""
    held_out: HeldOut = 1.0
    """Share of the documents: 1 for all, else those that `burst train --held-out` with the same share left out."""
    pack: PackName = "documents"
    """documents: fill sequences with documents, masked from each other. none: cut each from one long document."""
    tokenizer: Name | None = None
    """bytes, or a Hugging Face tokenizer's path or name. Default: the model's own; bytes for a preset."""
    dtype: DtypeOrAuto = "auto"
    """Of the computation; weights are kept in fp32 (fp64). auto: float32 on CPU, bfloat16 on GPU."""
    ranks: Ranks | None = None
    """Local workers to launch: one engine's ranks share each sequence. Default: one per GPU, else one per core."""
    seed: Natural = 0
    """Of a preset's random weights."""
    device: DeviceOrAuto = "auto"
    """auto: a GPU for every rank if the machine has as many, else the CPU."""
    timeout: Seconds = 600.0
    """Seconds a rank waits for another before it gives up."""
    json: Path | None = None
    """Where to write the table as JSON too."""
    overwrite: bool = False
    """Replace what an earlier `burst eval` wrote to --json."""

    def check(self) -> None:
        """Raise ValueError naming the first flag whose value can't be."""
        check_settings(self)
        if self.json is not None:
            require(not self.json.is_dir(), "json", self.json, "is a directory; name a file")
            require(self.json.parent.is_dir(), "json", self.json, "is in no directory that exists; make it first")
            require(_can_hold(self.json.parent), "json", self.json, "is in a directory that can't be written to")
            if self.json.exists():
                require(self.overwrite, "json", self.json, "is there already; name another file or add --overwrite")
                require(_is_evaluation(self.json), "json", self.json, "is no evaluation: it is not written over")

    @property
    def as_training(self) -> TrainConfig:
        """What is read, and what computes it where, as a training run would say it."""
        return TrainConfig(
            run=RunConfig(seed=self.seed),
            data=DataConfig(
                data=self.data,
                tokenizer=self.tokenizer,
                seq_len=self.seq_len,
                pack=self.pack,
                held_out=self.held_out,
                held_out_sequences=self.sequences,
            ),
            model=ModelConfig(model=self.model, dtype=self.dtype),
            parallel=ParallelConfig(ranks=self.ranks, device=self.device, timeout=self.timeout),
        )


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """One engine over all sequences; every figure is None if it refused them.

    Attributes:
        engine: its name.
        refused: why it can't run this model, length and number of ranks.
        loss: mean negative log-likelihood in nats over ``tokens``.
        tokens: those that have a target: all but the last of each document, over all sequences.
        sequences: how many there were.
        seconds: wall time of the forward passes over all sequences, the slowest rank's; loading is not in it.
        reference: the engine that it is compared with, maybe itself.
        greatest_difference: the greatest absolute difference, over all tokens, of its log-likelihood from the
            reference's, in nats.
    """

    engine: str
    refused: str | None = None
    loss: float | None = None
    tokens: int | None = None
    sequences: int | None = None
    seconds: float | None = None
    reference: str | None = None
    greatest_difference: float | None = None

    @property
    def perplexity(self) -> float | None:
        """e to the loss."""
        return None if self.loss is None else math.exp(min(self.loss, 700.0))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All that ``--json`` writes.

    Attributes:
        setting: the flags by name, with the values that the machine decided (ranks, device, dtype).
        results: in the order of ``--engines``. In JSON each has its ``perplexity`` too.
    """

    setting: dict[str, Any]
    results: list[EngineResult]

    @classmethod
    def of(cls, config: EvalConfig, results: list[EngineResult]) -> Evaluation:
        """Of a finished :func:`burst_train.step.evaluate.evaluate`."""
        setting = asdict(config)
        del setting["json"], setting["overwrite"]
        return cls(setting=setting | {"engines": list(config.engines)}, results=results)

    def write(self, path: Path) -> None:
        """As JSON."""
        rows = [asdict(result) | {"perplexity": result.perplexity} for result in self.results]
        path.write_text(json.dumps({"setting": self.setting, "results": rows}, indent=1) + "\n", "utf-8")

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """What :meth:`write` wrote."""
        content = json.loads(path.read_text("utf-8"))
        for row in content["results"]:
            del row["perplexity"]
        return cls(setting=content["setting"], results=[EngineResult(**row) for row in content["results"]])


def _can_hold(folder: Path) -> bool:
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _is_evaluation(path: Path) -> bool:
    try:
        Evaluation.read(path)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True
