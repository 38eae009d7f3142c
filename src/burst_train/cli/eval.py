"""``burst eval``: parse the flags, evaluate on local ranks, print a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID

from burst_attention.cli.flags import NUMBERS
from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.launch import local as launch

from ..step.evaluation import EvalConfig, StrategyResult, write_results
from . import train
from .preflight import check_evaluation

COMMAND = "burst eval"
COLUMNS = ("strategy", "loss", "perplexity", "tokens", "seconds", "greatest difference")
LEGEND = {
    "loss": "mean negative log-likelihood of a token, in nats",
    "perplexity": "exp(loss)",
    "tokens": "that were predicted",
    "seconds": "of the forwards on the slowest rank",
}
QUIET = 10.0  # seconds between two lines of progress when the output is not a terminal


def main(arguments: list[str]) -> int:
    """Run ``burst eval``; the status is 0 if a strategy ran, 1 if one failed, and 2 if the arguments are refused."""
    config = tyro.cli(EvalConfig, prog=COMMAND, args=arguments, registry=NUMBERS)
    launch.prepare("burst_train.step.evaluate")
    try:
        config.check()
        config = resolve(config, launch.torchrun_ranks(config.ranks))
        check_evaluation(config, config.ranks or 1)
    except ValueError as error:
        return launch.print_error(COMMAND, error)
    return launch.start(COMMAND, _evaluate, config, ranks=config.ranks or 1)


def resolve(config: EvalConfig, running: tuple[int, int] | None) -> EvalConfig:
    """Fill in the settings that depend on the machine, as :func:`burst_train.cli.train.resolve` does."""
    resolved = train.resolve(config.as_training, running)
    return replace(config, ranks=resolved.parallel.ranks, device=resolved.parallel.device, dtype=resolved.model.dtype)


def _evaluate(config: EvalConfig) -> None:
    from ..step.evaluate import evaluate
    from ..step.model import quieten_transformers

    quieten_transformers()
    console = console_of_tables()
    with EvaluationScreen(console) as screen:
        results = evaluate(config, screen.result, screen.progress)
    if launch.is_rank_0():
        show(console, config, results)
        if config.json is not None:
            write_results(config.json, config, results)
            console.print(f"results as JSON: [bold]{escape(str(config.json))}[/]")


class EvaluationScreen(ExitStack):
    """Show progress while strategies run: a bar on a terminal, otherwise occasional lines."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._console, self._clock, self._last = console, clock, clock()
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def progress(self, strategy: str, done: int, of: int) -> None:
        """Report that ``done`` of ``of`` sequences of a strategy are evaluated."""
        if not self._console.is_terminal:
            if done < of and self._clock() - self._last >= QUIET:
                self._last = self._clock()
                self._console.print(f"{strategy}: {done:,} of {of:,} sequences")
            return
        if self._bar is None:
            self._bar = self.enter_context(Progress(console=self._console, transient=True))
        if strategy not in self._tasks:
            self._tasks[strategy] = self._bar.add_task(strategy, total=of)
        self._bar.update(self._tasks[strategy], completed=done, refresh=True)

    def result(self, result: StrategyResult) -> None:
        """Report a strategy that has finished."""
        if self._bar is not None and result.strategy in self._tasks:
            self._bar.remove_task(self._tasks.pop(result.strategy))
        self._console.print(f"{result.strategy}: {result.sequences:,} sequences in {result.seconds:,.1f} s")


def show(console: Console, config: EvalConfig, results: list[StrategyResult]) -> None:
    """Print a table with one row per strategy, and why some refused."""
    ran = [result for result in results if result.refused is None]
    columns, legend = COLUMNS if len(results) > 1 else COLUMNS[:-1], LEGEND
    if ran:
        apart = f"a token's log-likelihood against that of {ran[0].reference}, the largest, in nats"
        legend = LEGEND | {COLUMNS[-1]: apart}
    rows = [dict(zip(columns, (result.strategy, *_figures(result)), strict=False)) for result in results]
    setting = f", {ran[0].sequences} sequences, {config.dtype}, {config.ranks} ranks" if ran else ""
    print_table(console, rows, title=f"{escape(str(config.model))}{setting}", legend=legend, right=COLUMNS[1:])
    for result in results:
        if result.refused is not None:
            console.print(f"{result.strategy} is left out: {escape(result.refused)}", soft_wrap=True)


def _figures(result: StrategyResult) -> list[str]:
    if result.loss is None:
        return ["-"] * 5
    apart = "reference" if result.strategy == result.reference else f"{result.greatest_difference:.1e}"
    loss, perplexity = f"{result.loss:.6f}", f"{result.perplexity:,.4f}"
    return [loss, perplexity, f"{result.tokens:,}", f"{result.seconds:,.1f}", apart]
