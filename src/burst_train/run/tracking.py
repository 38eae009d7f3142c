"""Log a run's figures to Weights & Biases on request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from .folder import first_line
from .interrupt import InterruptedRunError
from .metrics import TRACKED, StepRecord, Summary, goes_on_in, unusual, without_nan

ID = "burst-train-id.txt"


def _at_last(text: str) -> None:
    """Write to stderr: at the end, the other reporters are already closed."""
    sys.stderr.write(f"burst train: {text}\n")


class Tracking:
    """A Reporter to Weights & Biases, with its files in the run's folder; ``tell`` gets its address, or its failure."""

    def __init__(self, project: str, tell: Callable[[str], None]) -> None:
        self._project, self._tell, self._run = project, tell, None

    def start(self, config: TrainConfig, parameters: int, done: int) -> None:
        """Start a run of Weights & Biases, or resume the earlier one."""

        def begin() -> Any:
            import wandb

            out = Path(config.run.out)
            id_file = out / TRACKED / ID
            run = wandb.init(
                project=self._project,
                name=out.resolve().name,
                dir=str(out),
                id=id_file.read_text("utf-8") if goes_on_in(config) and id_file.exists() else None,
                resume="allow",
                config=asdict(config) | {"parameters": parameters},
                settings=wandb.Settings(console="off", silent=True),
            )
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(run.id, "utf-8")
            # A resume repeats steps, but W&B's own step count can't go back.
            run.define_metric("*", step_metric="step")
            return run

        self._run = self._try(begin)
        if self._run is not None:
            self._tell(f"Weights & Biases, project {self._project}: {self._run.url or self._run.dir}")

    def step(self, record: StepRecord) -> None:
        """Log one step's values."""
        values = without_nan(asdict(record))
        self._call(lambda run: run.log({name: value for name, value in values.items() if value is not None}))
        if text := unusual(record):
            self.note(text)

    def note(self, text: str) -> None:
        """Log a note."""
        self._call(lambda run: run.log({"note": text}))

    def interrupt(self, interrupted: InterruptedRunError) -> None:
        """Close the run as failed, with the process's exit status."""
        self._tell = _at_last
        self._call(lambda run: run.finish(exit_code=interrupted.status))

    def finish(self, summary: Summary) -> None:
        """Log the summary and close the run."""

        def end(run: Any) -> None:
            run.summary.update({f"final/{name}": value for name, value in asdict(summary).items()})
            run.finish()

        self._tell = _at_last
        self._call(end)

    def _call(self, action: Callable[[Any], object]) -> None:
        if (run := self._run) is not None:
            self._try(lambda: action(run))

    def _try(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` and return its result; on the first failure, report it and stop logging."""
        try:
            return action()
        except Exception as error:  # any error: logging must not end the run
            self._run = None
            self._tell(f"--wandb: {first_line(error)}; the run continues without logging to it")
            return None
