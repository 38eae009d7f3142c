"""Configuration of a training run: frozen dataclasses, read from flags and TOML, written as TOML."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import tomli_w
import tyro

from burst_attention.cli.flags import (
    Count,
    DeviceOrAuto,
    Fraction,
    Interval,
    Length,
    Name,
    NonNegative,
    NonNegativeInt,
    Positive,
    Ranks,
    Seconds,
    check_settings,
    flag,
    number,
    require,
    whole_number,
)
from burst_attention.plan.layout import BALANCED
from burst_attention.plan.strategy import strategy_of

from .memory import MemoryConfig
from .presets import PRESETS
from .strategies import FOREIGN, MEGATRON, choose

if TYPE_CHECKING:
    import torch

ChatLoss = Literal["assistant", "all"]
PackName = Literal["documents", "none"]
PackingName = Literal["sequence", "balanced"]
DtypeOrAuto = Literal["auto", "float32", "bfloat16", "float64"]
OnNan = Literal["stop", "skip"]
ScheduleName = Literal["cosine", "linear", "constant", "warmup-stable-decay"]
SaveDtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
LastRate = Annotated[float, number(lambda value: 0 <= value <= 1, "must be a share of --lr, from 0 to 1")]
YARN = "yarn:"


def yarn_factor(scaling: str) -> float:
    """Return the factor of a --rope-scaling; ValueError if it is none."""
    factor = float(scaling.removeprefix(YARN) if scaling.startswith(YARN) else "")
    if not 1 < factor < 1e6:  # also false for nan
        raise ValueError
    return factor


def _rope_scaling(value: str) -> str:
    try:
        yarn_factor(value)
    except ValueError:
        longest = "dynamic and longrope depend on the longest position, which differs by rank"
        return f"{value!r} must be yarn:FACTOR with a factor above 1, as in yarn:4 ({longest})"
    return ""


RopeScaling = Annotated[str, _rope_scaling]
MODELS = f"A preset with random weights ({', '.join(PRESETS)}), or the folder or hub name of a model to load."
ModelName = Annotated[Name, tyro.conf.arg(help=MODELS)]


@dataclass(frozen=True)
class RunConfig:
    """How long the run is, and where its results go."""

    steps: Count = 100
    """Number of optimizer steps."""
    out: Name = "runs/train"
    """Folder of the run: config, metrics, loss curve, checkpoints and the trained model."""
    seed: NonNegativeInt = 0
    """Seed of the model's initial weights and of the document order."""
    overwrite: bool = False
    """Replace the run that --out already holds."""
    save_every: Interval = "30m"
    """Interval between checkpoints in --out: a number of steps, or minutes with an m (30m). The end is saved too."""
    keep: Count = 2
    """Number of newest checkpoints to keep. With --eval-every, the best one is kept too."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations of the held-out documents. A checkpoint is saved when their loss is the lowest so far.
    0: evaluate only at the end."""
    resume: Name | None = None
    """Resume from a checkpoint: its folder, or newest (also without a value): the newest undamaged one in --out.
    auto: resume if --out holds an unfinished run; otherwise start a new one."""
    deadline: Seconds | None = None
    """Time limit of the run, in seconds from its start. Before the limit, the run saves and exits with status 75."""
    step_timeout: Seconds | None = None
    """Seconds after which a running step is reported: each rank's phase, and the stragglers. The run continues."""
    profile: Count | None = None
    """Step to profile. Every rank writes a trace to --out/profile, for Chrome or ui.perfetto.dev."""
    wandb: Name | None = None
    """Weights & Biases project to log to. Needs: pip install wandb."""
    on_nan: OnNan = "stop"
    """Action on a non-finite loss or gradient. Both choices report the rank and layer where it first appeared.
    stop: end the run. skip: leave out the update, discard its data and continue; end after 10 in a row."""
    deterministic: bool = True
    """Use only operations that add in a fixed order, so that a resumed run repeats the same bits.
    On a GPU, attention is faster with --no-deterministic. On a CPU every operation has a fixed order."""


@dataclass(frozen=True)
class DataConfig:
    """Which documents are read, and how they become sequences."""

    data: Name = "stdlib"
    """FILE.txt or FILE.jsonl (also as .gz), a directory, hf:NAME[:CONFIG][@SPLIT], or stdlib: Python's source files.
    A JSON line, or a row of hf:, has the field text, or messages: a conversation for the tokenizer's chat template."""
    tokenizer: Name | None = None
    """bytes, or the path or hub name of a Hugging Face tokenizer. Default: the loaded model's; bytes for a preset."""
    seq_len: Length = 4096
    """Tokens per sequence, over all ranks that share it."""
    pack: PackName = "documents"
    """documents: pack documents into sequences, masked from each other. none: cut each sequence from one document."""
    chat_loss: ChatLoss = "assistant"
    """Tokens of a conversation ('messages') that the loss counts: assistant (what the assistant wrote) or all."""
    held_out: Fraction = 0.05
    """Share of the documents used for evaluation and never trained on; 0 skips the evaluation."""
    held_out_sequences: Count = 8
    """Maximum number of held-out sequences to evaluate."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained, and in which precision."""

    model: ModelName = "tiny"
    dtype: DtypeOrAuto = "auto"
    """Dtype of the computation; weights are trained in fp32 (fp64). auto: float32 on CPU, bfloat16 on GPU. float64: a
    mixture's experts run in a loop, because transformers' fused product takes no float64."""
    save_dtype: SaveDtype = "auto"
    """Dtype of the weights saved in --out/model. auto: a loaded model's dtype; for a preset fp32 (fp64) as trained."""
    max_positions: Length | None = None
    """New, larger max_position_embeddings for the model, if --seq-len exceeds it. RoPE settings do not change."""
    rope_scaling: RopeScaling | None = None
    """yarn:FACTOR: that many times the model's positions, by YaRN (arXiv 2309.00071). Saved in --out/model."""
    lora: Count | None = None
    """Train LoRA adapters of this rank in all linear layers but the head; all other weights are frozen. Needs PEFT.
    Checkpoints hold the adapters alone. --out/model has them merged; its folder adapter has them alone."""

    def compute_dtype(self, device_type: str) -> torch.dtype:
        """Return the torch dtype for ``dtype`` on this type of device."""
        import torch

        automatic = "bfloat16" if device_type == "cuda" else "float32"
        return getattr(torch, automatic if self.dtype == "auto" else self.dtype)


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is divided among ranks."""

    ranks: Ranks | None = None
    """Local workers to launch. Default: one per GPU, or one per core without GPUs."""
    data_parallel: Count = 1
    """Number of data-parallel groups. Each group reads different sequences; its ranks share each sequence."""
    tensor_parallel: Count = 1
    """Ranks that share the same tokens and cut the layers' weights, heads and vocabulary (Megatron-LM). Consecutive
    ranks do, so those of one node. The rest share sequences by --strategy, and weights by FSDP2."""
    packing: PackingName = "sequence"
    """sequence: each sequence has a plan. balanced: all ranks share the --batch sequences of a micro-step by one plan.
    balanced spreads a document over as many ranks as it needs: short ones usually stay whole on one rank."""
    strategy: Name = "auto"
    """How ranks share a sequence: auto (fastest attention as predicted), burst, ring, zigzag-ring, all-gather, ulysses,
    usp, usp:U, or fields of a Strategy such as layout=zigzag,ulysses_degree=4. To compare with: tensor,
    tensor-sequence, single. All give the same loss."""
    device: DeviceOrAuto = "auto"
    """auto: GPUs if the machine has one for every rank; otherwise the CPU."""
    timeout: Seconds = 600.0
    """Seconds that a rank waits for another rank before it gives up."""
    peak_tflops: Positive | None = None
    """Peak TFLOP/s of one rank's device, for MFU: the rate of the model's operations divided by this peak.
    The model's operations are 6 per token and parameter of linear layers (head included, embedding excluded), and
    12 x head_dim per layer, head and unmasked (query, key) pair. Default: a known GPU's bf16 rate from its data
    sheet; else no MFU."""

    def sharing(self, world: int) -> int:
        """Return how many of ``world`` ranks share a sequence by its tokens."""
        return world // (self.data_parallel * self.tensor_parallel)


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule: AdamW, warm-up and decay."""

    lr: Positive | None = None
    """Peak learning rate. Default: 2e-3 for tiny, 3e-4 for other presets, 2e-5 for a loaded model, 2e-4 with --lora."""
    min_lr: LastRate = 0.1
    """Final learning rate, as a share of --lr."""
    schedule: ScheduleName = "cosine"
    """How the learning rate falls after the warm-up. warmup-stable-decay: linearly, over the last tenth of the steps.
    constant: not at all; --min-lr has no effect."""
    warmup: NonNegativeInt = 10
    """Steps of linear warm-up."""
    decay_steps: Count | None = None
    """Step at which the learning rate reaches --min-lr and stays there. Default: --steps of the run's first start."""
    weight_decay: NonNegative = 0.1
    """Weight decay of matrices, including embeddings and the head; norms and biases have none."""
    beta1: Fraction = 0.9
    """AdamW's decay rate of the first moment (mean gradient)."""
    beta2: Fraction = 0.95
    """AdamW's decay rate of the second moment (mean squared gradient)."""
    eps: Positive = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    clip: NonNegative = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""
    batch: Count = 1
    """Sequences per group and micro-step; more than one needs --pack none or --packing balanced."""
    accumulate: Count | None = None
    """Micro-steps of gradient accumulation per optimizer step. Default: derived from --global-batch, or 1."""
    global_batch: Count | None = None
    """Sequences per optimizer step, over all groups. Default: --data-parallel x --batch x --accumulate."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model on long documents; several ranks share every sequence."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    @property
    def how(self) -> dict[str, Any]:
        """What :func:`burst_train.strategies.choose` takes."""
        memory = {"remat": self.memory.remat, "attention_chunks": self.memory.attention_chunks}
        return {"name": self.parallel.strategy, "balanced": self.joins, **memory}

    @property
    def packed(self) -> bool:
        """Whether a sequence can hold several documents."""
        return self.data.pack == "documents"

    @property
    def peak_lr(self) -> float:
        """Return ``lr``, or the model's default peak learning rate."""
        if self.optim.lr is not None:
            return self.optim.lr
        if self.model.lora is not None:
            return 2e-4
        return 2e-3 if self.model.model == "tiny" else 3e-4 if self.model.model in PRESETS else 2e-5

    @property
    def decay_steps(self) -> int:
        """The step at which the learning rate reaches its minimum."""
        return self.optim.decay_steps or self.run.steps

    @property
    def joins(self) -> bool:
        """Whether the sequences of a micro-step become documents of one row."""
        return self.parallel.packing == "balanced"

    @property
    def micro_batch(self) -> tuple[int, int]:
        """Return the shape (rows, tokens) of a micro-step's batch in each group."""
        batch, tokens = self.optim.batch, self.data.seq_len
        return (1, batch * tokens) if self.joins else (batch, tokens)

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step, over all groups."""
        return self.optim.global_batch or self.parallel.data_parallel * self.optim.batch * (self.optim.accumulate or 1)

    @property
    def inputs(self) -> dict[str, str | None]:
        """Inputs by flag: paths or other names."""
        return {"--model": self.model.model, "--tokenizer": self.data.tokenizer, "--data": self.data.data}

    def check(self) -> None:
        """Raise ValueError naming the first flag with an invalid value."""
        for section in dataclasses.fields(self):
            check_settings(getattr(self, section.name))
        check_strategy(self.parallel.strategy, "strategy")
        single = "needs --pack none or --packing balanced, because packed sequences have different masks; "
        single += "use --accumulate instead"
        require(not self.packed or self.optim.batch == 1 or self.joins, "batch", self.optim.batch, single)
        self._check_packing()
        self._check_global_batch()
        evaluated = self.run.eval_every == 0 or self.data.held_out > 0
        nothing = "needs documents to evaluate, but --held-out 0 keeps none; raise --held-out or omit --eval-every"
        require(evaluated, "eval_every", self.run.eval_every, nothing)
        beyond = f"is after the last of --steps {self.run.steps}; choose an earlier step"
        require(self.run.profile is None or self.run.profile <= self.run.steps, "profile", self.run.profile, beyond)
        self.memory.check(self.parallel.strategy, self.parallel.device)
        self._check_lora()
        self._check_tensor()

    def check_packages(self) -> None:
        """Raise ValueError naming the first flag whose package is not installed."""
        eight = self.memory.optimizer == "adamw-8bit"
        trainer = "in the checkout, run pip install -e '.[trainer]'"
        for enabled, package, text in (
            (self.run.wandb, "wandb", f"--wandb {self.run.wandb!r} needs wandb: pip install wandb"),
            (self.model.lora, "peft", f"--lora {self.model.lora} needs PEFT: {trainer}"),
            (eight, "torchao", "--optimizer adamw-8bit needs torchao: pip install torchao"),
        ):
            if enabled and find_spec(package) is None:
                raise ValueError(text)

    def _check_packing(self) -> None:
        if not self.joins:
            return
        parallel = self.parallel
        rule = "splits the ranks, but --packing balanced shares a batch over all of them; give --batch instead"
        require(parallel.data_parallel == 1, "data_parallel", parallel.data_parallel, rule)
        check_balanced(parallel.strategy, self.optim.batch)

    def _check_lora(self) -> None:
        lora, model, strategy = self.model.lora, self.model.model, self.parallel.strategy
        rule = f"adapts a trained model, but --model {model} has random weights; give a folder or a name on the hub"
        require(lora is None or model not in PRESETS, "lora", lora, rule)
        rule = f"is not for --strategy {strategy}; leave --strategy out"
        require(lora is None or strategy not in MEGATRON, "lora", lora, rule)

    def _check_tensor(self) -> None:
        ranks, memory, strategy = self.parallel.tensor_parallel, self.memory, self.parallel.strategy
        for name, value, default in (
            ("lora", self.model.lora, None),
            ("attention_chunks", memory.attention_chunks, 1),
            ("optimizer_offload", memory.optimizer_offload, False),
            ("optimizer", memory.optimizer, "adamw"),
            ("compile", memory.compile, False),
        ):
            rule = f"can't be combined with {flag(name)}; leave one of them out"
            require(ranks == 1 or value == default, "tensor_parallel", ranks, rule)
        rule = f"can't be combined with --strategy {strategy}; use a strategy of burst attention, such as auto"
        require(ranks == 1 or strategy not in FOREIGN, "tensor_parallel", ranks, rule)

    def _check_global_batch(self) -> None:
        size, accumulate = self.optim.global_batch, self.optim.accumulate
        at_once = self.parallel.data_parallel * self.optim.batch
        if size is None:
            return
        parts = f"--data-parallel {self.parallel.data_parallel} x --batch {self.optim.batch}"
        rule = f"must be a multiple of {at_once}, the sequences computed in one micro-step ({parts})"
        require(size % at_once == 0, "global_batch", size, rule)
        rule = f"is not {parts} x --accumulate {accumulate}; omit --accumulate, which is then derived"
        require(accumulate is None or size == at_once * accumulate, "global_batch", size, rule)

    def check_world(self, world: int) -> None:
        """Raise ValueError if ``world`` ranks can't run this configuration."""
        groups, cut = self.parallel.data_parallel, self.parallel.tensor_parallel
        require(world % groups == 0, "data_parallel", groups, f"must divide the number of ranks, {world}")
        rule = f"must divide the {world // groups} ranks of a data-parallel group"
        require(world // groups % cut == 0, "tensor_parallel", cut, rule)
        sharing = self.parallel.sharing(world)
        short = f"is shorter than the {sharing} ranks that share a sequence, and every rank needs a token;"
        short += " raise --seq-len or lower --ranks"
        require(self.data.seq_len >= sharing, "seq_len", self.data.seq_len, short)


def check_strategy(name: str, option: str) -> None:
    """Raise ValueError naming the flag if a strategy is unknown."""
    try:
        choose(name)
    except ValueError as error:
        raise ValueError(f"{flag(option)} {name}: {error}") from None


def check_balanced(strategy: str, batch: int) -> None:
    """Raise ValueError if ``--packing balanced`` can't have this strategy or batch."""
    rule = "has no layout balanced; omit it, or omit --packing balanced"
    can = strategy not in FOREIGN and strategy_of(strategy).layout in ("auto", BALANCED)
    require(can, "strategy", strategy, rule)
    rule = "leaves --packing balanced one sequence; give the number of sequences that all ranks share at a time"
    require(batch > 1, "batch", batch, rule)


def flag_names() -> dict[str, str]:
    """Return the section of each setting by name; names are unique across sections."""
    sections = get_type_hints(TrainConfig).items()
    return {setting.name: section for section, of in sections for setting in dataclasses.fields(of)}


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file, by name; see :func:`checked_settings`."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    return checked_settings(content, f"--config {path}")


def checked_settings(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings in a file's content, by name.

    A setting has the name of its flag (``seq_len`` or ``seq-len``), at the top level or in its section's table.
    ValueError names ``where`` and a key that is not a setting, or whose value has the wrong type.
    """
    from pydantic import TypeAdapter, ValidationError

    from .checked import sentence

    settings, section_of, sections = dict[str, Any](), flag_names(), get_type_hints(TrainConfig)
    for key, value in content.items():
        section = key if key in sections and isinstance(value, Mapping) else None
        for name, setting in value.items() if section else [(key, value)]:
            name = name.replace("-", "_")
            if name not in section_of or section not in (None, section_of[name]):
                close = "".join(f"; did you mean {each!r}?" for each in difflib.get_close_matches(name, section_of, 1))
                raise ValueError(f"{where}: unknown setting {name!r}{f' in [{key}]' if section else ''}{close}")
            if name == "ignore_memory" and isinstance(setting, bool):
                continue  # of an earlier version, where it named no amount; a run that needs one is refused
            kind = get_type_hints(sections[section_of[name]])[name]
            if isinstance(setting, str) and int in (kind, *get_args(kind)):
                with suppress(ValueError):  # seq_len = "128K"
                    setting = whole_number(setting)
            adapter = TypeAdapter(kind, config={"coerce_numbers_to_str": True})
            try:  # a number may stand for text: save_every = 500
                settings[name] = adapter.validate_python(setting, strict=type(setting) is not int)
            except ValidationError as error:
                raise ValueError(sentence(error, where, name)) from None
    return settings


def with_settings(settings: Mapping[str, Any]) -> TrainConfig:
    """Return the defaults with some settings, by name."""
    config = TrainConfig()
    for name, value in settings.items():
        section = flag_names()[name]
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def write_toml(config: TrainConfig) -> str:
    """Return the configuration as TOML that :func:`read_toml` reads back; settings of None are omitted."""
    sections = dataclasses.asdict(config).items()
    tables = {section: {name: value for name, value in held.items() if value is not None} for section, held in sections}
    return tomli_w.dumps(tables)
