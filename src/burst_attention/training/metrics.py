"""What a run reports, and the run's folder: config, metrics as JSON lines and TensorBoard events, the loss as a PNG."""

from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from .checked import read_json
from .claim import HELD, Marker, claimed
from .config import TrainConfig, write_toml
from .curve import draw_losses
from .interrupt import InterruptedRunError
from .manifest import FOLDER, list_checkpoints, read_state, step_of

CONFIG, METRICS, SUMMARY, CURVE = "config.toml", "metrics.jsonl", "summary.json", "loss.png"
EVENTS, MODEL, UNFINISHED = "tensorboard", "model", "model.unfinished"
TRACES, TRACKED = "profile", "wandb"
NEWEST = "newest"  # of --resume: the newest whole checkpoint of --out
AUTO = "auto"  # the same if --out holds an unfinished run, else none
# What a model is loaded from must not be another's; what else lies beside it may stay.
LOADED = ("*.safetensors", "*.bin", "*.json", "*.model", "*.jinja", "*.py", "merges.txt", "vocab.txt")
FILES = (CONFIG, METRICS, SUMMARY, CURVE, f"{EVENTS}/events.*", UNFINISHED, FOLDER, TRACES, TRACKED)
WRITES = (*FILES, *(f"{MODEL}/{name}" for name in LOADED))


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: counted from 1.
        loss: mean over the valid tokens of all groups and accumulation steps, before the update.
        lr: learning rate of the update.
        grad_norm: global norm of the gradient, before clipping.
        tokens_per_second: over all groups.
        seconds: of this step.
        tokens: read since the start, over all groups.
        bytes_sent: by rank 0's attention in this step; None where collectives, which nothing counts, move them.
        bytes_predicted: the same, as the engine predicts it.
        held_out_loss: after the update; None where ``--eval-every`` does not ask for it.
        flops: of the model's own operations in this step, over all ranks (:mod:`.flops`).
        mfu: their share of what the ranks' devices could do; None where nobody told what that is.
        exchange_seconds: that rank 0 waited in the attention's exchanges, and in the agreements before them; None where
            collectives, which nothing counts, are waited for. On CUDA the host's waits, which are not the stream's.
        left_out: why the update was not taken, in words; None if it was.
        spike: how many times the running median the loss is, where it stands out (:mod:`.finite`).
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    tokens: int
    bytes_sent: int | None
    bytes_predicted: int
    held_out_loss: float | None = None
    flops: int = 0
    mfu: float | None = None
    exchange_seconds: float | None = None
    left_out: str | None = None
    spike: float | None = None


@dataclass(frozen=True)
class Summary:
    """A finished run. Lists are by rank; bytes are means over the steps of what a rank's attention sent in one,
    and ``exchange_seconds`` of what a rank waited.

    ``held_out_loss`` is None without evaluation; ``best_step`` and ``best_held_out_loss`` are of the checkpoint that
    ``--eval-every`` kept as the best; ``left_out`` are steps that ``--on-nan skip`` left out, ``spikes`` multiples of
    the running median by step. ``missing_checkpoints`` are steps after which a save failed and no later one made it
    good. Figures per step are of this start's steps; None if it took none, as one that resumes after the last step.
    """

    steps: int
    first_loss: float
    last_loss: float
    held_out_loss: float | None
    held_out_tokens: int
    tokens_per_second: float | None
    skipped_files: int
    peak_memory: list[int]
    bytes_sent: list[float | None]
    bytes_predicted: list[float | None]
    best_step: int | None = None
    best_held_out_loss: float | None = None
    mfu: float | None = None
    exchange_seconds: list[float | None] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    missing_checkpoints: list[int] = field(default_factory=list)
    spikes: dict[int, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        """Of the held-out documents."""
        return None if self.held_out_loss is None else math.exp(min(self.held_out_loss, 700.0))


class Reporter(Protocol):
    """Rank 0 tells it what happens; ``parameters``: the model's, counted over all ranks."""

    def start(self, config: TrainConfig, parameters: int, done: int) -> None: ...  # done: steps of an earlier start

    def step(self, record: StepRecord) -> None: ...

    def note(self, text: str) -> None: ...

    def interrupt(self, interrupted: InterruptedRunError) -> None: ...

    def finish(self, summary: Summary) -> None: ...


def claim_run(config: TrainConfig) -> AbstractContextManager[Marker]:
    """Hold ``--out`` for this run: see :func:`burst_attention.training.claim.claimed`."""
    check_unfinished(config)
    overwrite, held = config.run.overwrite or goes_on_in(config), how_to_go_on(config)
    return claimed(config.run.out, by="burst train", overwrite=overwrite, writes=WRITES, held=held)


def check_unfinished(config: TrainConfig) -> None:
    """Raise ValueError if ``--resume`` names a finished run, or its last checkpoint, and no step is left to take.

    Its summary says what was measured, which a start without a step could not measure again.
    """
    out, resumed = Path(config.run.out), config.run.resume
    steps = finished_steps(out)
    if steps is None or resumed is None or not goes_on_in(config):
        return
    if resumed != NEWEST:
        try:
            steps = read_state(Path(resumed)).natural("step")
        except ValueError:  # damaged: the ranks say how
            return
    if config.run.steps <= steps:
        raise ValueError(
            f"--resume: {config.run.out!r} holds a finished run, and --steps {config.run.steps} leaves no step after "
            f"step {steps}; its model is in {str(out / MODEL)!r}. Raise --steps to train it further"
        )


def finished_steps(out: Path) -> int | None:
    """The steps of the finished run in a folder; None if it holds none, or if writing its summary was cut short."""
    try:
        return read_json(out / SUMMARY).natural("steps")
    except ValueError:
        return None


def goes_on_in(config: TrainConfig) -> bool:
    """Whether the run goes on in the folder that holds what it goes on from."""
    resumed = config.run.resume
    if resumed is None or resumed == NEWEST:
        return resumed == NEWEST
    return Path(resumed).resolve().parent == (Path(config.run.out) / FOLDER).resolve()


def without_auto(config: TrainConfig) -> tuple[TrainConfig, str]:
    """What ``--resume auto`` means for the folder as it is, and in words what was chosen; empty if it was not asked.

    A run that ended before it saved anything is begun anew in its place; a finished one needs ``--overwrite`` as ever.
    """
    if config.run.resume != AUTO:
        return config, ""
    out = Path(config.run.out)
    found = list_checkpoints(out)
    began, finished = (out / CONFIG).exists(), (out / SUMMARY).exists()
    run, then = replace(config.run, resume=None), "a run begins"
    if finished:
        held = "a finished run"
    elif found:
        held = f"an unfinished run, saved after step {step_of(found[0])}"
        run, then = replace(run, resume=NEWEST), "it goes on"
    else:
        held = "a run that saved nothing" if began else "no run"
        run = replace(run, overwrite=began or run.overwrite)
    return replace(config, run=run), f"--resume auto: {config.run.out} holds {held}: {then}"


def how_to_go_on(config: TrainConfig) -> str:
    """What is told of a folder that holds a run already."""
    out = Path(config.run.out)
    found = list_checkpoints(out)
    if not found or (out / SUMMARY).exists():
        return HELD
    step = step_of(found[0])
    return f"holds an unfinished run, saved after step {step}; add --resume to go on, or --overwrite to start anew"


class RunFolder:
    """A Reporter that writes everything down as it comes, into a folder that is held for it.

    What an earlier run wrote there is removed when this one starts; what no run wrote stays.
    """

    def __init__(self, out: str) -> None:
        self.path, self.marker = Path(out), Marker(Path(out))
        self._losses: list[float] = []
        self._held_out: dict[int, float] = {}  # by step

    def start(self, config: TrainConfig, parameters: int, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        kept = self._lines_until(done) if goes_on_in(config) else []
        if goes_on_in(config):
            (self.path / SUMMARY).unlink(missing_ok=True)  # it is not finished any more
        else:
            self.marker.remove_old()
        self.marker.add(CONFIG, METRICS, f"{UNFINISHED}/", f"{FOLDER}/")
        self.marker.add(*[f"{TRACES}/"] * bool(config.run.profile), *[f"{TRACKED}/"] * bool(config.run.wandb))
        # A later run from this file must not overwrite this one unasked, nor go on from another, nor pay for a trace.
        reusable = replace(config, run=replace(config.run, overwrite=False, resume=None, profile=None))
        (self.path / CONFIG).write_text(write_toml(reusable), "utf-8")
        (self.path / METRICS).write_text("".join(kept), "utf-8")
        records = [json.loads(line) for line in kept]
        self._losses = [math.nan if record["loss"] is None else record["loss"] for record in records]
        found = {record["step"]: record.get("held_out_loss") for record in records}
        self._held_out = {step: loss for step, loss in found.items() if loss is not None}
        self._lines = (self.path / METRICS).open("a", encoding="utf-8", buffering=1)
        earlier = set(self.path.glob(f"{EVENTS}/*"))
        self._events: Any = SummaryWriter(str(self.path / EVENTS), purge_step=done + 1 if kept else None)
        added = set(self.path.glob(f"{EVENTS}/*")) - earlier
        self.marker.add(*(path.relative_to(self.path).as_posix() for path in added))

    def _lines_until(self, step: int) -> list[str]:
        """What was measured up to a step; a line that was being written when the run ended is left out."""
        try:
            lines = (self.path / METRICS).read_text("utf-8").splitlines(keepends=True)
            return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def step(self, record: StepRecord) -> None:
        self._losses.append(record.loss)
        self._lines.write(json.dumps(without_nan(asdict(record))) + "\n")
        for name in ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "exchange_seconds"):
            if (value := getattr(record, name)) is not None:
                self._events.add_scalar(name, value, record.step)
        if told := unusual(record):
            self._events.add_text("notes", told, record.step)
        if record.held_out_loss is not None:
            self._held_out[record.step] = record.held_out_loss
            self._events.add_scalar("held_out_loss", record.held_out_loss, record.step)

    def note(self, text: str) -> None:
        self._events.add_text("notes", text, len(self._losses))

    def interrupt(self, interrupted: InterruptedRunError) -> None:
        self._events.close()
        self._lines.close()

    def finish(self, summary: Summary) -> None:
        if summary.held_out_loss is not None and summary.steps not in self._held_out:
            self._events.add_scalar("held_out_loss", summary.held_out_loss, summary.steps)
        self._events.close()
        self._lines.close()
        self.marker.add(SUMMARY, CURVE)
        written = asdict(summary) | {"perplexity": summary.perplexity}
        (self.path / SUMMARY).write_text(json.dumps(written, indent=2) + "\n", "utf-8")
        draw_losses(self._losses, summary.held_out_loss, self.path / CURVE, measured=self._held_out)


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """The same, null in place of what JSON can't spell."""
    bad = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return values | dict.fromkeys(bad)


def unusual(record: StepRecord) -> str:
    """In words what is to be told of a step besides its figures; empty of most."""
    if record.left_out:
        return f"left out: {record.left_out}"
    if record.spike:
        return f"step {record.step}: the loss spikes, {record.spike:.1f} times the median of the steps before"
    return ""
