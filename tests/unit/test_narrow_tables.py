"""Every table of the commands on a terminal of 80 columns: no line is wider, and no cell is cut or folded."""

import ast
import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from burst_bench import command as bench
from rich.console import Console

from burst_attention.cli import check
from burst_attention.cli.tables import print_table
from burst_attention.testing.check import Report, Row
from burst_train.cli import eval as evaluation
from burst_train.cli import plan
from burst_train.cli.screen import Screen
from burst_train.config import ParallelConfig, TrainConfig
from burst_train.run.metrics import Summary
from burst_train.step.evaluation import EvalConfig, StrategyResult
from tests.support.bench_results import RESULTS

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 80
LONG = "layout=zigzag,route=direct,circulate=query,ulysses_degree=8,cache_qkv=True"


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=WIDTH, highlight=False)


def tables_of(printed: str) -> list[str]:
    """The lines of tables: those around a rule, up to a line that is none of theirs."""
    lines, found = printed.splitlines(), []
    for n, line in enumerate(lines):
        if line.startswith("───"):
            below = itertools.takewhile(lambda row: "  " in row, lines[n + 1 :])
            found += [lines[n - 1], line, *below]
    assert found and max(map(len, found)) <= WIDTH
    assert not any("…" in line for line in found)
    return found


def cells_of(lines: list[str]) -> set[str]:
    return {cell for line in lines for cell in line.replace("  ", "\n").split("\n") if cell.strip()}


def test_columns_beyond_the_width_follow_with_the_first_ones_repeated(screen: Console) -> None:
    rows = [{"strategy": name, **{f"column {n}": f"figure {n} of {name}" for n in range(9)}} for name in ("a", LONG)]
    print_table(screen, rows, title="a title")
    printed = screen.file.getvalue()  # type: ignore[attr-defined]
    lines = tables_of(printed)
    assert {f"figure {n} of a" for n in range(9)} <= {cell.strip() for cell in cells_of(lines)}
    assert sum(line.startswith("strategy ") for line in lines) == sum(line.startswith("(1) ") for line in lines) > 2
    assert f"\n(1) {LONG}" in printed


def test_columns_are_explained_below(screen: Console) -> None:
    print_table(screen, [{"a": "1", "b": "2"}], legend={"b": "a figure", "c": "of other rows"}, title="a title")
    assert screen.file.getvalue().splitlines()[-1] == "b: a figure"  # type: ignore[attr-defined]


def test_every_table_of_the_commands_is_explained() -> None:
    without = []
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks" / "src").rglob("*.py")]:
        calls = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)]
        tables = [call for call in calls if getattr(call.func, "id", "") == "print_table"]
        without += [path.name for call in tables if "legend" not in {word.arg for word in call.keywords}]
    assert without in ([], ["compare.py"]), "burst bench peers has its own explanation"


def test_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    arguments = check.CheckArguments(seq_len=256, masks=tuple(check.MASKS), verbose=True)
    todo = check.cases(arguments, "cpu")
    rows = (Row("lse", 7, "largest absolute", 1.2e-3, 1.0e-2), Row("dq", 7, "relative L2", 1.2e-3, 1.0e-2))
    check._show(arguments, todo, [Report("a case", rows) for _ in todo])
    lines = tables_of(capsys.readouterr().out)
    assert len(lines) == len(todo) + 2, "one table"
    assert any(line.startswith("documents  zigzag-by-halves  bfloat16  pass-query  lse, 7 ") for line in lines)


@pytest.mark.parametrize("strategy", ["auto", LONG])
def test_plan(strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    asked = ["--model", "llama-3-8b", "--seq-len", "1M", "--ranks", "8", "--hardware", "h100-hgx"]
    assert plan.main([*asked, "--strategy", strategy]) == 0
    lines = tables_of(capsys.readouterr().out)
    assert len(lines) >= 7 and lines[0].split() == ["strategy", "step", "tokens/s", "memory", "--remat", "verdict"]


def test_eval(screen: Console) -> None:
    config = EvalConfig(model="llama-3-8b", data="stdlib", ranks=8, dtype="bfloat16")
    figures: Any = {"loss": 12.345678, "tokens": 409_500, "sequences": 100, "seconds": 1234.5, "reference": "single"}
    names = ("single", "tensor-sequence", "zigzag-ring", LONG)
    results = [StrategyResult(strategy=name, **figures, greatest_difference=1e-5) for name in names]
    results.append(StrategyResult(strategy="ulysses", refused="--strategy ulysses needs a number of ranks " * 4))
    evaluation.show(screen, config, results)
    printed = screen.file.getvalue()  # type: ignore[attr-defined]
    lines = tables_of(printed)
    assert len(lines) == len(results) + 2 and any(line.startswith("tensor-sequence  12.345678") for line in lines)
    assert "\nulysses is left out: --strategy ulysses needs" in printed
    assert "; greatest difference: a token's log-likelihood against that of single, the largest, in nats" in printed


def test_eval_of_one_strategy_compares_nothing(screen: Console) -> None:
    assert EvalConfig(model="tiny", data="stdlib").strategies == ("auto",)
    figures: Any = {"loss": 1.5, "tokens": 9, "sequences": 1, "seconds": 2.0, "greatest_difference": 0.0}
    config = EvalConfig(model="tiny", data="stdlib", ranks=2, dtype="float32")
    evaluation.show(screen, config, [StrategyResult(strategy="auto", reference="auto", **figures)])
    printed = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "perplexity: exp(loss)" in printed and "difference" not in printed and "reference" not in printed


def test_bench(screen: Console) -> None:
    bench._show(RESULTS, screen)
    lines = tables_of(screen.file.getvalue())  # type: ignore[attr-defined]
    shown = {cell.strip() for cell in cells_of(lines)}
    assert {"bytes predicted", "peak memory", "200 Mbit/s", "8.19 MB", "1.00e-06"} <= shown


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_summary_of_a_run(ranks: int, screen: Console) -> None:
    each: list[Any] = [12.345 * 2**30] * ranks
    summary = Summary(1000, 12.5, 1.5, 3.2, 12_288, 1e6, 0, each, each, each)
    changed = {"best_step": 800, "best_held_out_loss": 3.1, "exchange_seconds": [12.345] * ranks}
    shown = Screen(screen)
    shown.config = replace(TrainConfig(), parallel=ParallelConfig(device="cpu"))
    shown.finish(replace(summary, **changed, left_out=[1, 2], spikes={5: 2.0}))
    lines = [line for line in screen.file.getvalue().splitlines() if line.startswith("│")]  # type: ignore[attr-defined]
    labels = [line.split("│")[1].strip() for line in lines]
    assert max(map(len, lines)) <= WIDTH and labels.count("") == 1, "only a peak's meaning has a line of its own"
