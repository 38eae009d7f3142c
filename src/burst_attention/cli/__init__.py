"""The ``burst`` command: parse, then call."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# Each module has ``main(arguments: list[str]) -> int`` and is imported only when its command is called.
COMMANDS = {
    "bench": "compare engines: time, bytes and memory of burst, ring, Ulysses and tensor parallelism",
    "check": "compare distributed attention with fp64, gradients included, over the ranks at hand",
    "eval": "measure a model's perplexity with every engine, and how far they are apart token by token",
    "plan": "tell what a sequence over so many ranks will cost, before anything is rented",
    "train": "train a model on long documents, each sequence spread over several ranks",
}

USAGE = """usage: burst COMMAND [OPTIONS]

Exact distributed attention for sequences that no longer fit one device.

commands:
{commands}

`burst COMMAND --help` lists a command's options.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if it failed, 2 if it was asked for what can't be."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    usage = USAGE.format(commands="\n".join(f"  {name:10} {says}" for name, says in COMMANDS.items()))
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(usage)
        return 0 if given else 2
    if given[0] not in COMMANDS:
        sys.stderr.write(f"burst: unknown command {given[0]!r}\n\n{usage}")
        return 2
    return importlib.import_module(f"{__name__}.{given[0]}").main(given[1:])
