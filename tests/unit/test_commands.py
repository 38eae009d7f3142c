"""The ``burst`` command finds other distributions' commands, and names what to install for a missing one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from burst_bench.command import PROGRAMS
from burst_bench.command import main as bench

from burst_attention import cli

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install only the entry points of burst-attention-bench's pyproject.toml."""
    groups = tomllib.loads((BENCHMARKS / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    folder = tmp_path / "burst_attention_bench-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: burst-attention-bench\nVersion: 0\n", "utf-8")
    sections = (f"[{g}]\n" + "".join(f"{name} = {value}\n" for name, value in own.items()) for g, own in groups.items())
    (folder / "entry_points.txt").write_text("\n".join(sections), "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_bench_is_found_where_its_distribution_is(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_bench_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda **_: [])
    assert cli.main(["bench", "train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("burst bench: not installed: pip install 'burst-attention[bench]'") and said.count("\n") == 1
    assert cli.main(["--help"]) == 0
    assert "\n  bench      compare strategies" in capsys.readouterr().out
    assert cli.main(["bnech"]) == 2
    assert "unknown command 'bnech'" in capsys.readouterr().err
