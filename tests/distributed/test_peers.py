"""``burst bench peers``: run other packages' attention and ours, check the results and count the bytes."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from burst_bench.harness.traffic_meter import TrafficMeter
from burst_bench.harness.workload import Workload
from burst_bench.peers import compare

from burst_attention.comm.dissemination import FORM
from burst_attention.testing import WorkerPool

WORLD = 2
SIZE = Workload(seq_len=256, heads=4, kv_heads=4, head_dim=32)


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    return compare


@pytest.fixture(scope="module")
def rows(peers: ModuleType) -> dict[str, dict[str, Any]]:
    need("ring_flash_attn", "yunchang", "ring_attention_pytorch")
    return {row["name"]: row for row in peers.compare(WORLD, SIZE, 2)}


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; pip install -e '.[peers]'")


def test_every_variant_is_right_and_timed(rows: dict[str, dict[str, Any]]) -> None:
    assert rows.pop("yunchang hybrid zigzag")["refused"] == "needs at least 4 ranks, not 2"
    for name, row in rows.items():
        assert row["correct"], (name, row)
        assert len(row["seconds"]) == len(row["ratios"]) == 2, name
        assert set(row["errors"]) == ({"out"} if row["passes"] == "forward" else {"out", "dq", "dk", "dv"}), name
        assert 0 < max(row["errors"].values()) < 0.02, name
    for name in ("burst", "burst, forward only"):
        assert rows[name]["ratios"] == [1.0, 1.0]
    pairs = zip(rows["ring-flash-attn zigzag"]["seconds"], rows["burst"]["seconds"], strict=True)
    assert rows["ring-flash-attn zigzag"]["ratios"] == [theirs / ours for theirs, ours in pairs]


def test_bytes_are_those_of_the_closed_formulas(rows: dict[str, dict[str, Any]]) -> None:
    world, n = WORLD, SIZE.seq_len // WORLD * SIZE.heads * SIZE.head_dim
    ring = 2 * n * (world - 1) * 2 + 2 * n * (world - 1) * 2 + 2 * n * world * 4  # K, V twice; dK, dV in fp32
    for name in ("ring-flash-attn basic", "ring-flash-attn zigzag", "ring-flash-attn stripe", "yunchang zigzag"):
        assert rows[name]["bytes"] == [ring] * world, name
    assert rows["yunchang ulysses"]["bytes"] == [8 * n * 2 * (world - 1) // world] * world
    burst = rows["burst"]
    records = 2 * (world - 1).bit_length() * FORM.size  # agreement on the call and on its backward
    assert burst["bytes"] == [count + records for count in burst["transport_bytes"]]
    assert sum(burst["transport_bytes"]) <= 0.6 * ring * world


def test_a_wrong_result_gets_no_time(peers: ModuleType) -> None:
    need("ring_flash_attn")
    name = "ring-flash-attn zigzag"  # whose fp32 accumulators alias its buffers if the inputs are fp32
    rows = {row["name"]: row for row in peers.compare(WORLD, SIZE.at(256, dtype="float32"), 1, names=[name])}
    wrong, ours = rows[name], rows["burst"]
    assert wrong["errors"]["dq"] > 0.05 > wrong["bounds"]["dq"]
    assert not wrong["correct"]
    assert not wrong["seconds"]
    assert not wrong["ratios"]
    assert ours["correct"]
    assert len(ours["seconds"]) == 1
    console = peers.Console(record=True, width=130, file=io.StringIO())
    peers.show(console, list(rows.values()), "")
    assert "WRONG" in console.export_text()


@pytest.mark.long
def test_what_is_not_installed_is_named(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    missing = ("ring_flash_attn", "yunchang", "ring_attention_pytorch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name in missing else real(name))
    rows = peers.compare(WORLD, SIZE, 0)
    for row in rows:
        if row["package"] in ("burst_attention", "torch"):
            assert row["correct"], row
        else:
            assert row["refused"].startswith(f"not installed: pip install {row['package'].replace('_', '-')}=="), row


@pytest.mark.parametrize(("world", "names", "reported"), [(1, None, "world=1"), (2, ["unknown"], "names has")])
def test_arguments_are_refused_by_name(peers: ModuleType, world: int, names: Any, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        peers.compare(world, SIZE, 0, names=names)


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
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.long
def test_the_meter_counts_what_the_sockets_carry(world: int) -> None:
    with WorkerPool(world) as pool:
        for counts in pool.run(move_and_count):
            assert counts.pop("all reduce")[0] is None, "what can't be counted isn't guessed"
            for kind, (counted, carried) in counts.items():
                assert counted <= carried <= counted * 1.001 + 4096, (kind, counted, carried)
