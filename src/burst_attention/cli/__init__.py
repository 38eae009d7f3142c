"""The ``burst`` command: parse, then call."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch

from burst_attention import __version__


@dataclass(frozen=True)
class Command:
    """What a command does, the packages that it needs beyond the library's own, and the extra that brings them."""

    summary: str
    needs: tuple[str, ...] = ()
    extra: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """What of ``needs`` is not installed."""
        return tuple(name for name in self.needs if importlib.util.find_spec(name) is None)


# Each module has ``main(arguments: list[str]) -> int`` and is imported only when its command is called.
COMMANDS = {
    "calibrate": Command("measure kernels and links, for plans to be chosen by"),
    "check": Command("compare distributed attention with fp64, gradients included, over the ranks at hand"),
    "eval": Command(
        "measure a model's perplexity with every engine, and how far they are apart token by token",
        ("transformers", "safetensors"),
        "train",
    ),
    "export": Command(
        "write the model of a training checkpoint as a Hugging Face folder",
        ("transformers", "safetensors"),
        "train",
    ),
    "plan": Command("tell what a sequence over so many ranks will cost, before anything is rented"),
    "train": Command(
        "train a model on long documents, each sequence spread over several ranks",
        ("transformers", "safetensors", "matplotlib", "tensorboard", "tomli_w"),
        "train",
    ),
}
# Commands of other distributions, by name of an entry point of this group, which is their ``main``.
GROUP = "burst_attention.commands"
# Those that an extra of ours, of the same name, brings; they are listed without it, too.
OF_EXTRAS = {"bench": "compare engines: time, bytes and memory of burst, ring, Ulysses and tensor parallelism"}

USAGE = """usage: burst COMMAND [OPTIONS]

Exact distributed attention for sequences that no longer fit one device.

commands:
{commands}

`burst COMMAND --help` lists a command's options, `burst --version` tells the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if it failed, 2 if it was asked for what can't be."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    listed = {entry.name: f"a command of {entry.value.split('.')[0]}" for entry in entry_points(group=GROUP)}
    listed |= OF_EXTRAS | {name: command.summary for name, command in COMMANDS.items()}
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
    missing = missing_packages(given[0])
    if missing:
        sys.stderr.write(f"burst {given[0]}: {missing}\n")
        return 2
    return load_command(given[0])(given[1:])


def missing_packages(name: str) -> str:
    """What keeps a command from running here, and what to install; empty if nothing does."""
    if name not in COMMANDS:
        installed = entry_points(group=GROUP, name=name)
        return "" if installed else f"not installed: pip install 'burst-attention[{name}]'"
    command = COMMANDS[name]
    if not command.missing:
        return ""
    return f"{', '.join(command.missing)} not installed: pip install 'burst-attention[{command.extra}]'"


def load_command(name: str) -> Callable[[list[str]], int]:
    """The ``main`` of a command that lacks nothing, ours or another distribution's."""
    if name in COMMANDS:
        return importlib.import_module(f"{__name__}.{name}").main
    return next(iter(entry_points(group=GROUP, name=name))).load()
