"""``burst export``: a checkpoint of a run to a Hugging Face folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..launch import local as launch

COMMAND = "burst export"


@dataclass(frozen=True)
class Arguments:
    """Write the model of a checkpoint as a Hugging Face folder, in this process alone."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A folder of OUT/checkpoints that `burst train` wrote; with --best OUT itself."""
    dir: Annotated[Path, tyro.conf.Positional]
    """The folder to write; new or empty."""
    best: bool = False
    """Of OUT the checkpoint that did best on the held-out documents: see --eval-every of `burst train`."""


def chosen(given: Path, *, best: bool) -> Path:
    """The checkpoint that is meant: the one that is named, or the best of a run's folder.

    Raises:
        ValueError: there is none.
    """
    from burst_attention.training.checkpoint import best_checkpoint
    from burst_attention.training.manifest import FOLDER, name_of

    if not best:
        return given
    found = best_checkpoint(given)
    if found is None:
        raise ValueError(
            f"--best: {str(given)!r} holds no checkpoint that was evaluated; name the folder of a run with --eval-every"
        )
    return given / FOLDER / name_of(found.step)


def main(arguments: list[str]) -> int:
    """Run ``burst export``; returns the exit status."""
    given = tyro.cli(Arguments, prog=COMMAND, args=arguments)
    from burst_attention.training.export import export
    from burst_attention.training.model import quieten_transformers

    quieten_transformers()
    try:
        source = chosen(given.checkpoint, best=given.best)
        export(source, given.dir)
    except ValueError as error:
        return launch.refuse(COMMAND, error)
    sys.stdout.write(f"the model of {source} is in {given.dir}\n")
    return 0
