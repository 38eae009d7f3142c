"""The ``burst`` command: parse, then call."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

# Each module has ``main(arguments: list[str]) -> int`` and is imported only when its command is called.
COMMANDS = {
    "check": "compare distributed attention with fp64, gradients included, over the ranks at hand",
    "eval": "measure a model's perplexity with every engine, and how far they are apart token by token",
    "plan": "tell what a sequence over so many ranks will cost, before anything is rented",
    "train": "train a model on long documents, each sequence spread over several ranks",
}
# Commands of other distributions, by name of an entry point of this group, which is their ``main``.
GROUP = "burst_attention.commands"
# Those that an extra of ours brings; they are listed without it, too.
OF_EXTRAS = {"bench": "compare engines: time, bytes and memory of burst, ring, Ulysses and tensor parallelism"}

USAGE = """usage: burst COMMAND [OPTIONS]

Exact distributed attention for sequences that no longer fit one device.

commands:
{commands}

`burst COMMAND --help` lists a command's options.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if it failed, 2 if it was asked for what can't be."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    listed = {entry.name: f"a command of {entry.value.split('.')[0]}" for entry in entry_points(group=GROUP)}
    listed = dict(sorted((listed | OF_EXTRAS | COMMANDS).items()))
    usage = USAGE.format(commands="\n".join(f"  {name:10} {says}" for name, says in listed.items()))
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(usage)
        return 0 if given else 2
    command = find(given[0])
    if command is not None:
        return command(given[1:])
    if given[0] in OF_EXTRAS:
        sys.stderr.write(f"burst {given[0]}: not installed: pip install 'burst-attention[{given[0]}]'\n")
    else:
        sys.stderr.write(f"burst: unknown command {given[0]!r}\n\n{usage}")
    return 2


def find(name: str) -> Callable[[list[str]], int] | None:
    """The ``main`` of a command, ours or another distribution's; None if there is none of that name."""
    if name in COMMANDS:
        return importlib.import_module(f"{__name__}.{name}").main
    return next((entry.load() for entry in entry_points(group=GROUP, name=name)), None)
