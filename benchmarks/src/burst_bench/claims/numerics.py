"""Error against fp64 by kernel and world size: it must not grow with the world.

Relative L2 over the whole sequence, all ranks together; the first row of each dtype is PyTorch's own kernel on one
device. docs/numerics.md says what the bounds are.

    python benchmarks/numerics.py [--seq-len 1024] [--worlds 1 2 4 8] [--dtypes bfloat16 float32]
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from burst_attention import Mask
from burst_attention.attention.plan import make_plan
from burst_attention.testing import Case, WorkerPool
from burst_attention.testing.check import distributed_call, relative_l2
from burst_attention.testing.oracle import attend, torch_attention


def relative_errors(case: Case, *, group: Any = None) -> dict[str, float]:
    """Relative L2 error of out, dq, dk and dv over all ranks; every rank must call it and gets the same figures."""
    plan = make_plan(case.seqlen, mask=case.mask, layout=case.layout, route=case.route, group=group)
    inputs = case.inputs()
    actual = dict(distributed_call(case, plan, inputs).items())
    dlse = inputs["dlse"] if case.dlse else None
    oracle = attend(inputs["q"], inputs["k"], inputs["v"], plan.mask, dout=inputs["dout"], dlse=dlse)
    expected = dict(oracle.items())
    names = ("out", "dq", "dk", "dv")
    squares = [(actual[name].double() - plan.shard(expected[name], 2)).square().sum().item() for name in names]
    totals = [math.fsum(column) for column in zip(*plan.exchange_small(squares), strict=True)]
    sizes = (expected[name].norm().item() for name in names)
    return {name: math.sqrt(total) / size for name, total, size in zip(names, totals, sizes, strict=True)}


def stock_errors(case: Case) -> dict[str, float]:
    """The same of PyTorch's own kernel on one device, in the case's dtype; the lse gets no gradient there."""
    inputs = case.inputs()
    arguments = inputs["q"], inputs["k"], inputs["v"], case.mask
    theirs = dict(torch_attention(*arguments, dout=inputs["dout"]).items())
    expected = dict(attend(*arguments, dout=inputs["dout"]).items())
    return {name: relative_l2(theirs[name], expected[name]) for name in ("out", "dq", "dk", "dv")}


def run(
    *,
    seq_len: int = 1024,
    worlds: tuple[int, ...] = (1, 2, 4, 8),
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
    travels: tuple[str, ...] = ("query", "key-value"),
    mask: Literal["causal", "full"] = "causal",
) -> None:
    """Compute and print."""
    base = {"seqlen": seq_len, "mask": Mask(causal=mask == "causal"), "q_heads": 8, "kv_heads": 8}
    shape = base | {"head_dim": 64, "dlse": False}
    console = Console()
    pools = {world: WorkerPool(world) for world in worlds}
    for dtype in dtypes:
        table = Table("kernel", "travels", "world", "out", "dq", "dk", "dv", title=f"{dtype}, {mask}, S={seq_len}")
        case = Case(**shape, dtype=getattr(torch, dtype))
        table.add_row("torch, one device", "", "1", *(f"{x:.2e}" for x in stock_errors(case).values()))
        for kernel in ("reference", "aten", "aten-fp32"):
            for side in travels:
                for world, pool in pools.items():
                    case = Case(**shape, dtype=getattr(torch, dtype), kernel=kernel, travels=side)
                    errors = pool.run(relative_errors, case)[0]
                    table.add_row(kernel, side, str(world), *(f"{x:.2e}" for x in errors.values()))
        console.print(table)
    for pool in pools.values():
        pool.close()


def main() -> None:
    tyro.cli(run, description=__doc__)
