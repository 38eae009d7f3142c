"""Reports of a run, and its folder: config, metrics as JSON lines and TensorBoard events, and the loss as a PNG."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from burst_attention.launch.local import RefusedError

from ..checked import Checked, Natural, parse_json, read_bytes
from ..config import TrainConfig, write_toml
from .curve import draw_losses
from .folder import FOLDER, NEWEST, list_checkpoints, step_of, text_of
from .interrupt import InterruptedRunError
from .lock import HELD, RunFolderLock, claimed

CONFIG, METRICS, SUMMARY, CURVE = "config.toml", "metrics.jsonl", "summary.json", "loss.png"
EVENTS, MODEL, UNFINISHED = "tensorboard", "model", "model.unfinished"
TRACES, TRACKED = "profile", "wandb"
AUTO = "auto"  # value of --resume: NEWEST if --out holds an unfinished run; otherwise a new run
# Files that loading a model reads: they must not be another model's. Other files in the folder may stay.
LOADED = ("*.safetensors", "*.bin", "*.json", "*.model", "*.jinja", "*.py", "merges.txt", "vocab.txt")
FILES = (CONFIG, METRICS, SUMMARY, CURVE, f"{EVENTS}/events.*", UNFINISHED, FOLDER, TRACES, TRACKED)
WRITES = (*FILES, *(f"{MODEL}/{name}" for name in LOADED))


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. None: unknown, or not measured."""

    step: int  # from 1
    loss: float  # mean over the valid tokens of all groups and micro-steps, before the update
    lr: float
    grad_norm: float  # global, before clipping
    tokens_per_second: float  # over all groups
    seconds: float
    tokens: int  # since the start of the run, over all groups
    bytes_sent: int | None  # by rank 0's attention; None for uncounted collectives
    bytes_predicted: int  # by the plans
    held_out_loss: float | None = None  # after the update
    flops: int | None = 0  # the model's own, over all ranks
    mfu: float | None = None  # their share of all devices' peak
    exchange_seconds: float | None = None  # rank 0's waits in exchanges and agreements; on CUDA the host's only
    left_out: str | None = None  # why the update was left out
    spike: float | None = None  # loss as a multiple of the running median, if it stands out


@dataclass(frozen=True)
class Summary:
    """A finished run. Lists are by rank; per-step figures cover the steps since the last start, None without any."""

    steps: int
    first_loss: float
    last_loss: float
    held_out_loss: float | None
    held_out_tokens: int
    tokens_per_second: float | None
    skipped_files: int
    peak_memory: list[int]
    bytes_sent: list[float | None]  # by a rank's attention, mean per step
    bytes_predicted: list[float | None]  # by the plans
    best_step: int | None = None  # of the best checkpoint
    best_held_out_loss: float | None = None
    mfu: float | None = None
    exchange_seconds: list[float | None] = field(default_factory=list)  # mean per step that a rank waited
    left_out: list[int] = field(default_factory=list)  # steps, by ``--on-nan skip``
    missing_checkpoints: list[int] = field(default_factory=list)  # steps whose failed save no later one replaced
    spikes: dict[int, float] = field(default_factory=dict)  # multiples of the running median, by step

    @property
    def perplexity(self) -> float | None:
        """Perplexity of the held-out documents."""
        return None if self.held_out_loss is None else math.exp(min(self.held_out_loss, 700.0))


class Finished(Checked, extra="ignore"):
    """What is read from a summary."""

    steps: Natural


class Line(Checked, extra="ignore"):
    """What is read from a line of metrics; None: not finite, or not measured."""

    step: Natural
    loss: float | None
    held_out_loss: float | None = None


class Reporter(Protocol):
    """Receives a run's events on rank 0; ``parameters`` counts the model's over all ranks."""

    def start(self, config: TrainConfig, parameters: int, done: int) -> None: ...  # done: steps of earlier starts

    def step(self, record: StepRecord) -> None: ...

    def note(self, text: str) -> None: ...

    def interrupt(self, interrupted: InterruptedRunError) -> None: ...

    def finish(self, summary: Summary) -> None: ...


def claim_run(config: TrainConfig) -> AbstractContextManager[RunFolderLock]:
    """Hold ``--out`` for this run; see :func:`burst_train.run.lock.claimed`."""
    check_unfinished(config)
    overwrite, held = config.run.overwrite or goes_on_in(config), how_to_go_on(config)
    return claimed(config.run.out, by="burst train", overwrite=overwrite, writes=WRITES, held=held)


def check_unfinished(config: TrainConfig) -> None:
    """Raise ValueError if ``--resume`` names a finished run and no steps remain, which could measure nothing."""
    out, resumed = Path(config.run.out), config.run.resume
    steps = finished_steps(out)
    if steps is None or resumed is None or not goes_on_in(config):
        return
    if resumed != NEWEST:
        steps = step_of(Path(resumed))
    if config.run.steps <= steps:
        raise ValueError(
            f"--resume: {config.run.out!r} holds a finished run, and --steps {config.run.steps} leaves no step after "
            f"step {steps}; its model is in {str(out / MODEL)!r}. Raise --steps to train it further"
        )


def finished_steps(out: Path) -> int | None:
    """Return the steps of the finished run in a folder; None if it has none, or its summary is incomplete."""
    try:
        return parse_json(read_bytes(out / SUMMARY), Finished, SUMMARY).steps
    except ValueError:
        return None


def goes_on_in(config: TrainConfig) -> bool:
    """Whether the run resumes from a checkpoint in its own output folder."""
    resumed = config.run.resume
    if resumed is None or resumed == NEWEST:
        return resumed == NEWEST
    return Path(resumed).resolve().parent == (Path(config.run.out) / FOLDER).resolve()


def without_auto(config: TrainConfig) -> tuple[TrainConfig, str]:
    """Resolve ``--resume auto`` for the folder; return the configuration and a note, empty without ``auto``."""
    if config.run.resume != AUTO:
        return config, ""
    out = Path(config.run.out)
    checkpoints = list_checkpoints(out)
    began, finished = (out / CONFIG).exists(), (out / SUMMARY).exists()
    run, then = replace(config.run, resume=None), "starting a run"
    if finished:
        held = "a finished run"
    elif checkpoints:
        held = f"an unfinished run, saved after step {step_of(checkpoints[0])}"
        run, then = replace(run, resume=NEWEST), "resuming it"
    else:
        held = "a run without checkpoints" if began else "no run"
        run = replace(run, overwrite=began or run.overwrite)
    return replace(config, run=run), f"--resume auto: {config.run.out} holds {held}: {then}"


def how_to_go_on(config: TrainConfig) -> str:
    """Return the error text for a folder that already holds a run."""
    out = Path(config.run.out)
    checkpoints = list_checkpoints(out)
    if not checkpoints or (out / SUMMARY).exists():
        return HELD
    step = step_of(checkpoints[0])
    return f"holds an unfinished run, saved after step {step}; add --resume to continue, or --overwrite to start over"


class RunFolder:
    """A Reporter that writes each event to a claimed folder, without the files of earlier runs.

    A full disk does not end the training: ``tell`` gets the cause once, and metrics wait in memory for space.
    """

    tell: Callable[[str], None]

    def __init__(self, out: str) -> None:
        self.path, self.marker, self.tell = Path(out), RunFolderLock(Path(out)), self.note
        self._waiting, self._failed = b"", set[str]()  # metrics not yet on disk; files that could not be written
        self._losses: dict[int, float] = {}  # by step
        self._held_out: dict[int, float] = {}  # by step

    def start(self, config: TrainConfig, parameters: int, done: int) -> None:
        """Write the configuration and open the metrics; a resumed run keeps the lines up to ``done``."""
        from torch.utils.tensorboard import SummaryWriter

        kept = self._lines_until(done) if goes_on_in(config) else {}
        if goes_on_in(config):
            (self.path / SUMMARY).unlink(missing_ok=True)  # the run is no longer finished
        else:
            self.marker.remove_old()
        self.marker.add(CONFIG, METRICS, f"{UNFINISHED}/", f"{FOLDER}/")
        self.marker.add(*[f"{TRACES}/"] * bool(config.run.profile), *[f"{TRACKED}/"] * bool(config.run.wandb))
        # A later run from this file must not overwrite this one, resume from another, or profile unless asked to.
        reusable = replace(config, run=replace(config.run, overwrite=False, resume=None, profile=None))
        (self.path / CONFIG).write_text(write_toml(reusable), "utf-8")
        (self.path / METRICS).write_text("".join(kept), "utf-8")
        self._losses = {line.step: math.nan if line.loss is None else line.loss for line in kept.values()}
        self._held_out = {line.step: line.held_out_loss for line in kept.values() if line.held_out_loss is not None}
        self._lines = (self.path / METRICS).open("ab", buffering=0)  # unbuffered: write returns what the disk took
        earlier = set(self.path.glob(f"{EVENTS}/*"))
        self._events: Any = SummaryWriter(str(self.path / EVENTS), purge_step=done + 1 if kept else None)
        added = set(self.path.glob(f"{EVENTS}/*")) - earlier
        self.marker.add(*(path.relative_to(self.path).as_posix() for path in added))

    def _lines_until(self, step: int) -> dict[str, Line]:
        """Return the complete metrics lines up to a step, with their content; none if one is damaged."""
        try:
            text = (self.path / METRICS).read_text("utf-8").splitlines(keepends=True)
            lines = {line: parse_json(line.encode(), Line, METRICS) for line in text if line.endswith("\n")}
        except (OSError, ValueError):
            return {}
        return {line: content for line, content in lines.items() if content.step <= step}

    def step(self, record: StepRecord) -> None:
        """Record one step in the metrics and in TensorBoard."""
        self._losses[record.step] = record.loss
        self._waiting += (json.dumps(without_nan(asdict(record))) + "\n").encode()
        for name in ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "exchange_seconds"):
            if (value := getattr(record, name)) is not None:
                self._add_scalar(name, value, record.step)
        if record.held_out_loss is not None:
            self._held_out[record.step] = record.held_out_loss
            self._add_scalar("held_out_loss", record.held_out_loss, record.step)
        if text := unusual(record):
            self.note(text)
        self._try(METRICS, self._write_waiting, "training goes on, and its metrics wait in memory for disk space")

    def _write_waiting(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._lines.write(self._waiting) :]

    def _add_scalar(self, name: str, value: float, step: int) -> None:
        self._try(EVENTS, lambda: self._events.add_scalar(name, value, step))

    def _try(self, name: str, write: Callable[[], None], then: str = "training goes on without it") -> None:
        """Write to a file; report the first failure of each file."""
        try:
            write()
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                self.tell(f"{self.path / name} could not be written: {text_of(error)}; {then}")

    def note(self, text: str) -> None:
        """Write a note to TensorBoard."""
        self._try(EVENTS, lambda: self._events.add_text("notes", text, max(self._losses, default=0)))

    def interrupt(self, interrupted: InterruptedRunError) -> None:
        """Write waiting metrics and close the files."""
        self._close()

    def _close(self) -> None:
        with suppress(OSError):  # the run is over, so missing events stay missing
            self._events.close()
        with self._lines, suppress(OSError):
            self._write_waiting()

    def finish(self, summary: Summary) -> None:
        """Write the final figures; raise RefusedError if writing fails."""
        if summary.held_out_loss is not None and summary.steps not in self._held_out:
            self._add_scalar("held_out_loss", summary.held_out_loss, summary.steps)
        self._close()
        written = json.dumps(asdict(summary) | {"perplexity": summary.perplexity}, indent=2) + "\n"
        name = METRICS
        try:
            if self._waiting:
                with (self.path / METRICS).open("ab", buffering=0) as self._lines:
                    self._write_waiting()
            name = SUMMARY
            self.marker.add(SUMMARY, CURVE)
            (self.path / SUMMARY).write_text(written, "utf-8")
            name = CURVE
            draw_losses(self._losses, summary.held_out_loss, self.path / CURVE, measured=self._held_out)
        except OSError as error:
            model = self.path / MODEL
            raise RefusedError(
                f"{self.path / name} could not be written: {text_of(error)}; the model is in {model}"
            ) from None


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace non-finite numbers by None, because JSON has none."""
    bad = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return values | dict.fromkeys(bad)


def unusual(record: StepRecord) -> str:
    """Describe an unusual event in a step; empty for most steps."""
    if record.left_out:
        return f"left out: {record.left_out}"
    if record.spike:
        return f"step {record.step}: the loss spikes, {record.spike:.1f} times the median of the steps before"
    return ""
