"""Bytes that leave nodes, by their interfaces' own counters: two emulated nodes with two ranks each, bf16, D = 128.

Each way to compute a call, forward and backward, is held against heads that nobody cuts, a zigzag layout and direct
messages; before it is counted its results are compared with those of PyTorch's own attention, in fp32. In what an
interface counts are the headers of packets and the records by which ranks agree. Needs root and iproute2.

    python benchmarks/nodes.py [--seq-len 4096] [--window-len 16384] [--json docs/results/nodes.json]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from burst_train.engines.whole import whole_attention
from rich.console import Console
from torch import Tensor

from burst_attention import Mask, Plan, burst_attention, make_plan
from burst_attention.attention.plan import lone_plan
from burst_attention.planner.choice import HeadsOrAuto, KeepOrAuto
from burst_attention.testing import WorkerPool

from ..arguments import asked
from ..cluster import INTERFACE, Cluster, ClusterError
from ..cluster.namespaces import interface_bytes
from ..harness.calls import errors_over_ranks
from ..harness.origin import origin
from ..harness.results import write_json
from ..harness.workload import Workload, random_qkv
from ..tables import terminal
from ..texts import bytes_text

NODES, RANKS, DIM = 2, 2, 128
BOUND = 2e-2  # relative L2 of bf16 results
RATES = "cpu+ethernet-25g"  # what is left open is the same whatever this machine does
RECORDS = 1 << 16  # bytes of agreements and barriers, at most, where nothing else crosses


@dataclass(frozen=True, kw_only=True)
class Arguments:
    seq_len: int = 4096
    window_len: int = 16384
    """Tokens of the call with a window, which is a sixteenth of them."""
    json: Path | None = None
    """Also write the figures to this file."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A call, and how it is planned; what is not said is left to the planner."""

    seq_len: int
    heads: int = 4
    kv_heads: int = 4
    mask: Mask = field(default_factory=Mask)
    layout: str = "zigzag"
    route: str = "direct"
    cut: HeadsOrAuto = 1
    keep: KeepOrAuto = "auto"
    travels: str = "auto"

    def plan(self) -> Plan:
        sizes = {"q_heads": self.heads, "kv_heads": self.kv_heads, "head_dim": DIM, "dtype": torch.bfloat16}
        options = {"mask": self.mask, "layout": self.layout, "route": self.route, "heads": self.cut, "keep": self.keep}
        return make_plan(self.seq_len, **options, **sizes, assignment=self.travels, rates=RATES)

    @property
    def workload(self) -> Workload:
        return Workload(seq_len=self.seq_len, heads=self.heads, kv_heads=self.kv_heads, head_dim=DIM)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """``ours`` sends no more than ``most`` times what ``plain`` does from node to node; 0: nothing but records."""

    what: str
    ours: Way
    plain: Way
    most: float


def claims(seq_len: int, window_len: int) -> list[Claim]:
    """At these lengths."""
    plain, one = Way(seq_len=seq_len), Way(seq_len=seq_len, kv_heads=1)
    long, few = Way(seq_len=window_len, heads=2, kv_heads=2), {"heads": 2, "kv_heads": 2}
    cube = Way(seq_len=seq_len, cut=RANKS, keep=True, travels="query")
    left = {"layout": "auto", "route": "auto", "cut": "auto"}
    window = Way(seq_len=window_len, **few, mask=Mask(window=window_len // 16), **left)
    share = seq_len // (NODES * RANKS)
    documents = Mask(cu_seqlens=[n * share // 2 for n in range(2 * NODES * RANKS + 1)])
    packed = Way(seq_len=seq_len, mask=documents, layout="balanced", route="auto", cut="auto")
    return [
        Claim(what="heads cut inside of nodes", ours=cube, plain=plain, most=0.55),
        Claim(
            what="one key-value head, to each node once",
            ours=Way(seq_len=seq_len, kv_heads=1, route="nodes"),
            plain=one,
            most=0.6,
        ),
        Claim(what="a window, a sixteenth of the sequence, as planned", ours=window, plain=long, most=0.15),
        Claim(what="documents that fit a rank, balanced", ours=packed, plain=plain, most=0.0),
    ]


@cache
def ready(way: Way) -> tuple[Plan, list[Tensor]]:
    """On a rank: the plan, and this rank's q, k, v and dout."""
    plan = way.plan()
    return plan, random_qkv(way.workload, plan.positions)


def results(way: Way) -> list[Tensor]:
    """On a rank: out, dq, dk and dv of one call."""
    plan, inputs = ready(way)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = burst_attention(q, k, v, plan)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def errors(way: Way) -> list[float]:
    """On a rank: relative L2 over all ranks of each result, against PyTorch's own attention in fp32."""
    plan, _ = ready(way)
    q, k, v, dout = (x.float() for x in random_qkv(way.workload))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = whole_attention(q, k, v, lone_plan(way.seq_len, mask=way.mask))
    right = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    return errors_over_ranks(results(way), [x.index_select(2, plan.positions) for x in right])


def crossed(way: Way) -> tuple[int, int]:
    """On a rank, of one call: bytes that left its node, from any of its ranks, and those that this rank sent to all."""
    plan, _ = ready(way)
    results(way)  # gloo connects at the first message
    dist.barrier()
    before, sent = _left(), plan.transport.sent
    dist.barrier()
    results(way)
    sent = plan.transport.sent - sent
    dist.barrier()
    return _left() - before, sent


def _left() -> int:
    return interface_bytes(Path("/proc/thread-self/net/dev").read_text())[INTERFACE][1]


def count(pool: WorkerPool, way: Way) -> tuple[int, int]:
    """Bytes from node to node, and payload from rank to rank."""
    by_rank = pool.run(crossed, way, timeout=600)
    return sum(left for left, _ in by_rank[::RANKS]), sum(sent for _, sent in by_rank)


def measured(claimed: Sequence[Claim]) -> list[dict[str, Any]]:
    """A row for each."""
    rows = []
    with Cluster(NODES, RANKS) as network, WorkerPool(network.world, entries=network.entries(), timeout=600) as pool:
        for claim in claimed:
            error = max(pool.run(errors, claim.ours, timeout=600)[0])
            row: dict[str, Any] = {"what": claim.what, "seq_len": claim.ours.seq_len, "most": claim.most}
            row |= {"q_heads": claim.ours.heads, "kv_heads": claim.ours.kv_heads, "error": error}
            if error <= BOUND:  # what is wrong gets no figures
                row["across"], row["payload"] = count(pool, claim.ours)
                row["plain"], _ = count(pool, claim.plain)
                row["share"] = row["across"] / row["plain"]
                row["held"] = holds(claim, row)
            rows.append(row)
    return rows


def holds(claim: Claim, row: dict[str, Any]) -> bool:
    """Of nothing no share can be told, for records cross: then there must be no payload, and few of those."""
    if not claim.most:
        return row["payload"] == 0 and row["across"] <= RECORDS
    return row["share"] <= claim.most


def main() -> None:
    a = asked(Arguments(), __doc__)
    try:
        rows = measured(claims(a.seq_len, a.window_len))
    except ClusterError as error:
        raise SystemExit(f"nodes.py: {error}") from None
    lines = (
        {
            "what": row["what"],
            "tokens": f"{row['seq_len']:,}",
            "across nodes": bytes_text(row.get("across")),
            "plain": bytes_text(row.get("plain")),
            "share": f"{row['share']:.3f}" if "share" in row else "WRONG",
            "at most": f"{row['most']:.2f}",
            "held": "yes" if row.get("held") else "NO",
        }
        for row in rows
    )
    title = (
        f"{NODES} nodes x {RANKS} ranks, D={DIM}, bf16, forward and backward; plain: zigzag, heads=1, direct, causal"
    )
    Console(width=140).print(terminal(lines, title=title))
    if a.json is not None:
        command = f"python benchmarks/nodes.py --seq-len {a.seq_len} --window-len {a.window_len}"
        write_json(a.json, {"cluster": [NODES, RANKS], "head_dim": DIM, "rows": rows} | origin(command))
