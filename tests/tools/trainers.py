"""The stock trainers in one process against ours over ranks: every loss and gradient norm, step by step, in one table.

    python tests/tools/trainers.py [CASE ...]

Each case trains a tiny model for 10 optimizer steps in fp32, accumulating 2 batches, with clipping active and two
evaluations of 23 samples, which no batch size divides. Exit status 1 if a difference is over its bound.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.trainer_cases import CASES, Case, difference, run_case, save_model  # noqa: E402

COLUMNS = ("case", "ranks", "context", "loss", "gradient norm", "evaluation", "metrics", "bounds", "ok")


class Sides:
    """Where cases run: the stock trainers in a separate process, ours in pools of ranks."""

    def __init__(self, pools: Callable[[int], Any]) -> None:
        self.pools = pools
        self.alone = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def compare(self, case: Case) -> dict[str, float]:
        """The largest differences over all steps and ranks."""
        with tempfile.TemporaryDirectory(prefix="trainers-") as folder:
            save_model(f"{folder}/model")
            if case.stock_ranks > 1:
                (stock, *_) = self.pools(case.stock_ranks).run(run_case, case.name, f"{folder}/stock", False)
            else:
                stock = self.alone.submit(run_case, case.name, f"{folder}/stock", False).result()
            ours = self.pools(case.ranks).run(run_case, case.name, f"{folder}/ours", True, timeout=300)
        return difference(case, stock, ours)


def row_of(case: Case, found: dict[str, float]) -> tuple[str, ...]:
    bounds = f"{case.bounds['loss']:.0e} {case.bounds['grad_norm']:.0e}"
    figures = (f"{found[name]:.1e}" for name in ("loss", "grad_norm", "eval_loss", "metrics"))
    return (case.name, str(case.ranks), str(case.context), *figures, bounds, "yes" if case.holds(found) else "NO")


def main() -> int:
    from burst_attention.testing import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="*", choices=[[], *CASES], help="which cases; default: all")
    names = parser.parse_args().case or list(CASES)
    alive: dict[int, WorkerPool] = {}

    def pools(world: int) -> WorkerPool:
        if world not in alive or alive[world].broken:
            alive[world] = WorkerPool(world)
        return alive[world]

    sides, wrong = Sides(pools), 0
    print(" | ".join(COLUMNS), flush=True)
    for name in names:
        case = CASES[name]
        try:
            row = row_of(case, found := sides.compare(case))
            wrong += not case.holds(found)
        except Exception as error:
            wrong += 1
            row = (name, str(case.ranks), str(case.context), "failed", "NO")
            alive.pop(case.ranks).close()  # its ranks may be out of step
            print("\n".join(str(error).strip().splitlines()[-12:]), file=sys.stderr)
        print(" | ".join(row), flush=True)
    for pool in alive.values():
        pool.close()
    sides.alone.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
