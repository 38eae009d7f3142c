"""The ``burst`` command: parse, then call."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from burst_attention import __version__


@dataclass(frozen=True)
class Command:
    """What a command does, the packages that it needs beyond the library's own, and the extras that bring them."""

    does: str
    needs: tuple[str, ...] = ()
    extras: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """What of ``needs`` is not installed."""
        return tuple(name for name in self.needs if importlib.util.find_spec(name) is None)


# Each module has ``main(arguments: list[str]) -> int`` and is imported only when its command is called.
COMMANDS = {
    "bench": Command(
        "compare engines: time, bytes and memory of burst, ring, Ulysses and tensor parallelism",
        ("transformers", "matplotlib", "plotly"),
        "train,bench",
    ),
    "check": Command("compare distributed attention with fp64, gradients included, over the ranks at hand"),
    "eval": Command(
        "measure a model's perplexity with every engine, and how far they are apart token by token",
        ("transformers", "safetensors"),
        "train",
    ),
    "plan": Command("tell what a sequence over so many ranks will cost, before anything is rented"),
    "train": Command(
        "train a model on long documents, each sequence spread over several ranks",
        ("transformers", "safetensors", "matplotlib", "tensorboard"),
        "train",
    ),
}

USAGE = """usage: burst COMMAND [OPTIONS]

Exact distributed attention for sequences that no longer fit one device.

commands:
{commands}

`burst COMMAND --help` lists a command's options, `burst --version` tells the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if it failed, 2 if it was asked for what can't be."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    usage = USAGE.format(commands="\n".join(f"  {name:10} {command.does}" for name, command in COMMANDS.items()))
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(usage)
        return 0 if given else 2
    if given[0] == "--version":
        sys.stdout.write(f"burst-attention {__version__}, torch {torch.__version__}\n")
        return 0
    if given[0] not in COMMANDS:
        sys.stderr.write(f"burst: unknown command {given[0]!r}\n\n{usage}")
        return 2
    command = COMMANDS[given[0]]
    if command.missing:
        told = f"{', '.join(command.missing)} not installed: pip install 'burst-attention[{command.extras}]'"
        sys.stderr.write(f"burst {given[0]}: {told}\n")
        return 2
    return importlib.import_module(f"{__name__}.{given[0]}").main(given[1:])
