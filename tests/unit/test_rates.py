"""Rates: accepted values can be used, written values can be read, and others are refused by name."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_attention import Hardware, Mask, make_plan
from burst_attention.attention.hardware import shape_of
from burst_attention.attention.probe import measured
from burst_attention.comm.transport import Transport
from burst_attention.planner.explain import explain
from burst_attention.planner.planner import Planner
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import _RANGES, Rates, read_rates, write_rates
from tests.support.schedules import make_schedule

CPU = preset("cpu")


def extreme(*, slow: bool) -> Rates:
    """Return rates with every figure at the end of its range where calls take longest, or shortest."""
    rates = CPU.as_dict()
    for table in rates.values():
        for key in table if isinstance(table, dict) else ():
            if key in _RANGES:
                least, most = _RANGES[key]
                table[key] = least if slow == (least > 0) else most
    return Rates.from_dict(rates)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("slow", "seqlen", "guessed"),
    [
        (True, 0, True),
        (False, 0, False),
        (True, 1, False),
        (False, 5000, True),
        (True, 2**31, True),
        (False, 2**31, False),
    ],
)
def test_all_that_is_taken_can_be_computed_with(slow: bool, seqlen: int, guessed: bool) -> None:
    known = shape_of(torch.bfloat16, batch=1, q_heads=8, kv_heads=4, head_dim=64)
    planner = Planner(extreme(slow=slow), (0, 0, 1, 1), known, guessed)
    options = {"mask": Mask(), "layout": "auto", "route": "auto", "ulysses_degree": "auto"}
    planned = make_schedule(seqlen, **options, rank=0, world=4, planner=planner)
    found = planned.predict_for_links(known)[0]
    assert all(math.isfinite(one.seconds) and one.seconds >= 0 for one in found)
    assert "chosen: " in explain(planned.planner, planned.schedule, known)


def test_texts_of_any_character_are_read_as_they_were_written(tmp_path: Path) -> None:
    every = "".join(map(chr, [*range(0x250), 0x2028, 0xFEFF, 0x1F600]))
    ours = replace(CPU, name=every, source=every[::-1])
    write_rates(ours, tmp_path / "rates.toml")
    assert read_rates(tmp_path / "rates.toml") == ours


def test_what_can_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "rates.toml"
    write_rates(CPU, path)
    for odd, reported in (
        (replace(CPU, name="\udcff"), r"name='\\udcff' has a lone surrogate"),
        (replace(CPU, overhead=replace(CPU.overhead, fold=math.nan)), r"overhead\.fold=nan"),
    ):
        with pytest.raises(ValueError, match=reported):
            write_rates(odd, path)
    assert read_rates(path) == CPU  # as it was


@pytest.mark.parametrize(
    ("key", "given", "reported"),
    [
        ("fold", "nan", r"overhead\.fold=nan must be a number from 1 to 1e\+30"),
        ("fold", "1e-305", r"overhead\.fold=1e-305 must be a number from 1 to"),
        ("fold", "true", r"overhead\.fold=True must be a number"),
        ("visit", "inf", r"overhead\.visit=inf must be a number from 0 to 1e\+09"),
        ("visit", str(10**400), r"overhead\.visit=10{39} must be a number"),
        ("visit", "9" * 5000, "limit"),
        ("visit", "[" * 5000, "recursion"),
        ("bytes_per_second", "1e-300", r"inside\.bytes_per_second=1e-300 must"),
        ("forward", "1e300", r"half\.forward=1e\+300 must"),
        ("fold", "-1", r"overhead.fold=-1"),
        ("shared", '"no"', r"shared='no' must be true or false"),
        ("name", "3", r"name=3 must be a text"),
        ("latency", "1\ndelay = 1", "delay"),
        ("latency", "", "Invalid value"),
    ],
)
def test_a_figure_that_can_not_be_computed_with_is_refused(tmp_path: Path, key: str, given: str, reported: str) -> None:
    path = tmp_path / "rates.toml"
    write_rates(CPU, path)
    path.write_text(path.read_text("utf-8").replace(f"{key} = ", f"{key} = {given} #", 1), "utf-8")
    with pytest.raises(ValueError, match=rf"(?s)rates of .*rates\.toml: .*{reported}") as refused:
        make_plan(16, hardware=Hardware(rates=path))
    assert len(str(refused.value)) < 500


def test_rates_given_as_an_object_are_checked_too() -> None:
    for fold in (1e-305, math.inf, 10**400):
        with pytest.raises(ValueError, match=r"overhead\.fold="):
            make_plan(16, hardware=Hardware(rates=replace(CPU, overhead=replace(CPU.overhead, fold=fold))))


def test_a_failed_measurement_leaves_the_counts_of_calls():
    transport = Transport(None, sent=3, received=4)

    class Lost:
        def agree(self, *_: Any) -> Any:
            transport.sent, transport.received = transport.sent + 10, transport.received + 10
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        measured(preset("cpu"), transport, Lost(), [0, 0], torch.device("cpu"))
    assert (transport.sent, transport.received) == (3, 4)
    assert not transport.health.measured
