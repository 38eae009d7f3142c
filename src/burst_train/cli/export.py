"""``burst export``: write the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from burst_attention.launch import local as launch

from ..run.lock import MARKER

COMMAND = "burst export"


@dataclass(frozen=True)
class ExportArguments:
    """Write the model of a checkpoint as a Hugging Face folder. The command starts no ranks."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, or a run's folder: its newest checkpoint is used, or with --best its best one."""
    dir: Annotated[Path, tyro.conf.Positional]
    """The folder to write. It must be new or empty."""
    best: bool = False
    """Export the run's checkpoint with the lowest held-out loss (see --eval-every of `burst train`)."""


def chosen(path: Path, tell: Callable[[str], object], *, best: bool) -> Path:
    """Return the checkpoint to export: ``given``, or a run's newest whole one or best one; ValueError without one."""
    from ..checkpoint.files import best_checkpoint, newest_whole
    from ..run.folder import FOLDER, list_checkpoints, name_of

    if not path.is_dir():
        raise ValueError(f"CHECKPOINT {str(path)!r} is missing: there is no such folder{_instead(path)}")
    if best:
        checkpoint = best_checkpoint(path)
        if checkpoint is None:
            raise ValueError(
                f"--best: {str(path)!r} holds no evaluated checkpoint; name the folder of a run that used --eval-every"
            )
        return path / FOLDER / name_of(checkpoint.step)
    if not (path / MARKER).exists():
        return path
    if not list_checkpoints(path):
        raise ValueError(f"CHECKPOINT {str(path)!r} is a run that holds no checkpoint{_instead(path)}")
    return newest_whole(path, tell)


def _instead(path: Path) -> str:
    """Suggest what to export from the run that contains this path; empty outside a run."""
    from ..run.folder import list_checkpoints
    from ..run.metrics import MODEL

    run = next((folder for folder in (path, *path.parents) if (folder / MARKER).exists()), None)
    if run is None:
        return ""
    if checkpoints := list_checkpoints(run):
        return f"; give {str(run)!r} to export its newest checkpoint, {checkpoints[0].name}, or add --best"
    trained = run / MODEL
    return f"; its trained model is already a Hugging Face folder: {str(trained)!r}" if trained.is_dir() else ""


def main(arguments: list[str]) -> int:
    """Run ``burst export`` and return the exit status."""
    parsed = tyro.cli(ExportArguments, prog=COMMAND, args=arguments)
    from ..step.export import export
    from ..step.model import quieten_transformers

    quieten_transformers()
    try:
        source = chosen(parsed.checkpoint, lambda text: sys.stderr.write(f"{COMMAND}: {text}\n"), best=parsed.best)
        export(source, parsed.dir)
    except ValueError as error:
        return launch.print_error(COMMAND, error)
    sys.stdout.write(f"wrote the model of {source} to {parsed.dir}\n")
    return 0
