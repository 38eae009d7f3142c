"""Write docs/reference/cli.md: every command's ``--help``, and the programs of ``burst bench`` and of tests/.

    python tests/tools/cli_page.py

A test compares the page with what the commands print.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "cli.md"
HEAD = """# Commands

`python tests/tools/cli_page.py` writes this page from `--help`; a test compares.

## Install

| extra | brings |
|---|---|
{extras}

A checkout has three distributions: the library in `.`, training in `train`, and measurements in `benchmarks`. Install
what you need in one step, for example `pip install -e ".[trainer]" -e train`. The extras `train` and `bench` need
packages that are not on PyPI yet, so name the folders `train` and `benchmarks` instead. `make demo` and `make test`
install everything in `.venv`; `. .venv/bin/activate` puts `burst` on your path.

## burst

Without torchrun, a command starts its own local ranks (`--ranks N`). Under torchrun it uses the ranks that torchrun
started: `torchrun --nproc-per-node 2 -m burst_attention.cli train --steps 50`.
"""
BRINGS = {
    "hf": "transformers, for `burst_attention.integrations.hf`",
    "train": "burst-train: `burst train`, `burst eval`, `burst export` and `burst plan`",
    "trainer": "accelerate, TRL and PEFT, for `burst_attention.integrations.trainers`",
    "bench": "burst-attention-bench: `burst bench`",
    "peers": "ring-flash-attn, yunchang and ring-attention-pytorch, for `burst bench peers`",
    "gpu": 'Triton, for `kernel="triton"`; torch for CUDA includes it',
    "torchao": "torchao, for `burst train --optimizer adamw-8bit`",
    "wandb": "Weights & Biases, for `burst train --wandb PROJECT`",
    "test": "pytest, hypothesis, ruff, mypy, playwright and Lightning, for `make test` and `make check`",
    "docs": "mkdocs-material and mkdocstrings, for `make docs`",
}


def help_of(command: str) -> str:
    """Return what ``burst COMMAND --help`` prints on a terminal of 100 columns."""
    from burst_attention.cli import find_command

    main = find_command(command)
    assert main is not None, f"burst {command} is not installed"
    printed = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(["attention", "--help"] if command == "bench" else ["--help"])
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def programs() -> list[tuple[str, str]]:
    """Return (how it is called, the first line of its docstring) of the programs of a checkout."""
    import ast

    from burst_bench.command import PROGRAMS, summary

    found = [(f"burst bench {name}", summary(module)) for name, module in PROGRAMS.items()]
    tools = [path for path in sorted((ROOT / "tests" / "tools").glob("*.py")) if path.stem != "__init__"]
    for path in tools:
        first = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()[0]
        found.append((f"python tests/tools/{path.name}", first))
    return found


def page() -> str:
    """Return the text of the page."""
    from burst_attention.cli import COMMANDS, OF_EXTRAS

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    text = HEAD.format(extras="\n".join(f"| `{name}` | {BRINGS[name]} |" for name in extras))
    for name in sorted((*COMMANDS, *OF_EXTRAS)):
        text += f"\n### burst {name}\n\n```\n{help_of(name)}\n```\n"
        if name == "bench":
            text += "\n`burst bench train` and `burst bench prefill` take the same options.\n"
    rows = "\n".join(f"| `{call}` | {first} |" for call, first in programs())
    text += "\n## Measurements, and programs of a checkout\n\nEach takes `--help`.\n\n"
    return f"{text}| command | what it does |\n|---|---|\n{rows}\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), "utf-8")
