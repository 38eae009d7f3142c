"""Seed faults one at a time and see the tests that each names go red.

    python tests/tools/mutation.py [NAME ...]       (make mutation)

Each fault is one replacement in a copy of the sources, which a fresh pytest imports in place of the installed ones.
Caught means that pytest ran and tests failed; a fault that survives, or whose text is no longer in the source, is an
error here.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "faults.toml"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``file``; ``tests`` (a pytest file and, optionally, a -k expression) must fail.

    ``file`` is one of the library, or begins with ``src/`` or ``benchmarks/``.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    only: str = ""


SEEDED = [Fault(**entry) for entry in tomllib.loads(FAULTS.read_text())["fault"]]


def home_of(fault: Fault) -> str:
    """The file of a fault, from the root of the sources."""
    return fault.file if fault.file.startswith(("src/", "benchmarks/")) else f"src/burst_attention/{fault.file}"


def try_fault(fault: Fault) -> tuple[Fault, str, float]:
    """'caught', or what is wrong, and the seconds it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="burst-mutation-") as folder:
        copies = [Path(folder) / name for name in ("src", "benchmarks")]
        for copy in copies:
            shutil.copytree(ROOT / copy.name, copy, ignore=shutil.ignore_patterns("__pycache__"))
        target = Path(folder) / home_of(fault)
        text = target.read_text()
        if text.count(fault.old) != 1:
            return fault, f"its text stands {text.count(fault.old)} times in {fault.file}", 0.0
        target.write_text(text.replace(fault.old, fault.new))
        command = [
            sys.executable,
            "-m",
            "pytest",
            *fault.tests.split(),
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
        ]
        command += ["-k", fault.only] if fault.only else []
        paths = os.pathsep.join(map(str, (copies[0], copies[1] / "src")))
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    verdict = {0: "SURVIVED", 1: "caught"}.get(result.returncode, f"pytest exit {result.returncode}:\n{result.stdout}")
    return fault, verdict, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults whose name contains one of these; default: all")
    chosen = [f for f in SEEDED if not (names := parser.parse_args().names) or any(n in f.name for n in names)]
    console = Console()
    with ThreadPoolExecutor(2) as workers:
        missed = 0
        for fault, verdict, seconds in workers.map(try_fault, chosen):
            missed += verdict != "caught"
            console.print(f"{'ok ' if verdict == 'caught' else 'BAD'} {fault.name}: {verdict} in {seconds:.0f} s")
    console.print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
