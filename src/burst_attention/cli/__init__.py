"""The ``burst`` command: find the subcommand and call it."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Sequence

import torch

from burst_attention import __version__

# name -> (module, summary). A module has ``main(arguments: list[str]) -> int`` and is imported only for its command.
COMMANDS = {
    "bench": ("burst_bench.command", "compare strategies, other packages and kernels: time, bytes and memory"),
    "calibrate": (f"{__name__}.calibrate", "measure kernels and links; the planner then uses these rates"),
    "check": (
        f"{__name__}.check",
        "compare distributed attention with fp64, gradients included, on the available ranks",
    ),
    "eval": ("burst_train.cli.eval", "measure a model's perplexity, and compare strategies token by token"),
    "export": ("burst_train.cli.export", "write the model of a training checkpoint as a Hugging Face folder"),
    "generate": (f"{__name__}.generate", "continue a prompt that no single device can hold, with a Hugging Face model"),
    "plan": ("burst_train.cli.plan", "predict what training on a long sequence will cost, before you rent GPUs"),
    "train": ("burst_train.cli.train", "train a model on long documents, each sequence spread over several ranks"),
}

USAGE = """usage: burst COMMAND [OPTIONS]

Exact distributed attention for sequences that no longer fit one device.

commands:
{commands}

`burst COMMAND --help` lists its options; `burst --version` prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success, 1 if it failed, 2 if its arguments are wrong, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    lines = (f"  {name:10} {summary}" for name, (_, summary) in COMMANDS.items())
    usage = USAGE.format(commands="\n".join(lines))
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(usage)
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"burst-attention {__version__}, torch {torch.__version__}\n")
        return 0
    if words[0] not in COMMANDS:
        sys.stderr.write(f"burst: unknown command {words[0]!r}\n\n{usage}")
        return 2
    try:
        return _run(words[0], words[1:])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not interrupt the exit
        sys.stderr.write(f"burst {words[0]}: interrupted\n")
        return 128 + signal.SIGINT


def _run(name: str, arguments: list[str]) -> int:
    try:
        command: Callable[[list[str]], int] = importlib.import_module(COMMANDS[name][0]).main
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("burst_attention") or missing == "burst_train":
            raise
        wanted = "benchmarks" if name == "bench" else "'.[hf]'"
        sys.stderr.write(f"burst {name}: {missing} is not installed: in the checkout, run pip install -e {wanted}\n")
        return 2
    return command(arguments)
