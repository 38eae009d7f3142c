"""Expected errors of a run, and their text."""

from __future__ import annotations

import os
import re


class SaveError(RuntimeError):
    """A checkpoint could not be written. All ranks raise it; the partial one is removed, earlier ones remain."""

    expected = True  # its sentence says enough: no traceback


def text_of(error: BaseException) -> str:
    """Return a short error message; prefer the operating system's text."""
    if isinstance(error, SaveError):
        return str(error)
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors quotes the system's error like this
        return os.strerror(int(found[1]))
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
