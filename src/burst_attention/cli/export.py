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
    """A folder of OUT/checkpoints that `burst train` wrote."""
    dir: Annotated[Path, tyro.conf.Positional]
    """The folder to write; new or empty."""


def main(arguments: list[str]) -> int:
    """Run ``burst export``; returns the exit status."""
    given = tyro.cli(Arguments, prog=COMMAND, args=arguments)
    from burst_attention.training.export import export
    from burst_attention.training.model import quieten_transformers

    quieten_transformers()
    try:
        export(given.checkpoint, given.dir)
    except ValueError as error:
        return launch.refuse(COMMAND, error)
    sys.stdout.write(f"the model of {given.checkpoint} is in {given.dir}\n")
    return 0
