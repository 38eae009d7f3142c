"""``burst export``: a checkpoint of a run to a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from burst_attention.training.claim import MARKER

from ..launch import local as launch

COMMAND = "burst export"


@dataclass(frozen=True)
class Arguments:
    """Write the model of a checkpoint as a Hugging Face folder, in this process alone."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """The folder of a run, for its newest checkpoint (--best: its best one), or one of its checkpoints."""
    dir: Annotated[Path, tyro.conf.Positional]
    """The folder to write; new or empty."""
    best: bool = False
    """The run's checkpoint with the lowest held-out loss: see --eval-every of `burst train`."""


def chosen(given: Path, tell: Callable[[str], object], *, best: bool) -> Path:
    """The checkpoint that is meant: the one that is named, or the newest whole one or the best of a run's folder.

    Args:
        tell: is called with what is wrong with checkpoints that are passed over.

    Raises:
        ValueError: there is none.
    """
    from burst_attention.training.checkpoint import best_checkpoint, newest_whole
    from burst_attention.training.manifest import FOLDER, list_checkpoints, name_of

    if not given.is_dir():
        raise ValueError(f"CHECKPOINT {str(given)!r} is missing: there is no such folder{_instead(given)}")
    if best:
        found = best_checkpoint(given)
        if found is None:
            raise ValueError(
                f"--best: {str(given)!r} holds no checkpoint that was evaluated; "
                "name the folder of a run with --eval-every"
            )
        return given / FOLDER / name_of(found.step)
    if not (given / MARKER).exists():
        return given
    if not list_checkpoints(given):
        raise ValueError(f"CHECKPOINT {str(given)!r} is a run that holds no checkpoint{_instead(given)}")
    return newest_whole(given, tell)


def _instead(given: Path) -> str:
    """What can be exported, or loaded, of the run in which a path lies; empty if there is no such run."""
    from burst_attention.training.manifest import list_checkpoints
    from burst_attention.training.metrics import MODEL

    run = next((folder for folder in (given, *given.parents) if (folder / MARKER).exists()), None)
    if run is None:
        return ""
    if found := list_checkpoints(run):
        return f"; name {str(run)!r}, whose newest is {found[0].name}, or --best with it"
    trained = run / MODEL
    return f"; its trained model is a Hugging Face folder already: {str(trained)!r}" if trained.is_dir() else ""


def main(arguments: list[str]) -> int:
    """Run ``burst export``; returns the exit status."""
    given = tyro.cli(Arguments, prog=COMMAND, args=arguments)
    from burst_attention.training.export import export
    from burst_attention.training.model import quieten_transformers

    quieten_transformers()
    try:
        source = chosen(given.checkpoint, lambda text: sys.stderr.write(f"{COMMAND}: {text}\n"), best=given.best)
        export(source, given.dir)
    except ValueError as error:
        return launch.refuse(COMMAND, error)
    sys.stdout.write(f"the model of {source} is in {given.dir}\n")
    return 0
