"""The screen of a training run: a progress bar, and a table at the end."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from burst_attention.launch.processes import UNSAVED

from ..config import TrainConfig
from ..memory import binary_text
from ..run.folder import list_checkpoints, name_of
from ..run.interrupt import InterruptedRunError
from ..run.metrics import StepRecord, Summary, unusual


class Screen:
    """Report a run, whose settings are resolved, on a terminal; elsewhere print one line per step."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def start(self, config: TrainConfig, parameters: int, done: int) -> None:
        """Print the run's configuration and start the progress bar."""
        self._done = done
        self.config, self._began, parallel = config, time.monotonic(), config.parallel
        self.console.print(
            f"[bold]{escape(config.model.model)}[/], {parameters / 1e6:,.1f} M parameters in {config.model.dtype}, "
            f"on {parallel.ranks} {parallel.device} ranks x {torch.get_num_threads()} threads"
            + (f" in {parallel.data_parallel} groups" if parallel.data_parallel > 1 else "")
            + (f", {parallel.tensor_parallel} to a tensor-parallel axis" if parallel.tensor_parallel > 1 else "")
        )
        self.console.print(
            f"{escape(config.data.data)}: {config.sequences_per_step} x {config.data.seq_len:,} tokens a step, "
            f"strategy {parallel.strategy}, to {escape(config.run.out)}"
            + (f", resuming after step {done}" if done else "")
        )
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("loss {task.fields[loss]}  {task.fields[speed]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("train", total=config.run.steps, completed=done, loss="-", speed="-")
            self._bar.start()

    def step(self, record: StepRecord) -> None:
        """Update the progress bar; print evaluations and unusual steps."""
        if text := unusual(record):
            self.note(text)
        if self._bar:
            self._bar.update(self._task, completed=record.step, loss=f"{record.loss:.4f}", speed=_speed(record))
            if record.held_out_loss is not None:
                self.console.print(f"step {record.step}: held-out loss {record.held_out_loss:.4f}")
            return
        left = (time.monotonic() - self._began) / (record.step - self._done) * (self.config.run.steps - record.step)
        held_out = "" if record.held_out_loss is None else f"held out {record.held_out_loss:.4f}  "
        self.console.print(
            f"step {record.step}/{self.config.run.steps}  loss {record.loss:.4f}  {held_out}"
            f"{_speed(record)}  ETA {time.strftime('%H:%M:%S', time.gmtime(left))}"
        )

    def note(self, text: str) -> None:
        """Print a note."""
        self.console.print(f"[bold yellow]burst train:[/] {escape(text)}")

    def interrupt(self, interrupted: InterruptedRunError) -> None:
        """Print why the run stopped and how to resume it."""
        if self._bar:
            self._bar.stop()
        after = f"{interrupted.reason} after step {interrupted.step}/{self.config.run.steps}"
        if interrupted.saved is None:
            self.console.print(f"[bold red]burst train:[/] {after}; the steps after the last checkpoint are lost")
            return
        self.console.print(
            f"{after}: saved to [bold]{escape(str(interrupted.saved))}[/]; "
            f"to resume: burst train --out {escape(shlex.quote(self.config.run.out))} --resume"
        )

    def finish(self, summary: Summary) -> None:
        """Print the summary table and the output folder."""
        if self._bar:
            self._bar.stop()
        self.console.print(_table(summary, self.config.parallel.device, cut=self.config.parallel.tensor_parallel > 1))
        self.console.print(LEGEND)
        if summary.skipped_files:
            count = summary.skipped_files
            self.console.print(f"{count} file{'s' * (count > 1)} skipped: not UTF-8 text")
        self.console.print(f"config, metrics, curve and model: [bold]{escape(self.config.run.out)}[/]")
        if steps := summary.missing_checkpoints:
            checkpoints = list_checkpoints(Path(self.config.run.out))
            kept = f"the newest saved checkpoint is {checkpoints[0]}" if checkpoints else "no checkpoint was saved"
            which = f"checkpoint{'s' * (len(steps) > 1)} after step {_some([str(step) for step in steps])}"
            self.console.print(
                f"[bold red]burst train:[/] {which} could not be written; {escape(kept)}. "
                f"Training is finished; the exit status is {UNSAVED}"
            )


MOST_RANKS = 4  # whose figures are listed
LEGEND = (
    "Figures of several ranks are by rank. waits: seconds that it waited for exchanges and slower ranks, mean of the "
    "steps; sent: as counted; predicted: of attention, by the plans before the step."
)
# On a CPU the measured memory includes more than the prediction before the start does.
COUNTED = {"cuda": "tensors on its GPU", "cpu": "whole process: tensors, PyTorch and Python"}


def _table(summary: Summary, device: str, *, cut: bool = False) -> Table:
    table = Table(show_header=False)
    table.add_row("first loss", f"{summary.first_loss:.4f}")
    table.add_row("last loss", f"{summary.last_loss:.4f}")
    if summary.held_out_loss is not None:
        text = f"{summary.held_out_loss:.4f} (perplexity {summary.perplexity:.2f}, {summary.held_out_tokens:,} tokens)"
        table.add_row("held-out loss", text)
    if summary.best_step is not None:
        text = f"{summary.best_held_out_loss:.4f} after step {summary.best_step}, saved as {name_of(summary.best_step)}"
        table.add_row("best held-out loss", text)
    if summary.left_out:
        steps = _some([str(step) for step in summary.left_out])
        table.add_row("skipped, non-finite values", steps)
    if summary.spikes:
        steps = _some([f"step {step} ({multiple:.1f} x)" for step, multiple in summary.spikes.items()])
        table.add_row("loss spikes, x the median", steps)
    table.add_row("tokens/s", "-" if summary.tokens_per_second is None else f"{summary.tokens_per_second:,.0f}")
    if summary.mfu is not None:
        table.add_row("MFU", f"{summary.mfu:.1%}")
    table.add_row("waits per step, per rank", _by_rank(summary.exchange_seconds, lambda seconds: f"{seconds:,.3f} s"))
    table.add_row("peak memory per rank", f"{_by_rank(summary.peak_memory, binary_text)}\n({COUNTED[device]})")
    what = "attention" if cut else "activations"  # sums over a tensor-parallel axis are not counted
    table.add_row(f"{what} sent per step", _by_rank(summary.bytes_sent, binary_text))
    table.add_row("predicted for attention", _by_rank(summary.bytes_predicted, binary_text))
    return table


def _speed(record: StepRecord) -> str:
    """Format tokens per second, and MFU and waiting time if they are known."""
    mfu = "" if record.mfu is None else f"  MFU {record.mfu:.1%}"
    waits = "" if record.exchange_seconds is None else f"  waits {record.exchange_seconds:.2f} s"
    return f"{record.tokens_per_second:,.0f} tokens/s{mfu}{waits}"


def _some(texts: list[str], most: int = 8) -> str:
    """Join at most ``most`` texts and count the rest."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _by_rank(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """List the values of a few ranks; of many, the least and the greatest."""
    if len(values) <= MOST_RANKS:
        return ", ".join("-" if value is None else text(value) for value in values)
    numbers = [value for value in values if value is not None]
    return f"{text(min(numbers))} to {text(max(numbers))} on {len(values)} ranks" if numbers else "-"
