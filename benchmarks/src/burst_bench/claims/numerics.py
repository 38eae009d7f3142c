"""Measure errors against fp64 by kernel and world size; they must not grow with the world size.

Errors are relative L2 over the whole sequence and all ranks. The first row of each dtype is PyTorch's own kernel on one
device. docs/numerics.md lists the bounds.

    burst bench numerics [--seq-len 1024] [--worlds 1 2 4 8] [--dtypes bfloat16 float32]
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Literal

import torch
import tyro
from rich.console import Console

from burst_attention import Mask
from burst_attention.attention.new_plan import make_plan
from burst_attention.testing import Case, WorkerPool
from burst_attention.testing.check import distributed_call, relative_l2
from burst_attention.testing.oracle import attend, torch_attention

from ..harness.calls import NAMES, errors_over_ranks
from ..tables import terminal


def relative_errors(case: Case) -> dict[str, float]:
    """Return the relative L2 errors of out, dq, dk and dv over all ranks.

    All ranks must call it, and get the same figures.
    """
    plan = make_plan(case.seqlen, mask=case.mask, strategy=case.strategy)
    inputs = case.inputs()
    actual = dict(distributed_call(case, plan, inputs).items())
    dlse = inputs["dlse"] if case.dlse else None
    oracle = attend(inputs["q"], inputs["k"], inputs["v"], plan.mask, dout=inputs["dout"], dlse=dlse)
    expected = {name: plan.shard(x, 2) for name, x in oracle.items()}
    errors = errors_over_ranks([actual[name] for name in NAMES], [expected[name] for name in NAMES])
    return dict(zip(NAMES, errors, strict=True))


def stock_errors(case: Case) -> dict[str, float]:
    """Return the same errors of PyTorch's own kernel on one device, in the case's dtype.

    Its lse gets no gradient.
    """
    inputs = case.inputs()
    arguments = inputs["q"], inputs["k"], inputs["v"], case.mask
    theirs = dict(torch_attention(*arguments, dout=inputs["dout"]).items())
    expected = dict(attend(*arguments, dout=inputs["dout"]).items())
    return {name: relative_l2(theirs[name], expected[name]) for name in NAMES}


def run(
    *,
    seq_len: int = 1024,
    worlds: tuple[int, ...] = (1, 2, 4, 8),
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
    circulate: tuple[str, ...] = ("query", "key-value"),
    mask: Literal["causal", "full"] = "causal",
) -> None:
    """Compute the errors, and print the tables."""
    base = {"seqlen": seq_len, "mask": Mask(causal=mask == "causal"), "q_heads": 8, "kv_heads": 8}
    shape = base | {"head_dim": 64, "dlse": False}
    with ExitStack() as stack:
        pools = {world: stack.enter_context(WorkerPool(world)) for world in worlds}
        for dtype in dtypes:
            case = Case(**shape, dtype=getattr(torch, dtype))
            rows = [{"kernel": "torch, one device", "circulate": "", "world": "1"} | _cells(stock_errors(case))]
            for kernel, side, (world, pool) in product(("reference", "aten", "aten-fp32"), circulate, pools.items()):
                errors = pool.run(relative_errors, replace(case, kernel=kernel, circulate=side))[0]
                rows.append({"kernel": kernel, "circulate": side, "world": str(world)} | _cells(errors))
            Console().print(terminal(rows, title=f"{dtype}, {mask}, S={seq_len}"))


def _cells(errors: dict[str, float]) -> dict[str, str]:
    return {name: f"{error:.2e}" for name, error in errors.items()}


def main(arguments: list[str]) -> None:
    tyro.cli(run, prog="burst bench numerics", description=__doc__, args=arguments)
