"""Settings and results of ``burst eval``: plain values, written as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import tyro
from pydantic import TypeAdapter

from burst_attention.cli.flags import (
    Count,
    DeviceOrAuto,
    Length,
    Name,
    NonNegativeInt,
    Ranks,
    Seconds,
    check_settings,
    distinct,
    number,
    require,
)

from ..config import (
    ChatLoss,
    DataConfig,
    DtypeOrAuto,
    ModelConfig,
    ModelName,
    PackName,
    ParallelConfig,
    RopeScaling,
    RunConfig,
    TrainConfig,
    check_strategy,
)
from ..strategies import STRATEGIES

STRATEGIES_HELP = (
    f"Strategies to run, as for burst train ({', '.join(STRATEGIES)}). Several are compared token by token with "
    "single, or else with the first that can run."
)
HeldOut = Annotated[float, number(lambda value: 0 < value <= 1, "must be above 0 and at most 1: 1 evaluates all")]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure a model's perplexity; with several strategies also how far they differ per token.

    Run directly, it launches local workers. Under torchrun it uses torchrun's ranks:
    torchrun --nproc-per-node 2 -m burst_attention.cli eval [OPTIONS].
    """

    model: ModelName
    data: Name
    """FILE.txt or FILE.jsonl (also as .gz), a directory, hf:NAME[:CONFIG][@SPLIT], or stdlib: Python's source files."""
    strategies: Annotated[tuple[str, ...], distinct, tyro.conf.arg(help=STRATEGIES_HELP)] = ("auto",)
    seq_len: Length = 4096
    """Tokens per sequence."""
    sequences: Count = 100
    """Maximum number of sequences to evaluate."""
    held_out: HeldOut = 1.0
    """Share of the documents. 1: all; otherwise those that `burst train` held out with the same --held-out."""
    pack: PackName = "documents"
    """documents: pack documents into sequences, masked from each other. none: cut each sequence from one document."""
    chat_loss: ChatLoss = "assistant"
    """Tokens of a conversation ('messages') that count: assistant (what the assistant wrote) or all."""
    tokenizer: Name | None = None
    """bytes, or the path or hub name of a Hugging Face tokenizer. Default: the model's; bytes for a preset."""
    rope_scaling: RopeScaling | None = None
    """As for burst train. A model trained with it has it in its config.json."""
    dtype: DtypeOrAuto = "auto"
    """Dtype of the computation; weights are held in fp32 (fp64). auto: float32 on CPU, bfloat16 on GPU."""
    ranks: Ranks | None = None
    """Local workers to launch; they share each sequence. Default: one per GPU, else one per core."""
    seed: NonNegativeInt = 0
    """Seed of a preset's random weights."""
    device: DeviceOrAuto = "auto"
    """auto: GPUs if the machine has one for every rank; otherwise the CPU."""
    timeout: Seconds = 600.0
    """Seconds that a rank waits for another rank before it gives up."""
    json: Path | None = None
    """File to write the table to, as JSON."""
    overwrite: bool = False
    """Replace an earlier `burst eval` result at --json."""

    def check(self) -> None:
        """Raise ValueError naming the first flag with an invalid value."""
        check_settings(self)
        for name in self.strategies:
            check_strategy(name, "strategies")
        if self.json is not None:
            require(not self.json.is_dir(), "json", self.json, "is a directory; name a file")
            require(self.json.parent.is_dir(), "json", self.json, "is in a missing directory; create it first")
            require(_can_hold(self.json.parent), "json", self.json, "is in a directory that can't be written to")
            if self.json.exists():
                require(self.overwrite, "json", self.json, "already exists; name another file or add --overwrite")
                require(_is_evaluation(self.json), "json", self.json, "is not an evaluation; name another file")

    @property
    def as_training(self) -> TrainConfig:
        """The same settings as a training run's configuration."""
        return TrainConfig(
            run=RunConfig(seed=self.seed),
            data=DataConfig(
                data=self.data,
                tokenizer=self.tokenizer,
                seq_len=self.seq_len,
                pack=self.pack,
                chat_loss=self.chat_loss,
                held_out=self.held_out,
                held_out_sequences=self.sequences,
            ),
            model=ModelConfig(model=self.model, dtype=self.dtype, rope_scaling=self.rope_scaling),
            parallel=ParallelConfig(ranks=self.ranks, device=self.device, timeout=self.timeout),
        )


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """Result of one strategy over all sequences. A refused one has no figures (None)."""

    strategy: str
    refused: str | None = None  # why it can't run with this model, length and number of ranks
    loss: float | None = None  # mean negative log-likelihood in nats
    tokens: int | None = None  # with a target, over all sequences
    sequences: int | None = None
    seconds: float | None = None  # of the forwards on the slowest rank
    reference: str | None = None  # the strategy it is compared with
    greatest_difference: float | None = None  # of a token's log-likelihood from the reference's, in nats

    @property
    def perplexity(self) -> float | None:
        """exp(loss)."""
        return None if self.loss is None else math.exp(min(self.loss, 700.0))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything that ``--json`` writes."""

    setting: dict[str, Any]  # the flags, with the resolved ranks, device and dtype
    results: list[StrategyResult]


def write_results(path: Path, config: EvalConfig, results: list[StrategyResult]) -> None:
    """Write an :class:`Evaluation` as JSON."""
    setting = asdict(config) | {"strategies": list(config.strategies)}
    del setting["json"], setting["overwrite"]
    rows = [asdict(result) | {"perplexity": result.perplexity} for result in results]
    path.write_text(json.dumps({"setting": setting, "results": rows}, indent=1) + "\n", "utf-8")


def _can_hold(folder: Path) -> bool:
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _is_evaluation(path: Path) -> bool:
    try:
        TypeAdapter(Evaluation).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError):  # pydantic's errors are ValueErrors
        return False
    return True
