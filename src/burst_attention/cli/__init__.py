"""The ``burst`` command: find the subcommand and call it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

import torch

from burst_attention import __version__

# Each module has ``main(arguments: list[str]) -> int`` and is imported only when its command is called.
COMMANDS = {
    "calibrate": "measure kernels and links; the planner then uses these rates",
    "check": "compare distributed attention with fp64, gradients included, on the available ranks",
    "generate": "continue a prompt that no single device can hold, with a Hugging Face model",
}
# Other distributions add commands through entry points in this group; each entry point is a command's ``main``.
GROUP = "burst_attention.commands"
FOLDERS = {"bench": "benchmarks", "train": "train"}  # where a checkout has the distribution of an extra
# Commands of this project's other distributions: (extra that installs it, summary). Listed even if not installed.
OF_EXTRAS = {
    "bench": ("bench", "compare strategies: time, bytes and memory of burst, ring, Ulysses and tensor parallelism"),
    "eval": ("train", "measure a model's perplexity with every strategy, and compare them token by token"),
    "export": ("train", "write the model of a training checkpoint as a Hugging Face folder"),
    "plan": ("train", "predict what training on a long sequence will cost, before you rent GPUs"),
    "train": ("train", "train a model on long documents, each sequence spread over several ranks"),
}

USAGE = """usage: burst COMMAND [OPTIONS]

Exact distributed attention for sequences that no longer fit one device.

commands:
{commands}

`burst COMMAND --help` lists its options; `burst --version` prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success, 1 if the command failed, 2 if its arguments are wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    listed = {entry.name: f"a command of {entry.value.split('.')[0]}" for entry in entry_points(group=GROUP)}
    listed |= {name: summary for name, (_, summary) in OF_EXTRAS.items()} | COMMANDS
    usage = USAGE.format(commands="\n".join(f"  {name:10} {summary}" for name, summary in sorted(listed.items())))
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(usage)
        return 0 if given else 2
    if given[0] == "--version":
        sys.stdout.write(f"burst-attention {__version__}, torch {torch.__version__}\n")
        return 0
    if given[0] not in listed:
        sys.stderr.write(f"burst: unknown command {given[0]!r}\n\n{usage}")
        return 2
    command = find_command(given[0])
    if command is None:
        extra, _ = OF_EXTRAS[given[0]]
        install = f"pip install 'burst-attention[{extra}]', or in a checkout: pip install -e {FOLDERS[extra]}"
        sys.stderr.write(f"burst {given[0]}: not installed: {install}\n")
        return 2
    return command(given[1:])


def find_command(name: str) -> Callable[[list[str]], int] | None:
    """Return the ``main`` of a listed command, or None if its distribution is not installed."""
    if name in COMMANDS:
        return importlib.import_module(f"{__name__}.{name}").main
    entry = next(iter(entry_points(group=GROUP, name=name)), None)
    return None if entry is None else entry.load()
