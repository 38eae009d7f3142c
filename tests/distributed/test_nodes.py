"""burst bench nodes: what crosses between nodes, by their interfaces' own counters."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from burst_bench.claims.nodes import CallOnNodes, Claim, claims, holds, measured

from tests.distributed.test_cluster import emulated

ROOT = Path(__file__).parents[2]


@emulated
@pytest.mark.slow
def test_a_claim_that_does_not_hold_is_reported() -> None:
    """The rest of the claims is in test_cluster.py, over a cluster that is there."""
    claim = claims(1024, 4096)[0]
    cut, plain = measured([claim, replace(claim, what="not so", ours=claim.plain)])
    assert cut["held"] and 0.45 < cut["share"] <= 0.55
    assert not plain["held"] and plain["share"] == pytest.approx(1.0, abs=0.02)


def test_no_share_of_nothing_is_reported() -> None:
    way = CallOnNodes(seq_len=64)
    nothing = Claim(what="", ours=way, plain=way, most=0.0)
    assert holds(nothing, {"payload": 0, "across": 9000, "share": 0.2})
    assert not holds(nothing, {"payload": 8, "across": 9000, "share": 0.2})
    assert not holds(nothing, {"payload": 0, "across": 1 << 20, "share": 0.2})


@emulated
@pytest.mark.slow
def test_the_command_records_every_claim_and_all_hold(tmp_path: Path) -> None:
    out = tmp_path / "nodes.json"
    command = [sys.executable, "-m", "burst_attention.cli", "bench", "nodes", "--json", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    recorded = json.loads(out.read_text())
    assert recorded["command"].startswith("burst bench nodes --seq-len 4096")
    assert [row["held"] for row in recorded["rows"]] == [True] * 4
    assert all(0 < row["error"] < 2e-2 for row in recorded["rows"])
