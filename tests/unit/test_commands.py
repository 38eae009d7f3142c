"""The ``burst`` command finds its commands, and names what to install for one that lacks a package."""

import sys
from dataclasses import replace

import pytest
from burst_bench.command import PROGRAMS
from burst_bench.command import main as bench

from burst_attention import cli
from burst_attention.cli import check
from burst_attention.testing import check as run_check
from burst_attention.testing import local_world


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
    assert "the task is speed; give one of attention, train, prefill, cost-model, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "missing", "remedy"),
    [
        ("bench", "burst_bench", "in a checkout: pip install -e benchmarks"),
        ("train", "tomli_w", "pip install 'burst-attention[hf]'"),
        ("plan", "transformers", "pip install 'burst-attention[hf]'"),
    ],
)
def test_a_command_says_in_one_line_what_to_install(command, missing, remedy, monkeypatch, capsys):
    for name in [*sys.modules]:
        if name.startswith(("burst_train", "burst_bench")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main([command, "--help"]) == 2
    assert capsys.readouterr().err == f"burst {command}: {missing} is not installed: {remedy}\n"


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
