"""Names of checkpoints in a run's folder, and errors of writing there."""

from __future__ import annotations

import os
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
    folders = [path for path in folder.glob("step-*") if path.is_dir()] if folder.is_dir() else []
    return sorted((path for path in folders if re.fullmatch(r"step-\d{8,}", path.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint from its folder's name."""
    return int(path.name.removeprefix("step-"))


class SaveError(RuntimeError):
    """A checkpoint could not be written. All ranks raise it; the partial one is removed, earlier ones remain."""

    expected = True  # its sentence says enough: no traceback


def first_line(error: Exception) -> str:
    """Format an error as one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def text_of(error: BaseException) -> str:
    """Return a short error message; prefer the operating system's text."""
    if isinstance(error, SaveError):
        return str(error)
    if match := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors quotes the system's error like this
        return os.strerror(int(match[1]))
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
