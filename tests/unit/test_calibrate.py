"""Calibration of a link with known latency and bandwidth."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burst_attention.attention import probe, probe_chosen
from burst_attention.attention.new_plan import single_rank_plan
from burst_attention.cli.calibrate import _show
from burst_attention.comm.transport import PACKED_BYTES, Health
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import Rates


class Link:
    """A clock, and a transport whose waits take the time of a link's messages, which share one port."""

    rank, world = 0, 2

    def __init__(self, latency: float, bytes_per_second: float) -> None:
        self.latency, self.bytes_per_second, self.now = latency, bytes_per_second, 0.0

    def agree(self, _: str, fields: Any, own: Any) -> list[Any]:
        return [own] * self.world

    def post(self, sends: Any, receives: Any, *, label: str) -> Any:
        assert len(sends) == len(receives) == probe.AT_ONCE
        assert sum(each.tensor.nbytes for each in sends) > PACKED_BYTES  # or they would go as one message
        return sends

    def wait(self, sends: Any) -> None:
        self.now += sum(self.latency + each.tensor.nbytes / self.bytes_per_second for each in sends)


@pytest.mark.parametrize(("latency", "bytes_per_second"), [(0.0, 1e9), (5e-3, 2e7), (1e-6, 1e11), (2e-4, 3e6)])
def test_a_link_s_latency_and_bandwidth_are_recovered(monkeypatch, latency: float, bytes_per_second: float) -> None:
    link: Any = Link(latency, bytes_per_second)
    clock = SimpleNamespace(perf_counter=lambda: link.now, process_time=None, thread_time=None)
    monkeypatch.setattr(probe, "time", clock)
    inside, across = probe.Probe(link, link, (0, 0), torch.device("cpu"), repeats=1, thorough=True).links()
    assert across is None and inside is not None
    assert inside.bytes_per_second == pytest.approx(bytes_per_second, rel=1e-6)
    assert inside.latency == pytest.approx(latency, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("cold", [0.0, 1.0])
def test_a_slow_first_message_is_not_the_link_s_rate(monkeypatch, cold: float) -> None:
    """Connections may open with the first message between two ranks."""
    link: Any = Link(1e-4, 1e9)
    clock = SimpleNamespace(perf_counter=lambda: link.now, thread_time=None)
    monkeypatch.setattr(probe, "time", clock)
    wait = link.wait

    def opening(sends: Any) -> None:
        nonlocal cold
        link.now, cold = link.now + cold, 0.0
        wait(sends)

    link.wait = opening
    inside, _ = probe.Probe(link, link, (0, 0), torch.device("cpu")).links()
    assert inside is not None and inside.bytes_per_second == pytest.approx(1e9, rel=0.01)


def test_what_was_measured_is_shown_under_its_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _show(preset("cpu+ethernet-25g"), tmp_path / "rates.toml")
    shown = capsys.readouterr().out.splitlines()
    assert shown[:5] == [
        "inside a node: 200 us per message, 1 GB/s",
        "across nodes: 80 us per message, 2.8 GB/s, shared by the ranks of a node",
        "kernels, 2 bytes per element: 90 forward, 135 backward, in 10^9 operations per second",
        "kernels, 4 bytes per element: 94 forward, 88 backward, in 10^9 operations per second",
        "kernels, 8 bytes per element: 45 forward, 38 backward, in 10^9 operations per second",
    ]
    known = preset("cpu+ethernet-25g")
    _show(replace(known, across=replace(known.across, busy=2e-3)), tmp_path / "rates.toml")
    assert "\nacross nodes: 80 us per message (2000 us between products), 2.8 GB/s" in capsys.readouterr().out


def test_a_message_between_products_is_what_exchanges_add(monkeypatch) -> None:
    """A product of 3 s, an exchange of 5 s with two others; the product runs between its two halves."""
    link: Any = Link(0.0, 1.0)
    link.world, link.group, link.health = 3, None, Health()
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: link.now, thread_time=None))
    calls = list[str]()

    def spend(what: str, seconds: float) -> None:
        calls.append(what)
        link.now += seconds

    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: spend("product", 3.0))
    link.expect = lambda parts, label: spend(f"expect {len(parts)}", 1.0)
    link.gather = lambda *_: spend("gather", 4.0)
    found = probe.Probe(link, link, (0, 0, 0), torch.device("cpu")).busy(torch.zeros(64, 2), torch.zeros(1, 2))
    assert found == pytest.approx(5.0 / 2)
    assert calls[-3:] == ["expect 3", "product", "gather"]


def test_older_files_have_no_seconds_between_products() -> None:
    known = preset("cpu").as_dict()
    for name in ("inside", "across"):
        del known[name]["busy"]
    assert Rates.from_dict(known) == preset("cpu")


def test_cores_are_counted_where_the_system_names_none(monkeypatch) -> None:
    """macOS has no ``os.sched_getaffinity``."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert probe.cores_per_rank() == 2


def test_rates_of_chosen_keys_are_recovered(monkeypatch) -> None:
    """From the times of a kernel that has these rates: each part of the time is recovered."""
    made = preset("cpu").chosen
    assert made is not None
    of, pairs, rows = probe_chosen, probe_chosen.ROWS * probe_chosen.KEYS, probe_chosen.ROWS * probe_chosen.COUNT
    score, keep = pairs * 2 * of.DIM / made.score, pairs / made.keep
    times = {"choose, many": of.HEADS * score + keep, "choose, one": score + keep}
    times |= {"blocks": of.HEADS * (score + pairs / made.pool), "look": 2 * rows / made.look}
    for way, flops in (("forward", of.WIDTH + of.VALUES), ("backward", 3 * of.WIDTH + 2 * of.VALUES)):
        gather, products, dense = (getattr(made, f"{what}_{way}") for what in ("gather", "rows", "dense"))
        for name, heads in (("many", of.GROUP), ("one", 1)):
            each = of.WIDTH * of.ELEMENT / gather + heads * 2 * flops / products
            times[f"{way}, {name}"] = rows * each
        times[f"{way}, dense"] = pairs * of.GROUP * 2 * flops / dense
    assert {*times} == {*of._calls(probe.Probe(*_alone(), repeats=1, thorough=True))}
    monkeypatch.setattr(of, "_calls", lambda _: times)
    found = of.chosen_kernels(SimpleNamespace(seconds=lambda calls: calls))  # type: ignore[arg-type]
    assert vars(found) == pytest.approx(vars(made))


def test_kernels_of_chosen_keys_are_measured() -> None:
    found = probe_chosen.chosen_kernels(probe.Probe(*_alone(), repeats=1, thorough=True))
    assert Rates.from_dict(preset("cpu").as_dict() | {"chosen": vars(found)}).chosen == found


def _alone() -> Any:
    plan = single_rank_plan(8)
    return plan.agreement, plan.transport, (0,), torch.device("cpu")
