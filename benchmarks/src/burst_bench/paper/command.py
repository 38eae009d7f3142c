"""Measure every engine for the paper's tables, at this machine's scale, and write docs/results/*.md and raw figures.

    burst bench paper [--out docs/results] [--only training prefill ...] [--quick]
    burst bench paper --draw

Each section writes its figures as JSON. The pages and the README's table are drawn from these files, so you can run a
section alone. With --draw the program only draws, and measures nothing.

BurstAttention's claims (arXiv 2403.09347, section 4) are relative, and so are these. Each claim is a ratio of two
engines that took turns in one run. The cluster is emulated, with a network namespace for each node; it needs root and
iproute2. At its three link rates, tensor parallelism with sequence parallelism exchanges for none, half and most of its
step. Models compute in bf16, and in fp32 on CPUs that multiply bf16 slowly. Sections of attention alone (ablation, long,
peers) use bf16. docs/results/README.md lists the minutes of a full run. --quick only tests that everything runs; it took
10 minutes on 2 busy cores (5 minutes of CPU time).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from rich.console import Console

from ..cluster import ClusterError
from ..harness.origin import origin
from ..harness.results import write_json
from .pages import draw
from .sections import QUICK, SECTIONS, Paper, Scale

RESULTS, README = Path("docs/results"), Path("README.md")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="burst bench paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="output folder; default: docs/results, with --quick runs/paper-quick")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, help="at most this many rounds of everything; few rounds leave no spread")
    parser.add_argument("--quick", action="store_true", help="use small sizes, to test that everything runs")
    parser.add_argument("--draw", action="store_const", dest="only", const=[], help="only draw figures measured before")
    a = parser.parse_args(arguments)
    out = a.out or (Path("runs/paper-quick") if a.quick else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # ranks in namespaces can't resolve host names, and would log a warning
    scale = QUICK if a.quick else Scale()
    command = "burst bench paper" + " --quick" * a.quick
    if a.rounds is not None:
        scale, command = scale.at_most(a.rounds), f"{command} --rounds {a.rounds}"
    if a.only != list(SECTIONS):
        command += " --only " + " ".join(a.only)
    paper = Paper(scale, out, Console())
    for name in a.only:
        began = time.monotonic()
        try:
            figures = SECTIONS[name](paper)
        except ClusterError as error:
            raise SystemExit(f"burst bench paper: {name}: {error}") from None
        minutes = (time.monotonic() - began) / 60
        write_json(out / f"{name}.json", figures | origin(command) | {"minutes": minutes})
        paper.say(f"{name}: {minutes:.1f} minutes; wrote {out / name}.json")
    for path in draw(out, README if out == RESULTS else None):
        paper.say(f"wrote {path}")
