"""Errors of a run that are expected, and their text."""

from __future__ import annotations

import os
import re


class SaveError(RuntimeError):
    """A checkpoint could not be written, on all ranks alike; what was written of it is gone, the earlier ones stay."""


def text_of(error: BaseException) -> str:
    """Return a short error message; prefer the operating system's text."""
    if isinstance(error, SaveError):
        return str(error)
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # as safetensors tells what the system told it
        return os.strerror(int(found[1]))
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
