"""Shared arguments of the commands that measure one attention call."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

from .harness.origin import origin
from .harness.results import write_json
from .harness.workload import Workload

A = TypeVar("A")


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """Sizes of one causal attention call."""

    seq_len: int = 8192
    heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    json: Path | None = None
    """Also write the figures to this file."""

    @property
    def workload(self) -> Workload:
        """Return an attention call of these sizes."""
        sizes = {"heads": self.heads, "kv_heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype}
        return Workload(seq_len=self.seq_len, **sizes)

    @property
    def title(self) -> str:
        return f"causal, {self.dtype}, S={self.seq_len}, H={self.heads}, D={self.head_dim}"

    def write(self, **figures: Any) -> None:
        """Write figures, sizes and their origin to ``json``, if it was given."""
        if self.json is not None:
            names = ("world", "seq_len", "heads", "head_dim", "dtype")
            size = {name: getattr(self, name) for name in names if hasattr(self, name)}
            write_json(self.json, {"size": size, **figures} | origin(command_given(self.json)))


@dataclass(frozen=True, kw_only=True)
class TimedArguments(CallArguments):
    """Sizes of a call, the number of ranks, and the number of timed rounds."""

    world: int = 2
    rounds: int = 9


def command_given(json: Path | None) -> str:
    """Return the command line of this process as ``burst ...``, without ``--json FILE``."""
    return shlex.join(["burst", *sys.argv[1:]]).replace(f" --json {shlex.quote(str(json))}", "")


def asked(default: A, description: str | None, prog: str, arguments: list[str]) -> A:
    """Parse ``arguments``; ``default`` holds the default values."""
    return tyro.cli(type(default), prog=prog, default=default, description=description, args=arguments)
