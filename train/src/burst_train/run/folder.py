"""Names in a run's folder: which checkpoints it holds."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "checkpoints"


def name_of(step: int) -> str:
    """The folder of the checkpoint after ``step``."""
    return f"step-{step:08d}"


def list_checkpoints(out: Path) -> list[Path]:
    """The folders of a run that are called like finished checkpoints, the newest first."""
    folder = out / FOLDER
    found = [path for path in folder.glob("step-*") if path.is_dir()] if folder.is_dir() else []
    return sorted((path for path in found if re.fullmatch(r"step-\d{8,}", path.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step after which the checkpoint of this folder was saved, by its name."""
    return int(path.name.removeprefix("step-"))
