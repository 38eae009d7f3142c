"""Shared arguments of the measurements: the file of their figures, and the sizes of one attention call."""

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
class WrittenArguments:
    """Arguments of a measurement whose figures can be written to a file."""

    json: Path | None = None
    """Also write the figures to this file."""

    def write(self, **figures: Any) -> None:
        """Write figures, arguments and their origin to ``json``, if it was given."""
        if self.json is None:
            return
        size = {name: value for name, value in vars(self).items() if name != "json"}
        command = shlex.join(["burst", *sys.argv[1:]]).replace(f" --json {shlex.quote(str(self.json))}", "")
        write_json(self.json, {"size": size, **figures} | origin(command))


@dataclass(frozen=True, kw_only=True)
class CallArguments(WrittenArguments):
    """Sizes of one causal attention call."""

    seq_len: int = 8192
    heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def workload(self) -> Workload:
        """Return an attention call of these sizes."""
        sizes = {"heads": self.heads, "kv_heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype}
        return Workload(seq_len=self.seq_len, **sizes)

    @property
    def title(self) -> str:
        return f"causal, {self.dtype}, S={self.seq_len}, H={self.heads}, D={self.head_dim}"


def asked(default: A, description: str | None, prog: str, arguments: list[str]) -> A:
    """Parse ``arguments``; ``default`` holds the default values."""
    return tyro.cli(type(default), prog=prog, default=default, description=description, args=arguments)
