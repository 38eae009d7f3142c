"""``burst bench peers``: run other packages' attention and ours, check the results and count the bytes."""

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from burst_bench.harness.traffic_meter import TrafficMeter
from burst_bench.harness.workload import Workload
from burst_bench.peers import compare
from burst_bench.pool import WorkerPool

WORLD = 2
SIZE = Workload(seq_len=256, heads=4, kv_heads=4, head_dim=32)


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; see `burst bench peers`")


def compared(*given: Any, **options: Any) -> dict[str, compare.Outcome]:
    return {own.variant.name: own for own in compare.compare(WORLD, *given, **options)}


@pytest.mark.long
def test_every_variant_is_right_timed_and_sends_what_its_formula_says() -> None:
    need("ring_flash_attn", "yunchang")
    found = compared(SIZE, 2)
    assert found.pop("yunchang hybrid zigzag").refused == "needs at least 4 ranks, not 2"
    for name, own in found.items():
        assert own.correct, (name, own)
        assert len(own.seconds) == len(own.ratios) == 2, name
        assert set(own.errors) == {"out", "dq", "dk", "dv"}, name
        assert 0 < max(own.errors.values()) < 0.02, name
    pairs = zip(found["ring-flash-attn zigzag"].seconds, found["burst"].seconds, strict=True)
    assert found["ring-flash-attn zigzag"].ratios == [theirs / ours for theirs, ours in pairs]
    assert found["burst"].ratios == [1.0, 1.0]
    n = SIZE.seq_len // WORLD * SIZE.heads * SIZE.head_dim
    ring = 2 * n * (WORLD - 1) * 2 + 2 * n * (WORLD - 1) * 2 + 2 * n * WORLD * 4  # K, V twice; dK, dV in fp32
    for name in ("ring-flash-attn basic", "ring-flash-attn zigzag", "ring-flash-attn stripe", "yunchang zigzag"):
        assert found[name].bytes == [ring] * WORLD, name
    assert found["yunchang ulysses"].bytes == [8 * n * 2 * (WORLD - 1) // WORLD] * WORLD
    assert sum(found["burst"].bytes) <= 0.6 * ring * WORLD


@pytest.mark.long
def test_a_wrong_result_gets_no_time() -> None:
    need("ring_flash_attn")
    name = "ring-flash-attn zigzag"  # whose fp32 accumulators alias its buffers if the inputs are fp32
    found = compared(SIZE.at(256, dtype="float32"), 1, names=[name])
    wrong, ours = found[name], found["burst"]
    assert wrong.errors["dq"] > 0.05 > wrong.bounds["dq"]
    assert not wrong.correct and not wrong.seconds and not wrong.ratios
    assert ours.correct and len(ours.seconds) == 1
    console = compare.Console(record=True, width=130, file=io.StringIO())
    compare.show(console, [*found.values()], "")
    assert "WRONG" in console.export_text()


@pytest.mark.long
def test_what_is_not_installed_is_named(monkeypatch, capsys, tmp_path):
    """And ours is compared with PyTorch in one process all the same."""
    real = importlib.util.find_spec
    missing = ("ring_flash_attn", "yunchang")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name in missing else real(name))
    sizes = ["--seq-len", "256", "--heads", "4", "--head-dim", "32", "--rounds", "1"]
    compare.main([*sizes, "--json", str(tmp_path / "peers.json")])
    assert "not installed: pip install ring-flash-attn==" in capsys.readouterr().out
    for row in json.loads((tmp_path / "peers.json").read_text())["rows"]:
        theirs = row["name"].startswith(("ring-", "yunchang"))
        assert row["correct"] != theirs and (row["refused"] or "").startswith("not installed: pip") == theirs
        assert len(row["seconds"]) == (not theirs) and (row["version"] is None) == theirs


@pytest.mark.parametrize(("world", "names", "reported"), [(1, None, "world=1"), (2, ["unknown"], "names has")])
def test_arguments_are_refused_by_name(world: int, names: Any, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        compare.compare(world, SIZE, 0, names=names)


def move_and_count() -> dict[str, tuple[int, int]]:
    """For each kind of traffic: the meter's count and what the process wrote into its sockets."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, rows = torch.zeros(world, 1 << 18), [torch.empty(1 << 18) for _ in range(world)]

    def ring() -> None:
        operations = [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, x + 1, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    kinds = {
        "point to point": ring,
        "all to all": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "all gather": lambda: dist.all_gather(rows, x[0].contiguous()),
    }
    counts = {}
    for kind, move in kinds.items():
        dist.barrier()
        before = written()
        with TrafficMeter() as meter:
            move()
        dist.barrier()  # all is written: gloo's ranks leave it after their peers came
        counts[kind] = meter.sent, written() - before
    with TrafficMeter() as meter:
        dist.all_reduce(torch.zeros(4))
    counts["all reduce"] = meter.sent, 0
    return counts


def written() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads /proc/self/io, which only Linux has")
@pytest.mark.long
def test_the_meter_counts_what_the_sockets_carry() -> None:
    with WorkerPool(3) as pool:
        for counts in pool.run(move_and_count):
            assert counts.pop("all reduce")[0] is None, "what can't be counted isn't guessed"
            for kind, (counted, carried) in counts.items():
                assert counted <= carried <= counted * 1.001 + 4096, (kind, counted, carried)
