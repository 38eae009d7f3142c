"""Facts about this machine's devices, kept in JSON files in the user's cache folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Remembered:
    """A file of facts by key. Where it can't be read or written, nothing is remembered."""

    name: str
    folder: Path | None = None  # None for the user's cache folder

    @property
    def path(self) -> Path:
        """The file."""
        folder = self.folder
        if folder is None:
            given = os.environ.get("XDG_CACHE_HOME")
            folder = (Path(given) if given else Path.home() / ".cache") / "burst-attention"
        return folder / self.name

    def read(self) -> dict[str, Any]:
        """Return the facts; an empty dict if the file is missing or invalid."""
        try:
            facts = json.loads(self.path.read_text())
        except (OSError, ValueError, RuntimeError):  # RuntimeError: no home folder
            return {}
        return facts if isinstance(facts, dict) else {}

    def add(self, facts: Mapping[str, Any]) -> None:
        """Merge ``facts`` into the file. Replacing it atomically is safe with concurrent writers."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(self.read() | dict(facts), file, indent=1)
            os.replace(file.name, self.path)
        except (OSError, RuntimeError):
            pass
