"""How far one call is from fp64 over the whole sequence, for tables of error against world size."""

from __future__ import annotations

import math
from typing import Any

from burst_attention.attention.plan import make_plan
from burst_attention.testing.check import Case, distributed_call, relative_l2
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
