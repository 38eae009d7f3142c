"""Count bytes that leave nodes, by the counters of their interfaces.

The cluster is emulated: two nodes with two ranks each, bf16, D = 128. Each strategy is compared with whole heads, a
zigzag layout and direct messages, forward and backward. Before bytes are counted, its results are compared with
PyTorch's own attention in fp32. An interface also counts packet headers and the agreements' records. Needs root and
iproute2.

    burst bench nodes [--seq-len 4096] [--window-len 16384] [--json docs/results/nodes.json]"""

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

from burst_attention import CallShape, Hardware, Mask, Plan, Strategy, burst_attention, make_plan
from burst_attention.attention.new_plan import single_rank_plan
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
BOUND = 2e-2  # largest relative L2 error of bf16 results
RATES = "cpu+ethernet-25g"  # a preset, so that the planner's choices don't depend on this machine
RECORDS = 1 << 16  # most bytes of agreements and barriers, if nothing else crosses between nodes


@dataclass(frozen=True, kw_only=True)
class NodesArguments:
    seq_len: int = 4096
    window_len: int = 16384
    """Tokens of the call with a window; the window is a sixteenth of them."""
    json: Path | None = None
    """Also write the figures to this file."""


@dataclass(frozen=True, kw_only=True)
class CallOnNodes:
    """A call and its strategy; the planner chooses what the strategy leaves open."""

    seq_len: int
    heads: int = 4
    kv_heads: int = 4
    mask: Mask = field(default_factory=Mask)
    strategy: Strategy = field(default=Strategy(layout="zigzag", route="direct", ulysses_degree=1))

    def plan(self) -> Plan:
        call = CallShape(q_heads=self.heads, kv_heads=self.kv_heads, head_dim=DIM, dtype=torch.bfloat16)
        options: Any = {"strategy": self.strategy, "call": call, "hardware": Hardware(rates=RATES)}
        return make_plan(self.seq_len, mask=self.mask, **options)

    @property
    def workload(self) -> Workload:
        return Workload(seq_len=self.seq_len, heads=self.heads, kv_heads=self.kv_heads, head_dim=DIM)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A bound on the bytes between nodes.

    ``ours`` sends at most ``most`` times the bytes of ``plain``. With ``most`` 0 it sends only records.
    """

    what: str
    ours: CallOnNodes
    plain: CallOnNodes
    most: float


def claims(seq_len: int, window_len: int) -> list[Claim]:
    """Return the claims at these lengths."""
    plain, one = CallOnNodes(seq_len=seq_len), CallOnNodes(seq_len=seq_len, kv_heads=1)
    long, few = CallOnNodes(seq_len=window_len, heads=2, kv_heads=2), {"heads": 2, "kv_heads": 2}
    cached = Strategy(layout="zigzag", route="direct", ulysses_degree=RANKS, cache_qkv=True, circulate="query")
    cube = CallOnNodes(seq_len=seq_len, strategy=cached)
    window = CallOnNodes(seq_len=window_len, **few, mask=Mask(window=window_len // 16), strategy=Strategy())
    share = seq_len // (NODES * RANKS)
    documents = Mask(cu_seqlens=[n * share // 2 for n in range(2 * NODES * RANKS + 1)])
    packed = CallOnNodes(seq_len=seq_len, mask=documents, strategy=Strategy(layout="balanced"))
    return [
        Claim(what="heads cut inside of nodes", ours=cube, plain=plain, most=0.55),
        Claim(
            what="one key-value head, to each node once",
            ours=CallOnNodes(
                seq_len=seq_len, kv_heads=1, strategy=Strategy(layout="zigzag", route="nodes", ulysses_degree=1)
            ),
            plain=one,
            most=0.6,
        ),
        Claim(what="a window, a sixteenth of the sequence, as planned", ours=window, plain=long, most=0.15),
        Claim(what="documents that fit a rank, balanced", ours=packed, plain=plain, most=0.0),
    ]


@cache
def ready(way: CallOnNodes) -> tuple[Plan, list[Tensor]]:
    """Run on a rank: return the plan and this rank's q, k, v and dout."""
    plan = way.plan()
    return plan, random_qkv(way.workload, plan.positions)


def results(way: CallOnNodes) -> list[Tensor]:
    """Run on a rank: return out, dq, dk and dv of one call."""
    plan, inputs = ready(way)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = burst_attention(q, k, v, plan)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def errors(way: CallOnNodes) -> list[float]:
    """Run on a rank: return each result's relative L2 error over all ranks.

    The reference is PyTorch's own attention in fp32.
    """
    plan, _ = ready(way)
    q, k, v, dout = (x.float() for x in random_qkv(way.workload))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = whole_attention(q, k, v, single_rank_plan(way.seq_len, mask=way.mask))
    right = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    return errors_over_ranks(results(way), [x.index_select(2, plan.positions) for x in right])


def crossed(way: CallOnNodes) -> tuple[int, int]:
    """Run on a rank: return (bytes that left its node, bytes that this rank sent) in one call.

    The first count includes all ranks of the node; the second includes messages within the node.
    """
    plan, _ = ready(way)
    results(way)  # gloo connects when it sends the first message
    dist.barrier()
    before, sent = _left(), plan.transport.sent
    dist.barrier()
    results(way)
    sent = plan.transport.sent - sent
    dist.barrier()
    return _left() - before, sent


def _left() -> int:
    return interface_bytes(Path("/proc/thread-self/net/dev").read_text())[INTERFACE][1]


def count(pool: WorkerPool, way: CallOnNodes) -> tuple[int, int]:
    """Return (bytes between nodes, payload between ranks) of one call."""
    by_rank = pool.run(crossed, way, timeout=600)
    return sum(left for left, _ in by_rank[::RANKS]), sum(sent for _, sent in by_rank)


def measured(claimed: Sequence[Claim]) -> list[dict[str, Any]]:
    """Measure each claim, and return its row."""
    rows = []
    with Cluster(NODES, RANKS) as network, WorkerPool(network.world, entries=network.entries(), timeout=600) as pool:
        for claim in claimed:
            error = max(pool.run(errors, claim.ours, timeout=600)[0])
            row: dict[str, Any] = {"what": claim.what, "seq_len": claim.ours.seq_len, "most": claim.most}
            row |= {"q_heads": claim.ours.heads, "kv_heads": claim.ours.kv_heads, "error": error}
            if error <= BOUND:  # wrong results get no figures
                row["across"], row["payload"] = count(pool, claim.ours)
                row["plain"], _ = count(pool, claim.plain)
                row["share"] = row["across"] / row["plain"]
                row["held"] = holds(claim, row)
            rows.append(row)
    return rows


def holds(claim: Claim, row: dict[str, Any]) -> bool:
    """Return whether a claim holds. A claim of 0 allows no payload and few records; records always cross."""
    if not claim.most:
        return row["payload"] == 0 and row["across"] <= RECORDS
    return row["share"] <= claim.most


def main(arguments: list[str]) -> None:
    a = asked(NodesArguments(), __doc__, "burst bench nodes", arguments)
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
        command = f"burst bench nodes --seq-len {a.seq_len} --window-len {a.window_len}"
        write_json(a.json, {"cluster": [NODES, RANKS], "head_dim": DIM, "rows": rows} | origin(command))
