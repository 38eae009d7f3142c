"""Names of checkpoints in a run's folder."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "checkpoints"
NEWEST = "newest"  # value of --resume: the newest whole checkpoint of --out


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint after ``step``."""
    return f"step-{step:08d}"


def list_checkpoints(out: Path) -> list[Path]:
    """Return the run's folders with names of finished checkpoints, newest first."""
    folder = out / FOLDER
    found = [path for path in folder.glob("step-*") if path.is_dir()] if folder.is_dir() else []
    return sorted((path for path in found if re.fullmatch(r"step-\d{8,}", path.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint from its folder's name."""
    return int(path.name.removeprefix("step-"))
