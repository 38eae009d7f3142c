"""The ``burst`` command finds its commands, offers all there is, and names a package to install."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from burst_bench.command import EVERY, PROGRAMS, Arguments
from burst_bench.command import main as bench

from burst_attention import cli
from burst_attention.attention.call import DTYPES
from burst_attention.cli import check
from burst_attention.plan.assignment import CIRCULATIONS
from burst_attention.plan.layout import LAYOUTS
from burst_attention.plan.route import ROUTES
from burst_attention.testing import check as run_check
from burst_attention.testing import local_world
from burst_train.presets import PRESETS
from burst_train.step.evaluation import EvalConfig
from burst_train.strategies import STRATEGIES, choose


def test_bench_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "usage: burst bench {attention,train,prefill}" in printed
    assert "\n  peers       Our attention" in printed  # one line for each other measurement
    lines = printed.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80, "one screen"


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_measurement_has_help(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench([program, "--help"])
    assert ended.value.code == 0 and f"usage: burst bench {program}" in capsys.readouterr().out


def test_an_unknown_measurement_is_answered_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["speed"]) == 2
    assert "the task is speed; give one of attention, train, prefill, compiled, cost-model, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "missing", "remedy"),
    [
        ("bench", "burst_bench", "benchmarks"),
        ("train", "tomli_w", "'.[hf]'"),
        ("plan", "transformers", "'.[hf]'"),
    ],
)
def test_a_command_says_in_one_line_what_to_install(command, missing, remedy, monkeypatch, capsys):
    for name in [*sys.modules]:
        if name.startswith(("burst_train", "burst_bench")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main([command, "--help"]) == 2
    wanted = f"in the checkout, run pip install -e {remedy}"
    assert capsys.readouterr().err == f"burst {command}: {missing} is not installed: {wanted}\n"


def test_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "\n  bench      compare strategies" in capsys.readouterr().out
    assert cli.main(["bnech"]) == 2
    assert "unknown command 'bnech'" in capsys.readouterr().err


def test_check_prints_the_worst_of_each_dtype_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"seq_len": 256, "masks": ("causal",), "layouts": ("zigzag", "contiguous"), "circulate": ("query",)}
    arguments = check.CheckArguments(**sizes, dtypes=("float64", "float32"))
    todo = check.cases(arguments, "cpu")
    with local_world(1):
        reports = [run_check(case) for case in todo]
    for verbose, rows in ((False, 2), (True, 4)):
        check._show(replace(arguments, verbose=verbose), todo, reports)
        printed = capsys.readouterr().out
        lines = [line.rstrip() for line in printed.splitlines()]
        assert sum(line.endswith("  ok") for line in lines) == rows and "all 4 cases ok" in printed
    wrong = replace(reports[1], rows=[replace(row, bound=0.0) for row in reports[1].rows])
    check._show(arguments, todo, [reports[0], wrong, *reports[2:]])
    assert "1 of 4 cases WRONG" in capsys.readouterr().out


DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def offered(settings: type, field: str) -> set[str]:
    """Return a setting's values except ``auto``."""

    def names(hint: Any) -> set[str]:
        return set(get_args(hint)) if get_origin(hint) is Literal else set().union(*map(names, get_args(hint)), set())

    return names(get_type_hints(settings)[field]) - {"auto"}


@pytest.mark.parametrize(
    ("settings", "field", "made"),
    [
        (check.CheckArguments, "layouts", LAYOUTS),
        (check.CheckArguments, "route", ROUTES),
        (check.CheckArguments, "circulate", CIRCULATIONS),
        (check.CheckArguments, "masks", check.MASKS),
        (check.CheckArguments, "dtypes", DTYPE_NAMES),
        (Arguments, "dtype", DTYPE_NAMES),
    ],
)
def test_a_command_offers_all_there_are(settings, field, made):
    assert offered(settings, field) == set(made)


def test_what_is_run_unasked_is_all_there_is():
    assert check.CheckArguments().layouts == tuple(LAYOUTS) and check.CheckArguments().circulate == tuple(CIRCULATIONS)
    assert {*EVERY} < {*STRATEGIES} and EvalConfig(model="m", data="d").strategies == ("auto",)


def test_strategies_are_called_by_their_names():
    assert [choose(name).name for name in STRATEGIES] == list(STRATEGIES)


@pytest.mark.parametrize("command", ["train", "eval", "plan"])
def test_help_names_every_preset(command: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert f"A preset with random weights ({', '.join(PRESETS)})" in printed


def test_the_page_on_training_names_every_preset() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "train.md").read_text()
    (listed,) = re.findall(r"is a preset \(([^)]*)\)", page)
    assert re.findall(r"`([^`]*)`", listed) == [*PRESETS]
