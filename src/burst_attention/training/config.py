"""The configuration of a training run: one tree of frozen dataclasses, from flags and TOML, written back as TOML."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from burst_attention.engines import EngineName
from burst_attention.plan.layout import LayoutOrAuto
from burst_attention.plan.route import RouteOrAuto

from .flags import (
    Count,
    Fraction,
    Interval,
    Length,
    Name,
    Natural,
    NonNegative,
    Positive,
    Ranks,
    Seconds,
    check_settings,
    flag,
    number,
    require,
)
from .memory import MemoryConfig
from .presets import PRESETS

if TYPE_CHECKING:
    import torch

PackName = Literal["documents", "none"]
DtypeOrAuto = Literal["auto", "float32", "bfloat16", "float64", "fp32", "bf16", "fp64"]
OnNan = Literal["stop", "skip"]
SaveDtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
DeviceOrAuto = Literal["auto", "cpu", "cuda"]
LastRate = Annotated[float, number(lambda value: 0 <= value <= 1, "must be a share of --lr, from 0 to 1")]


@dataclass(frozen=True)
class RunConfig:
    """What is run, and where its results go."""

    steps: Count = 100
    """Optimizer steps."""
    out: Name = "runs/train"
    """Folder of the run: config, metrics, curve and the trained model."""
    seed: Natural = 0
    """Of the model's first weights and of the order of the documents."""
    overwrite: bool = False
    """Replace the run that --out already holds."""
    save_every: Interval = "30m"
    """Steps, or minutes with an m (30m), after which a checkpoint is written to --out."""
    keep: Count = 2
    """How many checkpoints are kept: the newest ones, and with --eval-every the best beside them."""
    eval_every: Natural = 0
    """Steps after which the held-out documents are evaluated, and a checkpoint saved if none did as well.

    0: they are evaluated at the end alone."""
    resume: Name | None = None
    """Go on from a checkpoint: its folder, or newest (alone, the same) for the newest whole one of --out.

    auto: so if --out holds an unfinished run; else begin."""
    deadline: Seconds | None = None
    """Seconds from the start after which the run must be over: before that it saves and ends with status 75."""
    step_timeout: Seconds | None = None
    """Seconds after which a step that still runs is told: each rank its phase, rank 0 who is behind. It goes on."""
    profile: Count | None = None
    """A step of which every rank writes a trace to --out/profile, for Chrome or ui.perfetto.dev."""
    wandb: Name | None = None
    """A project of Weights & Biases that the run is told to as well: pip install 'burst-attention[wandb]'."""
    on_nan: OnNan = "stop"
    """When a loss or gradient is no number. Either way the rank and layer where it came first are named.

    skip: leave the step out, whose data are passed over, and go on; end after 10 in a row."""


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes sequences."""

    data: Name = "stdlib"
    """FILE.txt, a directory, *.jsonl, either as .gz, hf:NAME[:CONFIG][@SPLIT], or stdlib: Python's own source files."""
    tokenizer: Name | None = None
    """bytes, or a Hugging Face tokenizer's path or name. Default: the loaded model's own; bytes for a preset."""
    seq_len: Length = 4096
    """Tokens of a sequence, over all ranks that share it."""
    pack: PackName = "documents"
    """documents: fill sequences with documents, masked from each other. none: cut each from one long document."""
    held_out: Fraction = 0.05
    """Share of the documents kept for evaluation and never trained on; 0 to skip the evaluation."""
    held_out_sequences: Count = 8
    """At most this many held-out sequences are evaluated."""


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    model: Name = "tiny"
    """A preset (tiny, llama-7b, llama-13b, llama-3-8b), or the folder or hub name of a model to load."""
    dtype: DtypeOrAuto = "auto"
    """Of the computation; weights are trained in fp32 (fp64). auto: float32 on CPU, bfloat16 on GPU."""
    save_dtype: SaveDtype = "auto"
    """Of the weights in --out's model. auto: a loaded model's own dtype; fp32 (fp64), as trained, for a preset."""
    max_positions: Length | None = None
    """Sets max_position_embeddings of the model's configuration, for --seq-len beyond it. RoPE stays as it is."""

    def compute_dtype(self, device_type: str) -> torch.dtype:
        """What ``dtype`` means on a device of this type."""
        import torch

        automatic = "bfloat16" if device_type == "cuda" else "float32"
        short = {"auto": automatic, "fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
        return getattr(torch, short.get(self.dtype, self.dtype))


@dataclass(frozen=True)
class ParallelConfig:
    """Who computes what."""

    ranks: Ranks | None = None
    """Local workers to launch. Default: one per GPU, else one per core."""
    data_parallel: Count = 1
    """Groups of ranks that read sequences of their own; the ranks of a group share each sequence."""
    engine: EngineName = "burst"
    """How a sequence is shared: ours, or one to compare it with. All give the same loss."""
    layout: LayoutOrAuto = "auto"
    """Which tokens of a sequence each rank holds. auto: the engine's best; for burst what is predicted to be best."""
    route: RouteOrAuto = "auto"
    """How shards travel, for --engine burst."""
    heads: Count | None = None
    """Groups into which heads are cut, for --engine burst; 1: none. Default: as many as are predicted to be fastest.
    For --engine usp how many neighbours exchange tokens for heads. Default: the most that divide ranks and heads."""
    device: DeviceOrAuto = "auto"
    """auto: a GPU for every rank if the machine has as many, else the CPU."""
    timeout: Seconds = 600.0
    """Seconds a rank waits for another before it gives up."""
    peak_tflops: Positive | None = None
    """TFLOP/s of a rank's device, of which MFU is the share that the model's own operations take.

    These are 6 x parameters of linear layers (head included, embedding not) for a token, and 12 x head_dim for a head
    and a pair that the mask lets see each other. Default: of a known GPU its data sheet's in bf16; else no MFU."""

    @property
    def how(self) -> dict[str, Any]:
        """The engine, as it was asked for."""
        heads = "auto" if self.heads is None else self.heads
        return {"name": self.engine, "layout": self.layout, "route": self.route, "heads": heads}


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule: AdamW, warm-up and cosine decay."""

    lr: Positive | None = None
    """Highest learning rate. Default: 2e-3 for tiny, 3e-4 for the other presets, 2e-5 for a loaded model."""
    min_lr: LastRate = 0.1
    """Last learning rate, as a share of --lr."""
    warmup: Natural = 10
    """Steps of linear warm-up."""
    decay_steps: Count | None = None
    """The step at which the learning rate reaches --min-lr, where it stays. Default: --steps, as the run began."""
    weight_decay: NonNegative = 0.1
    """Of matrices, embeddings and the head among them; norms and biases have none."""
    beta1: Fraction = 0.9
    """AdamW's memory of the gradient."""
    beta2: Fraction = 0.95
    """AdamW's memory of its square."""
    eps: Positive = 1e-8
    """Added to the root of AdamW's second moment."""
    clip: NonNegative = 1.0
    """Largest global norm of the gradient; 0 to leave it alone."""
    batch: Count = 1
    """Sequences that a group computes at once; more than one needs --pack none."""
    accumulate: Count | None = None
    """Micro-steps whose gradients are summed before an optimizer step. Default: what --global-batch leaves, else 1."""
    global_batch: Count | None = None
    """Sequences of an optimizer step, over all groups. Default: --data-parallel x --batch x --accumulate."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a Llama on long documents; every sequence is shared by several ranks."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    @property
    def how(self) -> dict[str, Any]:
        """The engine, as :func:`burst_attention.engines.choose` takes it."""
        return {**self.parallel.how, "remat": self.memory.remat}

    @property
    def packed(self) -> bool:
        """Whether a sequence holds several documents."""
        return self.data.pack == "documents"

    @property
    def peak_lr(self) -> float:
        """``lr``, or what suits the model."""
        if self.optim.lr is not None:
            return self.optim.lr
        return 2e-3 if self.model.model == "tiny" else 3e-4 if self.model.model in PRESETS else 2e-5

    @property
    def decay_steps(self) -> int:
        """The step at which the learning rate has fallen to its least."""
        return self.optim.decay_steps or self.run.steps

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one optimizer step reads, over all groups."""
        return self.optim.global_batch or self.parallel.data_parallel * self.optim.batch * (self.optim.accumulate or 1)

    @property
    def inputs(self) -> dict[str, str | None]:
        """What is read, by flag: paths, or names of something else."""
        return {"--model": self.model.model, "--tokenizer": self.data.tokenizer, "--data": self.data.data}

    def check(self) -> None:
        """Raise ValueError naming the first flag whose value can't be."""
        for section in dataclasses.fields(self):
            check_settings(getattr(self, section.name))
        single = "needs --pack none, as packed sequences differ in their masks; use --accumulate instead"
        require(not self.packed or self.optim.batch == 1, "batch", self.optim.batch, single)
        self._check_global_batch()
        evaluated = self.run.eval_every == 0 or self.data.held_out > 0
        nothing = "needs documents to evaluate, and --held-out 0 keeps none; give a share, or leave --eval-every out"
        require(evaluated, "eval_every", self.run.eval_every, nothing)
        beyond = f"is no step of a run of --steps {self.run.steps}"
        require(self.run.profile is None or self.run.profile <= self.run.steps, "profile", self.run.profile, beyond)
        self.memory.check(self.parallel.engine, self.parallel.device)

    def _check_global_batch(self) -> None:
        asked, accumulate = self.optim.global_batch, self.optim.accumulate
        at_once = self.parallel.data_parallel * self.optim.batch
        if asked is None:
            return
        parts = f"--data-parallel {self.parallel.data_parallel} x --batch {self.optim.batch}"
        rule = f"must be a multiple of {parts}, the {at_once} sequences that are computed at once"
        require(asked % at_once == 0, "global_batch", asked, rule)
        rule = f"is not {parts} x --accumulate {accumulate}; leave --accumulate out, it follows"
        require(accumulate is None or asked == at_once * accumulate, "global_batch", asked, rule)

    def check_world(self, world: int) -> None:
        """Raise ValueError if ``world`` ranks can't run this."""
        groups = self.parallel.data_parallel
        require(world % groups == 0, "data_parallel", groups, f"must divide the number of ranks, {world}")
        short = f"is shorter than the {world // groups} ranks that share a sequence: every rank of a training run needs"
        short += " a token; raise --seq-len or lower --ranks"
        require(self.data.seq_len >= world // groups, "seq_len", self.data.seq_len, short)


def flag_names() -> dict[str, str]:
    """Every setting's name and the section of the tree that holds it; names are unique over the sections."""
    sections = TrainConfig()
    return {
        setting.name: section.name
        for section in dataclasses.fields(sections)
        for setting in dataclasses.fields(getattr(sections, section.name))
    }


def read_toml(path: Path) -> list[str]:
    """The command-line flags that a TOML file stands for, so that one parser checks both.

    A setting is spelled like its flag (``seq_len`` or ``seq-len``), at the top of the file or in its section's table.

    Raises:
        ValueError: the file can't be read, or a key is no setting; names the file and the key.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    settings: dict[str, Any] = {}
    known = flag_names()
    for key, value in content.items():
        inner = value if key in known.values() and isinstance(value, dict) else None
        for name, given in {key: value}.items() if inner is None else inner.items():
            name = name.replace("-", "_")
            if name not in known or (inner is not None and known[name] != key):
                where = f" in [{key}]" if inner is not None else ""
                raise ValueError(f"--config {path}: unknown setting {name!r}{where}{_closest(name, known)}")
            settings[name] = given
    return [part for name, value in settings.items() for part in _as_flags(path, name, value)]


def _closest(name: str, known: Iterable[str]) -> str:
    """The setting that may have been meant, as a question; empty if none is like it."""
    return "".join(f"; did you mean {each!r}?" for each in difflib.get_close_matches(name, known, 1))


def _as_flags(path: Path, name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag(name if value else f"no_{name}")]
    if isinstance(value, (int, float, str)):
        return [f"{flag(name)}={value}"]
    raise ValueError(f"--config {path}: {name} must be a string, a number or a boolean, not {value!r}")


def as_flags(settings: Mapping[str, Mapping[str, Any]], where: Path) -> list[str]:
    """The flags that stand for settings by section and name; ``where`` they were read, for errors."""
    given = (pair for held in settings.values() for pair in held.items())
    return [part for name, value in given if value is not None for part in _as_flags(where, name, value)]


def write_toml(config: TrainConfig) -> str:
    """The configuration as :func:`read_toml` reads it back; what is left to its default of None is left out."""
    import tomli_w

    sections = dataclasses.asdict(config).items()
    given = {section: {name: value for name, value in held.items() if value is not None} for section, held in sections}
    return tomli_w.dumps(given)
