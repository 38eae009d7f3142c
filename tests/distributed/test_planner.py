"""The planner on ranks: alike on all of them, by rank 0's rates; what it chooses is right; and its measurements."""

import math
import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from burst_attention import CallShape, Hardware, Mask, make_plan
from burst_attention.attention.calibrate import calibrate
from burst_attention.attention.plan import Plan
from burst_attention.attention.probe import Probe
from burst_attention.comm.agreement import RECORD_BYTES, Agreement, DisagreementError, PeerError
from burst_attention.integrations.hf.layers.attention import call_shape
from burst_attention.plan.strategy import Strategy
from burst_attention.planner import planner as planner_module
from burst_attention.planner.choice import least_regret
from burst_attention.planner.passes import PassModel
from burst_attention.planner.presets import NETWORKS, NODES, preset
from burst_attention.planner.rates import Link, MeasuredOn, Rates, read_rates, user_file, write_rates
from burst_attention.testing import Case, WorkerError, local_world
from burst_attention.testing.check import compare
from tests.support.schedules import plan_options

SLOW = replace(preset("cpu"), across=Link(latency=1e-4, bytes_per_second=1e6, shared=True))
SIZES = {"q_heads": 4, "kv_heads": 4, "head_dim": 32}
CALL = CallShape(**SIZES)


def test_all_ranks_choose_by_the_rates_of_rank_0() -> None:
    def plan(group: Any) -> tuple[str, str]:
        rates = SLOW if group.rank() == 0 else preset("h200-hgx")
        plan = make_plan(256, group=group, hardware=Hardware(rates=rates, nodes=[0, 1, 2, 3]), call=CALL)
        return plan.explain(batch=2, **SIZES), plan.layout

    with local_world(4) as ranks:
        reported = ranks.run(plan)
    assert len({*reported}) == 1
    assert "ulysses_degree=4" in reported[0][0] and SLOW.name in reported[0][0]


def test_ranks_choose_together_what_one_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = Hardware(rates=preset("h200-hgx"), nodes=[0, 0, 1, 1])
    ran = list[int]()
    run_on = PassModel.run_on
    monkeypatch.setattr(PassModel, "run_on", lambda one, *given: ran.append(1) or run_on(one, *given))

    def plan(group: Any) -> Plan:
        return make_plan(4096, group=group, hardware=hardware, call=CALL)

    with local_world(4) as ranks:
        plans = ranks.run(plan)
        together = len(ran)
    alone = replace(plans[0].planner)
    ran.clear()
    chosen = alone.choose(4096, mask=Mask(), strategy=Strategy(), rank=0, world=4)
    layouts = {each.layout for each in plans}
    assert layouts == {chosen.layout.name}
    shape = alone.call_shape
    assert shape is not None
    found = {each.planner.choose_call(each.schedule, shape) for each in plans}
    assert found == {alone.choose_call(chosen, shape)}
    assert together < 2 * len(ran)  # by 4 ranks, which would need 4 times as many if each simulated all


@pytest.mark.parametrize("where", ["bound", "first", "later", "last"])
def test_a_rank_that_cannot_simulate_is_named(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    failing = threading.local()
    owner, name = {
        "bound": (PassModel, "computing"),
        "first": (PassModel, "run_on"),  # of the first candidate, which every rank simulates
        "later": (PassModel, "run_on"),
        "last": (planner_module, "least_regret"),  # after all simulations
    }[where]
    works = getattr(owner, name)

    def fails(one: Any, *given: Any) -> Any:
        if failing.here and (where != "later" or one.groups.query > 1):
            raise MemoryError("no room")
        return works(one, *given)

    monkeypatch.setattr(owner, name, fails)

    def plan(group: Any) -> str:
        failing.here = group.rank() == 2
        with pytest.raises((PeerError, MemoryError)) as caught:
            make_plan(4096, group=group, hardware=Hardware(rates=SLOW, nodes=[0, 1, 2, 3]), call=CALL)
        return f"{caught.type.__name__}: {caught.value}"

    with local_world(4) as ranks:
        reported = ranks.run(plan)
    assert reported[2] == "MemoryError: no room"
    named = "PeerError: rank 2 failed before the call: make_plan: MemoryError: no room"
    assert reported[:2] + reported[3:] == [named] * 3


def test_ranks_that_choose_differently_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose arithmetic differs must not exchange shards of two layouts."""
    other, mask = threading.local(), Mask(cu_seqlens=[0, 1024, 2048, 3072, 4096])

    def chosen(found: Any) -> int:
        return 0 if other.here else least_regret(found)

    monkeypatch.setattr(planner_module, "least_regret", chosen)

    def plan(group: Any) -> Plan:
        other.here = group.rank() == 1
        return make_plan(4096, mask=mask, group=group, hardware=Hardware(rates=SLOW, nodes=[0, 1, 2, 3]), call=CALL)

    with local_world(4) as ranks, pytest.raises(WorkerError, match="layout: rank 1 has zigzag, ranks 0, 2, 3 have"):
        ranks.run(plan)


def test_links_are_a_guess_until_rank_0_has_given_or_measured_rates(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def guessed(group: Any, rates: str | None) -> bool:
        own = rates if group.rank() == 0 else "h200-hgx"
        return make_plan(256, group=group, hardware=Hardware(rates=own)).planner.guessed

    with local_world(2) as ranks:
        assert ranks.run(guessed, None) == [True] * 2 and ranks.run(guessed, "cpu") == [False] * 2
    write_rates(SLOW, user_file())
    with local_world(2) as ranks:
        assert ranks.run(guessed, None) == [False] * 2


def test_the_first_plan_over_several_nodes_measures_their_links_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, counted = Probe.rates, []
    monkeypatch.setattr(Probe, "rates", lambda *given: (counted.append(1), rates(*given))[1])

    def plans(group: Any) -> list[Any]:
        hardware = Hardware(nodes=[0, 0, 1, 1])
        first, second = (make_plan(256, group=group, hardware=hardware) for _ in range(2))
        own = make_plan(256, group=group, hardware=replace(hardware, rates="preset"))
        here = make_plan(256, group=group)
        return [(one.planner.rates, one.planner.guessed) for one in (first, second, own, here)]

    with local_world(4) as ranks:
        found = ranks.run(plans)
    assert len(counted) == 4, "once on each rank"
    (first, unsure), second, own, here = found[0]
    assert all(each == found[0] for each in found) and second == (first, False) and not unsure
    assert own == here == (preset("cpu"), True)  # threads share no link; "preset" measures nothing
    assert "kernels and links inside of a node and across nodes measured by make_plan in " in first.source
    assert first.across != preset("cpu").across
    thirds = math.log2(first.across.bytes_per_second) * 3
    assert thirds == pytest.approx(round(thirds))


def test_nodes_of_other_sizes_leave_the_network_a_guess() -> None:
    def plan(group: Any) -> Any:
        planner = make_plan(256, group=group, hardware=Hardware(nodes=[0, 0, 1])).planner
        return planner.guessed, planner.rates.inside, planner.rates.across

    with local_world(3) as ranks:
        assert ranks.run(plan) == [(True, preset("cpu").inside, preset("cpu").across)] * 3


def of_a_fresh_group(folder: str) -> tuple[Any, ...]:
    group, agreed = dist.new_group(list(range(dist.get_world_size()))), list[str]()
    agree, before = Agreement.agree, time.time()

    def counted(self: Agreement, call: str, *given: Any, **named: Any) -> list[Any]:
        agreed.append(call)
        return agree(self, call, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", folder)
        patch.setattr(Agreement, "agree", counted)
        drawn = torch.get_rng_state()
        first = make_plan(256, group=group)
        exchanges = len(agreed)
        second = make_plan(256, group=group)
        assert torch.equal(torch.get_rng_state(), drawn)  # what the user draws next does not change
    took = time.time() - before
    asked = make_plan(256, group=group, hardware=Hardware(rates="preset"))
    plans = [(plan.planner.rates, plan.planner.guessed) for plan in (first, second, asked)]
    return plans, first.explain(**SIZES), before, took, exchanges


def test_the_first_plan_on_one_node_measures_kernels_and_links(pools, tmp_path: Path) -> None:
    usual = preset("cpu")
    for world in (2, 4):
        found = pools(world).run(of_a_fresh_group, str(tmp_path))
        (first, unsure), second, asked = found[0][0]
        assert all(each[0] == found[0][0] for each in found)
        assert second == (first, False) and not unsure and asked == (usual, True)
        assert first.inside != usual.inside and first.across == usual.across
        assert (first.half, first.single) != (usual.half, usual.single)
        scaled = first.single.forward / usual.single.forward, first.double.forward / usual.double.forward
        assert scaled[0] == pytest.approx(scaled[1])
        cores = len(os.sched_getaffinity(0))
        assert first.overhead.at_once == (cores if cores < world else 0)
        assert first.measured_on == MeasuredOn(device="cpu", torch=torch.__version__.split("+")[0], ranks=world)
        assert all(each[4] <= 52 for each in found)  # each exchange takes a few latencies
        said = re.search(r"kernels and links inside of a node measured by make_plan in (.+) s on (.+) UTC", found[0][1])
        assert said and 0 < float(said[1]) < found[0][3]
        at = datetime.strptime(said[2], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        assert found[0][2] - 1 <= at <= found[0][2] + found[0][3]


def rates_of_fresh_groups(folder: str) -> tuple[Any, ...]:
    """Return three groups' rates. Before the third, the file says that links are 50 times faster than they were."""
    made, link = partial(dist.new_group, list(range(dist.get_world_size()))), Link(latency=1e-5, bytes_per_second=1e9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", folder)
        patch.setattr(Probe, "links", lambda _: (link, None))  # whatever else runs on this machine
        first, second = (make_plan(256, group=made()).planner.rates for _ in range(2))
        if dist.get_rank() == 0 and (file := next(Path(folder).glob("*/*/*"), None)):
            faster = replace(first.inside, bytes_per_second=50 * first.inside.bytes_per_second)
            write_rates(replace(read_rates(file), inside=faster), file)
        return first, second, make_plan(256, group=made()).planner.rates


def test_a_later_group_plans_with_the_rates_that_an_earlier_one_kept(pools, tmp_path: Path) -> None:
    found = pools(2).run(rates_of_fresh_groups, str(tmp_path))
    first, second, third = found[0]
    (file,) = tmp_path.glob("*/*/*")
    assert found[1] == found[0] and second == first and f"kept in {file}" in first.source
    assert third.inside.bytes_per_second < 10 * first.inside.bytes_per_second  # other links: measured and kept again
    assert read_rates(file) == third
    file.write_text("inside = 1\n")
    again = pools(2).run(rates_of_fresh_groups, str(tmp_path))[0]
    assert again[0] == again[1] and read_rates(file) == again[2]


def test_rates_that_cannot_be_kept_are_used(pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for found in pools(2).run(rates_of_fresh_groups, str(tmp_path / "file")):
        assert all("not kept (" in rates.source and "Not a directory" in rates.source for rates in found)


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def rates_of_a_user_without_a_folder(why: str, own: bool) -> tuple[str, list[str]]:
    """Return where a new group's rates come from, and the warnings; ``own``: those of this rank alone."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        patch.setenv("XDG_CONFIG_HOME", "/" + 300 * "x" if why == "a name too long" else "")
        if why == "no home":
            patch.setattr(Path, "home", homeless)
        if own:
            source = make_plan(256).planner.rates.source
        else:
            group = dist.new_group(list(range(dist.get_world_size())))
            source = make_plan(256, group=group).planner.rates.source
    return source, [str(each.message) for each in seen]


@pytest.mark.parametrize("why", ["a name too long", "no home"])
def test_without_a_folder_the_first_plan_measures(pools, why: str) -> None:
    text = {"a name too long": "File name too long", "no home": "home directory"}[why]
    (source, warned), (other, nothing) = pools(2).run(rates_of_a_user_without_a_folder, why, False)
    assert source == other and "measured by make_plan" in source and "not kept (" in source and text in source
    assert not nothing and len(warned) == 1 and "no rates of burst calibrate are used: " in warned[0]
    source, _ = rates_of_a_user_without_a_folder(why, True)
    assert source == preset("cpu").source


def test_a_given_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    write_rates(replace(SLOW, measured_on=MeasuredOn(device="cpu", torch="1.0", ranks=2)), path)
    reported = refused(lambda rank: {"hardware": Hardware(rates=None if rank else path)})
    assert all("other.toml' holds torch 1.0, and this run has torch" in text for text in reported)
    read = read_rates(path)
    with local_world(2) as ranks:
        plans = ranks.run(lambda group: make_plan(64, group=group, hardware=Hardware(rates=read)))
    assert plans[0].planner.rates == read


def test_a_file_of_another_machine_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def plan(group: Any) -> Rates:
        return make_plan(256, group=group).planner.rates

    ours = MeasuredOn(device="cpu", torch=torch.__version__.split("+")[0], ranks=2)
    for changed, reason in (
        ({}, ""),
        ({"ranks": 4}, "ranks 4, and this run has ranks 2"),
        ({"torch": "1.0"}, "torch 1.0, and this run has torch"),
        ({"device": "NVIDIA H100"}, "device NVIDIA H100, and this run has device cpu"),
    ):
        write_rates(replace(SLOW, measured_on=replace(ours, **changed)), user_file())
        with warnings.catch_warnings(record=True) as heard, local_world(2) as ranks:
            warnings.simplefilter("always")
            rates = ranks.run(plan)[0]
        said = [str(each.message) for each in heard if "rates.toml" in str(each.message)]
        assert [reason in one for one in said] == [True] * bool(reason)  # rank 0 alone
        assert (rates == preset("cpu")) == bool(reason)


@pytest.mark.parametrize(
    ("world", "mask", "rates"),
    [(2, Mask(), SLOW), (3, Mask(window=29), preset("h100-hgx")), (4, Mask(cu_seqlens=[0, 40, 41, 150]), SLOW)],
)
def test_what_is_chosen_is_right(world: int, mask: Mask, rates: Rates) -> None:
    def failures(group: Any) -> list[str]:
        hardware, call = Hardware(rates=rates, nodes=list(range(group.size()))), replace(CALL, dtype=torch.float64)
        plan = make_plan(150, mask=mask, group=group, call=call, hardware=hardware)
        rows = compare(Case(seqlen=150, mask=mask, dtype=torch.float64, **SIZES), plan)
        return [f"{row.tensor}: {row.error}" for row in rows if not row.passed]

    with local_world(world) as ranks:
        assert ranks.run(failures) == [[]] * world


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (lambda rank: {"circulate": ("query", "nearest")[rank]}, "circulate"),
        (lambda rank: {"nodes": [0, rank]}, "nodes"),
        (lambda rank: {"q_heads": 4 * (1 + rank), "head_dim": 8}, "call.q_heads: rank 0 has 4, rank 1 has 8"),
        (lambda rank: {"layout": ("auto", "zigzag")[rank]}, "layout"),
    ],
)
def test_ranks_that_ask_for_other_plans_are_named(options, reported: str) -> None:
    assert all(reported in text for text in refused(lambda rank: plan_options(**options(rank)), DisagreementError))


def refused(options: Callable[[int], dict[str, Any]], error: type[Exception] = ValueError) -> list[str]:
    """Return the error of each of two ranks."""

    def attempt(group: Any) -> str:
        with pytest.raises(error) as caught:
            make_plan(64, group=group, **options(group.rank()))
        return str(caught.value)

    with local_world(2) as ranks:
        return ranks.run(attempt)


def test_a_broken_file_on_rank_0_is_refused_on_all_ranks(tmp_path) -> None:
    (tmp_path / "rates.toml").write_text("half = 3")
    reported = refused(lambda rank: {"hardware": Hardware(rates=None if rank else tmp_path / "rates.toml")})
    assert all("rates.toml" in text for text in reported)


def test_rates_fit_the_record_by_which_ranks_agree() -> None:
    """With all else that a plan may ask: the longest mask, name of a host, and text of a source."""
    mask = Mask(window=10**9, cu_seqlens=range(0, 2**31, 2**21))

    def plan(group: Any) -> bool:
        for node, network in product(NODES, NETWORKS):
            rates = replace(preset(f"{node}+{network}"), source="s" * 5000, name="n" * 5000)
            options = plan_options(rates=rates, nodes=[0, 1], layout="zigzag-per-document")
            make_plan(mask.cu_seqlens[-1], mask=mask, group=group, call=CALL, **options)
        return True

    with local_world(2) as ranks:
        assert ranks.run(plan) == [True, True], RECORD_BYTES


def on_a_mesh_of_nodes() -> list[list[int] | None]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    half = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    found = [make_plan(64, hardware=Hardware(nodes=mesh)), make_plan(64, group=half, hardware=Hardware(nodes=mesh))]
    with pytest.raises(ValueError, match="axes"):
        make_plan(64, hardware=Hardware(nodes=mesh["node"]))
    return [list(plan.planner.nodes) for plan in found]


def test_nodes_are_given_by_a_mesh(pools) -> None:
    assert pools(4).run(on_a_mesh_of_nodes) == [[[0, 0, 1, 1], [0, 1]]] * 4


def test_what_is_measured_is_the_same_on_all_ranks_and_can_be_planned_by(pools) -> None:
    few = partial(calibrate, name="few", rows=64, repeats=1)
    first, second = pools(2).run(few)
    assert first == second == Rates.from_dict(first.as_dict())
    assert first.name == "few" and first.source.startswith("measured by burst calibrate on 2 ranks, cpu")
    assert "links across as estimated by cpu" in first.source
    assert first.across == preset("cpu").across != first.inside


def test_a_models_configuration_tells_of_its_calls() -> None:
    class Config:
        num_attention_heads, num_key_value_heads, hidden_size = 8, 2, 64

    class Model:
        config, dtype = Config(), torch.bfloat16

    assert call_shape(Model()) == CallShape(q_heads=8, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    Config.num_key_value_heads = 3  # no such call
    assert call_shape(Model()) == call_shape(object()) == CallShape()
