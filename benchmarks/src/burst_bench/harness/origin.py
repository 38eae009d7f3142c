"""The origin of figures: command, date, machine and revision of the code."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from burst_attention.attention.probe import cpu_name
from burst_attention.launch.join import cores

LIBRARIES = ("burst-attention", "torch", "numpy", "transformers")


def origin(command: str) -> dict[str, Any]:
    """Return ``command``, ``date``, ``machine``, ``revision`` and ``versions`` of a measurement made now."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{cores()} cores of {cpu_name()}, {platform.system()}",
        "revision": _revision(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
    }


def _revision() -> str:
    """Return this checkout's revision, with ``-dirty`` if it has changes; ``unknown`` without git or a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
