"""Distributed calls against the fp64 oracle, on every rank, gradients included."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from burst_attention import Mask, Plan, Strategy, burst_attention, make_plan
from burst_attention.attention.passes import Backward, Forward
from burst_attention.attention.sweep import sweep
from burst_attention.kernels import choose
from burst_attention.plan.assignment import heads
from burst_attention.plan.cost import Shape
from burst_attention.plan.groups import WHOLE, Groups
from burst_attention.plan.program import Program
from burst_attention.plan.route import ROUTES
from burst_attention.plan.rows import Direction, Side
from burst_attention.plan.schedule import Schedule
from burst_attention.planner.planner import Planner
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import Link
from burst_attention.testing import Case, attend, check
from burst_attention.testing.check import compare, relative_l2
from tests.support.pairwise import covering_array
from tests.support.schedules import assigned, bytes_moved, make_schedule
from tests.unit.test_plan import masks

SEQLEN = 150  # divisible by 2 and 3 worlds, ragged over 4 and 8
MASKS = {
    "full": Mask(causal=False),
    "causal": Mask(),
    "window": Mask(window=29),
    "window both ways": Mask(causal=False, window=23, cu_seqlens=[0, 97, SEQLEN]),
    "documents": Mask(cu_seqlens=[0, 40, 40, 41, 100, SEQLEN]),
    "prefix": Mask(prefix=33),
    "window in documents": Mask(window=21, cu_seqlens=[0, 70, 99, SEQLEN]),
    "together": Mask(
        window=19, cu_seqlens=[0, 40, SEQLEN], together=[n // 3 % 5 - n % 29 // 20 for n in range(SEQLEN)]
    ),
    "blocks": Mask(blocks=[[(3 * i + j) % 4 < 2 for j in range(10)] for i in range(10)], block=16),
}
FACTORS = {
    "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    "mask": list(MASKS),
    "groups": [1, 4, 8],
    "layout": ["contiguous", "zigzag", "zigzag-by-halves", "striped", "zigzag-per-document", "balanced"],
    "circulate": ["query", "key-value", "nearest", "blocks"],
    "route": ["direct", "ring"],
    "kernel": ["reference", "aten", "aten-fp32"],
}


def case_of(row: dict) -> Case:
    options = {name: row[name] for name in ("dtype", "layout", "circulate", "route", "kernel")}
    heads = {"q_heads": 8, "kv_heads": 8 // row["groups"], "head_dim": 16}
    return Case(seqlen=SEQLEN, mask=MASKS[row["mask"]], **options, **heads)


def failures(cases: list[Case]) -> list[str]:
    """On a rank: what went wrong, in words."""
    found = []
    for case in cases:
        report = check(case)
        assert {row.rank for row in report.rows} == set(range(dist.get_world_size()))
        assert {row.tensor for row in report.rows} == {"out", "lse", "dq", "dk", "dv", *["dsinks"] * case.sinks}
        found += [f"{report.title}: {row}" for row in report.rows if not row.passed]
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_two_values_meet(pools, world: int) -> None:
    cases = [case_of(row) for row in covering_array(FACTORS, seed=world)]
    for found in pools(world).run(failures, cases):
        assert not found, "\n".join(found)


@pytest.mark.long
def test_eight_ranks(pools) -> None:
    rows = covering_array({name: FACTORS[name] for name in ("layout", "circulate", "route", "mask")}, seed=8)
    extra = [{"dtype": torch.float32, "groups": 4, "kernel": "aten"}, {"dtype": torch.bfloat16, "groups": 1}]
    cases = [case_of({"kernel": "aten-fp32"} | row | extra[n % 2]) for n, row in enumerate(rows)]
    for found in pools(8).run(failures, cases):
        assert not found, "\n".join(found)


CUT = {name: values for name, values in FACTORS.items() if name != "route"} | {
    "cache_qkv": [True, False, "auto"],
    "chunks": [0, 1, 2, 3, "auto"],
    "dlse": [True, False],
}


def cut_case(row: dict, world: int) -> Case:
    """Heads that ``world`` divides, of which the groups may be more than key-value heads."""
    q_heads = 12 if world == 3 else 8
    heads = {"q_heads": q_heads, "kv_heads": {1: q_heads, 4: q_heads // 4, 8: 1}[row["groups"]], "head_dim": 16}
    names = ("dtype", "layout", "circulate", "kernel", "ulysses_degree", "cache_qkv", "chunks", "dlse")
    options = {name: row[name] for name in names if name in row}
    return Case(seqlen=SEQLEN, mask=MASKS[row["mask"]], route="direct", **options, **heads)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_two_values_meet_with_heads_cut(pools, world: int) -> None:
    factors = CUT | {"ulysses_degree": [n for n in (2, 3, 4, "auto") if n == "auto" or world % n == 0]}
    cases = [cut_case(row, world) for row in covering_array(factors, seed=world)]
    for found in pools(world).run(failures, cases):
        assert not found, "\n".join(found)


@pytest.mark.parametrize("world", [2, 3])
def test_keys_and_values_gathered_in_one_exchange(pools, world: int) -> None:
    names = ("layout", "mask", "dtype", "groups", "kernel")
    cases = [
        replace(case_of(row | {"route": "direct", "circulate": "key-value"}), gather_kv=True)
        for row in covering_array({name: FACTORS[name][world - 2 :: 2] for name in names}, seed=world)
    ]
    for found in pools(world).run(failures, cases):
        assert not found, "\n".join(found)
    for passes in pools(world).run(passes_that_gather, cases[0]):
        assert passes == {Direction.FORWARD: True, Direction.BACKWARD: True}


def passes_that_gather(case: Case) -> dict[Direction, bool]:
    """On a rank: whether each pass of a call runs a program in which keys and values are gathered."""
    ran, program = {}, Schedule.program

    def noted(self: Schedule, circulate: str, direction: Direction, groups: Groups = WHOLE) -> Program:
        ran[direction] = groups.gather
        return program(self, circulate, direction, groups)

    with pytest.MonkeyPatch.context() as patch:
        plan = make_plan(case.seqlen, mask=case.mask, strategy=case.strategy)
        patch.setattr(Schedule, "program", noted)
        compare(case, plan)
    return ran


SCORED = {"softcap": [None, 0.7, 3.0], "sinks": [True, False], "kernel": ["reference", "blockwise", "auto"]}
SCORED = FACTORS | CUT | SCORED | {"dtype": [torch.float64, torch.float32]}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_soft_caps_and_sinks(pools, world: int) -> None:
    factors = SCORED | {"ulysses_degree": [n for n in (1, 2, 3, 4) if world % n == 0]}
    cases = []
    for row in covering_array(factors, seed=world):
        strategy = {"route": row["route"], "chunks": "auto"} if row["ulysses_degree"] == 1 else {}
        scored = {"softcap": row["softcap"], "sinks": row["sinks"], "logits": 2.0}
        cases.append(replace(cut_case(row, world), **strategy, **scored))
    assert {case.softcap for case in cases} == {None, 0.7, 3.0}
    for found in pools(world).run(failures, cases):
        assert not found, "\n".join(found)


@pytest.mark.long
def test_eight_ranks_with_heads_cut(pools) -> None:
    names = ("layout", "circulate", "mask", "cache_qkv", "groups", "chunks")
    rows = covering_array({name: CUT[name] for name in names} | {"ulysses_degree": [2, 4, 8]}, seed=8)
    extra = [
        {"dtype": torch.float32, "kernel": "aten", "dlse": False},
        {"dtype": torch.bfloat16, "kernel": "aten-fp32", "dlse": True},
    ]
    cases = [cut_case(row | extra[n % 2], 8) for n, row in enumerate(rows)]
    for found in pools(8).run(failures, cases):
        assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("dtype", FACTORS["dtype"], ids=str)
def test_everything_with_everything(pools, world: int, mask: str, dtype: torch.dtype) -> None:
    names = [name for name in FACTORS if name not in ("mask", "dtype")]
    cases = [
        case_of({"mask": mask, "dtype": dtype} | dict(zip(names, values, strict=True)))
        for values in product(*(FACTORS[name] for name in names))
    ]
    for found in pools(world).run(failures, cases, timeout=600):
        assert not found, "\n".join(found)


def ragged_cases(world: int) -> list[Case]:
    cases = []
    for seqlen in range(4 * world + 2):
        for n, layout in enumerate(FACTORS["layout"]):
            window = seqlen % 3 == n
            mask = Mask(window=2, cu_seqlens=sorted({0, seqlen // 2, seqlen})) if window else Mask(causal=n > 0)
            options = {"circulate": FACTORS["circulate"][seqlen % 3], "route": FACTORS["route"][(seqlen + n) % 2]}
            kernel = ("aten", "reference")[(seqlen // 2) % 2]
            heads = {"q_heads": 2, "kv_heads": 1, "head_dim": 8, "batch": 2}
            cases.append(
                Case(seqlen=seqlen, mask=mask, layout=layout, kernel=kernel, dtype=torch.float64, **options, **heads)
            )
    return cases


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.long
def test_ragged_and_empty_shards(pools, world: int) -> None:
    for found in pools(world).run(failures, ragged_cases(world)):
        assert not found, "\n".join(found)


@pytest.mark.parametrize("value_dim", [8, 40])
@pytest.mark.parametrize("kernel", ["reference", "aten", "aten-fp32"])
def test_value_dim_of_its_own(pools, value_dim: int, kernel: str) -> None:
    shapes = {"head_dim": 24, "v_head_dim": value_dim, "batch": 2, "kv_heads": 2}
    cases = [Case(seqlen=60, kernel=kernel, circulate=t, **shapes) for t in FACTORS["circulate"]]
    assert not any(pools(2).run(failures, cases))


@pytest.mark.parametrize("kernel", ["reference", "aten", "aten-fp32"])
def test_extreme_logits(pools, kernel: str) -> None:
    """Scores of +-1e4 and beyond: softmax saturates, and one overflow would be NaN."""
    case = Case(seqlen=64, kernel=kernel, dtype=torch.float64, logits=1e4, mask=Mask(window=40), route="ring")
    rows = [row for report in pools(3).run(check_rows, case) for row in report]
    for row in rows:
        assert row.error <= 1e-9, row  # the exponent of scores of 1e4 has an absolute error of 1e4 * 1e-16
    # An lse of up to 8e4 in fp32 has an error of 8e4 * 2^-24 = 5e-3.
    # P = e^(score - lse) then has this relative error.
    saturated = pools(2).run(saturated_errors, kernel)
    assert max(max(errors) for errors in saturated) <= 5e-3, saturated


def check_rows(case: Case):
    return check(case).rows


def saturated_errors(kernel: str) -> list[float]:
    """q k' are exact multiples of 1e4 in fp32: what is left is the rounding of lse."""
    make = torch.Generator().manual_seed(1)
    q, k = (torch.randint(-1, 2, (1, 2, 32, 8), generator=make).float() for _ in range(2))
    q = q * 1e4
    v, dout = (torch.randn(1, 2, 32, 8, generator=make) for _ in range(2))
    plan = make_plan(32)
    local = [plan.shard(x, 2).requires_grad_() for x in (q, k, v)]
    out, lse = burst_attention(*local, plan, scale=1.0, kernel=kernel, return_lse=True)
    grads = torch.autograd.grad(out, local, plan.shard(dout, 2))
    oracle = attend(q, k, v, plan.mask, dout=dout, scale=1.0)
    expected = [plan.shard(x, 2) for _, x in oracle.items()]
    actual = (out, lse, *grads)
    # dq and dk may be exactly 0 where one key has all the weight: measure against the inputs' size there.
    return [
        (a.double() - e).norm().item() / max(e.norm().item(), 1e-2 * x.norm().item())
        for a, e, x in zip(actual, expected, (v, q, q, q, v), strict=True)
    ]


@pytest.mark.parametrize("kernel", ["reference", "aten", "aten-fp32"])
@pytest.mark.parametrize("circulate", ["query", "key-value", "nearest"])
def test_the_lse_alone_has_a_gradient(pools, kernel: str, circulate: str) -> None:
    """dO = 0 in some or all rows while dlse is not: D is then no row sum of dO * O."""
    for blank in ("all", "half", "one entry"):
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            worst = max(max(e) for e in pools(2).run(dlse_errors, kernel, circulate, blank, dtype))
            assert worst <= bound, (kernel, circulate, blank, dtype, worst)


def dlse_errors(kernel: str, circulate: str, blank: str, dtype: torch.dtype) -> list[float]:
    case = Case(seqlen=70, dtype=dtype, kv_heads=2, mask=Mask(window=50))
    inputs = case.inputs()
    dout = inputs["dout"]
    if blank == "all":
        dout.zero_()
    elif blank == "half":
        dout[:, :, ::2] = 0
    else:
        dout[..., 1:] = 0
    plan = make_plan(70, mask=case.mask, strategy=Strategy(circulate=circulate))
    q, k, v = (plan.shard(inputs[n], 2).requires_grad_() for n in ("q", "k", "v"))
    out, lse = burst_attention(q, k, v, plan, kernel=kernel, return_lse=True)
    torch.autograd.backward([out, lse], [plan.shard(inputs[n], 2) for n in ("dout", "dlse")])
    oracle = attend(inputs["q"], inputs["k"], inputs["v"], plan.mask, dout=dout, dlse=inputs["dlse"])
    expected = [plan.shard(x, 2) for x in (oracle.dq, oracle.dk, oracle.dv)]
    return [relative_l2(a.grad, e) for a, e in zip((q, k, v), expected, strict=True)]


def over_nodes(schedule: Schedule) -> Schedule:
    """The schedule as if two ranks were on a node, the first alone where they are odd."""
    world = schedule.layout.world
    return replace(schedule, route=replace(schedule.route, nodes=tuple((r + world % 2) // 2 for r in range(world))))


def random_assignment(seed: int, route: str, mask: Mask) -> list[float]:
    """The sweep, forward and backward, with pairs computed by whomever the dice say."""
    case = Case(seqlen=90, dtype=torch.float64, mask=mask, kv_heads=2, seed=seed)
    plan = make_plan(
        case.seqlen, mask=mask, strategy=Strategy(layout=["zigzag", "striped", "contiguous"][seed % 3], route=route)
    )
    dice = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, plan.world, (plan.world, plan.world), generator=dice).numpy()
    cube = heads(WHOLE, lambda i, j: ranks[i, j])
    inputs = case.inputs()
    q, k, v, dout = (plan.shard(inputs[name], 2) for name in ("q", "k", "v", "dout"))
    kernel = choose("reference", device=q.device, dtype=q.dtype)
    scale = 0.3
    schedule = over_nodes(plan.schedule)
    forward = assigned(schedule, cube, Direction.FORWARD)
    out, lse = sweep(forward, plan.transport, Forward(q, k, v, scale, kernel))[Side.QUERY]
    stats = torch.stack([lse, (out * dout).sum(-1)], -1)
    backward = assigned(schedule, cube, Direction.BACKWARD)
    work = Backward(dout, q, k, v, stats, scale, kernel)
    sums = sweep(backward, plan.transport, work)
    actual = (out, lse, *sums[Side.QUERY], *sums[Side.KEY])
    oracle = attend(inputs["q"], inputs["k"], inputs["v"], mask, dout=inputs["dout"], scale=scale)
    return [relative_l2(a, plan.shard(e, 2)) for a, (_, e) in zip(actual, oracle.items(), strict=True)]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("route", list(ROUTES))
def test_any_assignment_of_pairs(pools, world: int, route: str) -> None:
    for seed, mask in enumerate([Mask(causal=False), Mask(), Mask(window=30, cu_seqlens=[0, 50, 90])]):
        for errors in pools(world).run(random_assignment, seed, route, mask):
            assert max(errors) <= 1e-12, (seed, mask, errors)


def random_cube(seed: int, count: int, shared: int, mask: Mask) -> list[float]:
    """The sweep, forward and backward, with cells computed by whomever the dice say."""
    case = Case(seqlen=90, dtype=torch.float64, mask=mask, q_heads=4, kv_heads=shared, seed=seed)
    layout, route = ["zigzag", "striped", "contiguous"][seed % 3], ["direct", "nodes"][seed % 2]
    plan = make_plan(case.seqlen, mask=mask, strategy=Strategy(layout=layout, route=route))
    chunks = 0 if route == "nodes" else 2 + seed
    groups, schedule = Groups.of(count, q_heads=4, kv_heads=shared, chunks=chunks), over_nodes(plan.schedule)
    ranks = np.random.default_rng(seed).integers(0, plan.world, (count, plan.world, plan.world))
    programs = {
        direction: assigned(schedule, lambda i, j, group: ranks[group, i, j], direction, groups)
        for direction in Direction
    }
    inputs = case.inputs()
    q, k, v, dout = (plan.shard(inputs[name], 2) for name in ("q", "k", "v", "dout"))
    kernel = choose("reference", device=q.device, dtype=q.dtype)
    work: Forward | Backward = Forward(q, k, v, 0.3, kernel, groups)
    out, lse = sweep(programs[Direction.FORWARD], plan.transport, work)[Side.QUERY]
    stats = torch.stack([lse, (out * dout).sum(-1)], -1)
    work = Backward(dout, q, k, v, stats, 0.3, kernel, groups=groups)
    sums = sweep(programs[Direction.BACKWARD], plan.transport, work)
    oracle = attend(inputs["q"], inputs["k"], inputs["v"], mask, dout=inputs["dout"], scale=0.3)
    actual = (out, lse, *sums[Side.QUERY], *sums[Side.KEY])
    return [relative_l2(a, plan.shard(e, 2)) for a, (_, e) in zip(actual, oracle.items(), strict=True)]


@pytest.mark.parametrize(("world", "count"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_any_assignment_of_cells(pools, world: int, count: int, shared: int) -> None:
    for seed, mask in enumerate([Mask(causal=False), Mask(), Mask(window=30, cu_seqlens=[0, 50, 90])]):
        for errors in pools(world).run(random_cube, seed, count, shared, mask):
            assert max(errors) <= 1e-12, (seed, mask, errors)


class Gapped(Schedule):
    """A mask that leaves documents out: their queries see nothing, and no query sees their keys."""

    @cached_property
    def regions(self) -> np.ndarray:
        return self.mask.regions(self.layout.seqlen)[::2]


def rows_that_see_nothing(kernel: str, circulate: str, route: str) -> None:
    mask = Mask(cu_seqlens=[0, 13, 20, 21, 40, 48])
    plan = make_plan(48, mask=mask, strategy=Strategy(route=route, circulate=circulate))
    gapped = Gapped(
        plan.schedule.layout, mask, plan.schedule.route, plan.rank, Strategy(ulysses_degree=1, circulate=circulate)
    )
    plan = Plan(gapped, plan.planner, plan.transport, plan.agreement)
    case = Case(seqlen=48, mask=mask, kv_heads=2)
    inputs = case.inputs()
    q, k, v, dout, dlse = (plan.shard(x, 2) for x in inputs.values())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = burst_attention(q, k, v, plan, kernel=kernel, return_lse=True)
    torch.autograd.backward([out, lse], [dout, dlse])
    oracle = attend(*(inputs[n] for n in ("q", "k", "v")), mask, dout=inputs["dout"], dlse=inputs["dlse"])
    position = plan.positions
    blind = ((position >= 13) & (position < 20)) | ((position >= 21) & (position < 40))
    assert (out[:, :, blind] == 0).all() and (lse[:, :, blind] == float("-inf")).all()
    actual = (out, lse, q.grad, k.grad, v.grad)
    for got, (name, expected) in zip(actual, oracle.items(), strict=True):
        if name != "lse":
            assert (got[:, :, blind] == 0).all(), name
        assert relative_l2(got[:, :, ~blind], plan.shard(expected, 2)[:, :, ~blind]) < 1e-5, name


@pytest.mark.parametrize("kernel", ["reference", "aten"])
@pytest.mark.parametrize("circulate", ["query", "key-value", "nearest"])
def test_queries_that_see_nothing(pools, kernel: str, circulate: str) -> None:
    for route in ("direct", "ring-attention"):
        pools(3).run(rows_that_see_nothing, kernel, circulate, route)


@st.composite
def cases(draw) -> Case:
    seqlen = draw(st.integers(0, 64))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Case(
        seqlen=seqlen,
        mask=draw(masks(seqlen)),
        layout=draw(st.sampled_from(FACTORS["layout"])),
        route=draw(st.sampled_from(["direct", "ring", "ring-attention", "auto"])),
        circulate=draw(st.sampled_from(["query", "key-value", "nearest", "auto"])),
        kernel=draw(st.sampled_from(FACTORS["kernel"])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        batch=draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 7, 16, 33])),
        v_head_dim=draw(st.sampled_from([None, 1, 5, 40])),
        dlse=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([2, 3]), cases())
def test_random_calls(pools, world: int, case: Case) -> None:
    for found in pools(world).run(failures, [case]):
        assert not found, "\n".join(found)


def window_of_one() -> tuple:
    """Each query sees itself alone: nothing is needed of another rank."""
    plan = make_plan(12, mask=Mask(window=1), strategy=Strategy(layout="contiguous"))
    dice = torch.Generator().manual_seed(plan.rank)
    q, k, v = (torch.randn(1, 2, plan.length, 4, generator=dice).requires_grad_() for _ in range(3))
    out = burst_attention(q, k, v, plan)
    out.sum().backward()
    return plan.transport.sent, relative_l2(out, v), q.grad.abs().max().item()


def test_a_window_of_one_sends_nothing(pools) -> None:
    for sent, error, dq in pools(3).run(window_of_one):
        assert (sent, error) == (0, 0.0)
        assert dq < 1e-6  # P is 1: dP and D cancel


def blocks_apart() -> tuple[int, int]:
    """Bytes that this rank sends if the blocks of the ranks see only themselves; and if one block sees one other."""
    sent = []
    for blocks in (torch.eye(3).bool(), torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool()):
        plan = make_plan(12, mask=Mask(blocks=blocks, block=4), strategy=Strategy(layout="contiguous"))
        q, k, v = (torch.randn(1, 2, plan.length, 4).requires_grad_() for _ in range(3))
        burst_attention(q, k, v, plan).sum().backward()
        sent.append(plan.transport.sent)
    return tuple(sent)


def test_blocks_that_see_nothing_send_nothing(pools) -> None:
    sent = pools(3).run(blocks_apart)
    assert [alone for alone, _ in sent] == [0, 0, 0]
    assert sent[1][1] == 0 < sent[0][1]


def views(kernel: str, circulate: str, heads: int = 1) -> None:
    """Inputs and gradients in odd memory (every second element, transposed, expanded); gradients of some of them; all
    one tensor; under checkpointing and inference mode."""
    plan = make_plan(33, mask=Mask(window=20), strategy=Strategy(ulysses_degree=heads, circulate=circulate))
    options = {"kernel": kernel}
    make = torch.Generator().manual_seed(plan.rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    n = plan.length
    q, k, v = normal(2, 4, n, 16)[..., ::2], normal(2, n, 2, 8).transpose(1, 2), normal(1, 2, n, 1).expand(2, 2, n, 8)
    dout = normal(2, 4, n, 1).expand(2, 4, n, 8)
    plain = [x.contiguous().requires_grad_() for x in (q, k, v)]
    out = burst_attention(*plain, plan, **options)
    expected = torch.autograd.grad(out, plain, dout.contiguous())
    odd = [x.detach().requires_grad_() for x in (q, k, v)]
    for call in (burst_attention, lambda *a, **o: checkpoint(burst_attention, *a, use_reentrant=False, **o)):
        actual = call(*odd, plan, **options)
        assert torch.equal(actual, out)
        grads = torch.autograd.grad(actual, odd, dout)
        assert all(torch.equal(a, e) for a, e in zip(grads, expected, strict=True))
    for wanted in ((0,), (1,), (0, 2)):
        some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
        grads = torch.autograd.grad(burst_attention(*some, plan, **options), [some[i] for i in wanted], dout)
        assert all(torch.equal(a, expected[i]) for a, i in zip(grads, wanted, strict=True))
    with torch.inference_mode():
        assert torch.equal(burst_attention(q, k, v, plan, **options), out)
    x = normal(1, 2, n, 8).requires_grad_()
    apart = [x.detach().clone().requires_grad_() for _ in range(3)]
    burst_attention(x, x, x, plan, **options).square().sum().backward()
    burst_attention(*apart, plan, **options).square().sum().backward()
    torch.testing.assert_close(x.grad, sum(a.grad for a in apart), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", ["reference", "aten", "aten-fp32"])
@pytest.mark.parametrize("circulate", ["query", "key-value", "nearest"])
def test_views_subsets_and_checkpointing(pools, kernel: str, circulate: str) -> None:
    pools(2).run(views, kernel, circulate)


def test_views_subsets_and_checkpointing_with_heads_cut(pools) -> None:
    pools(2).run(views, "aten", "auto", 2)


def overflowing_parts(kernel: str) -> list[torch.Tensor]:
    """Each rank's part of dQ is beyond fp16; their sum is not."""
    plan = make_plan(4, mask=Mask(causal=False), strategy=Strategy(layout="contiguous", circulate="query"))
    q, k, v = (torch.zeros(1, 1, 2, 8, dtype=torch.float16, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        k[:] = 240.0
        v[..., 0] = 60.0 if plan.rank == 0 else -60.0
    dout = torch.full_like(q, 60.0)
    out = burst_attention(q, k, v, plan, scale=8.0, kernel=kernel)
    return list(torch.autograd.grad(out, (q, k, v), dout))


@pytest.mark.parametrize("kernel", ["reference", "aten", "aten-fp32"])
def test_parts_of_a_sum_do_not_overflow_on_the_wire(pools, kernel: str) -> None:
    for grads in pools(2).run(overflowing_parts, kernel):
        assert all(x.isfinite().all() for x in grads)
        assert grads[0].abs().max() <= 1.0


def buffers_alive() -> int:
    """The most receive buffers of shards alive at once, by weak references taken where they are made."""
    alive: list[weakref.ref] = []
    most = 0
    plan = make_plan(64, mask=Mask(causal=False))
    q, k, v = (torch.randn(1, 1, plan.length, 4, requires_grad=True) for _ in range(3))
    out = burst_attention(q, k, v, plan)
    post = plan.transport.post

    def watched(sends, receives, *, label):
        nonlocal most
        alive.extend(weakref.ref(x) for _, x in receives if x.shape[-1] == 2)  # (lse, D): one for each shard
        most = max(most, sum(ref() is not None for ref in alive))
        return post(sends, receives, label=label)

    plan.transport.post = watched
    out.sum().backward()
    del plan.transport.post
    assert len(alive) == plan.world - 1
    return most


def test_two_foreign_shards_are_held_at_most(pools) -> None:
    assert pools(4).run(buffers_alive) == [2] * 4


def byte_counts(case: Case) -> tuple:
    plan = make_plan(case.seqlen, mask=case.mask, strategy=case.strategy)
    predicted = plan.bytes(
        batch=case.batch,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        dtype=case.dtype,
    )
    inputs = case.inputs()
    q, k, v, dout = (plan.shard(inputs[name], 2).requires_grad_() for name in ("q", "k", "v", "dout"))
    out = burst_attention(q, k, v, plan, kernel=case.kernel)
    forward = plan.transport.sent, plan.transport.received
    out.backward(dout)
    total = plan.transport.sent, plan.transport.received
    counted = (*forward, total[0] - forward[0], total[1] - forward[1])
    return counted, (
        predicted.forward_sent,
        predicted.forward_received,
        predicted.backward_sent,
        predicted.backward_received,
    )


@pytest.mark.parametrize("route", ["direct", "ring", "ring-attention"])
@pytest.mark.parametrize("circulate", ["query", "key-value", "nearest", "auto"])
def test_bytes_are_as_predicted(pools, route: str, circulate: str) -> None:
    sent = 0
    for layout, mask, dtype in product(
        FACTORS["layout"], [Mask(), Mask(window=9), Mask(cu_seqlens=[0, 30, 31, 50])], [torch.float64, torch.bfloat16]
    ):
        shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 12, "batch": 2}
        case = Case(seqlen=50, mask=mask, layout=layout, route=route, circulate=circulate, dtype=dtype, **shape)
        for counted, predicted in pools(3).run(byte_counts, case):
            assert counted == predicted
            sent += sum(counted)
    assert sent > 0


@pytest.mark.parametrize("heads", [2, 4, "auto"])
def test_bytes_are_as_predicted_with_heads_cut(pools, heads: int | str) -> None:
    sent = 0
    masks_and_dtypes = [(Mask(), torch.bfloat16), (Mask(window=9), torch.float64), (Mask(causal=False), torch.float16)]
    for layout, (mask, dtype), keep in product(["contiguous", "zigzag"], masks_and_dtypes, [True, False]):
        shape = {"q_heads": 8, "kv_heads": 2, "head_dim": 8, "v_head_dim": 12, "batch": 2}
        case = Case(
            seqlen=50,
            mask=mask,
            layout=layout,
            ulysses_degree=heads,
            cache_qkv=keep,
            dtype=dtype,
            route="direct",
            **shape,
        )
        for counted, predicted in pools(4).run(byte_counts, case):
            assert counted == predicted
            sent += sum(counted)
    assert sent > 0


def ring_flash_attn(seqlen: int, world: int, q_heads: int, kv_heads: int) -> float:
    """Bytes that a rank of ring-flash-attn 0.1.8's zigzag sends, bf16, head dim 128: the formula of its loops.

    K and V make W - 1 hops in both passes, dK and dV in fp32 make W.
    """
    n, hops = kv_heads * seqlen // world * 128, world - 1
    return 2 * (2 * n * hops * 2) + 2 * n * world * 4


@pytest.mark.parametrize(("world", "kv_heads", "mean", "busiest"), [(4, 8, 0.24, 0.25), (8, 8, 0.135, 0.14)])
def test_bytes_of_ring_flash_attn_that_are_left(pools, world: int, kv_heads: int, mean: float, busiest: float) -> None:
    cut = {"ulysses_degree": world, "cache_qkv": True}
    case = Case(seqlen=256, dtype=torch.bfloat16, q_heads=8, kv_heads=kv_heads, head_dim=128, **cut)
    theirs = ring_flash_attn(case.seqlen, world, 8, kv_heads)
    moved = [counted for counted, _ in pools(world).run(byte_counts, case)]
    sent, received = (
        [forward + backward for forward, backward in zip(*ends, strict=True)]
        for ends in (([x[0] for x in moved], [x[2] for x in moved]), ([x[1] for x in moved], [x[3] for x in moved]))
    )
    assert sum(sent) / world <= mean * theirs and max(*sent, *received) <= busiest * theirs


@pytest.mark.parametrize(
    ("world", "q_heads", "kv_heads", "circulate", "share"),
    [
        (8, 32, 8, "auto", 0.32),
        (16, 32, 8, "auto", 0.19),
        (64, 32, 8, "auto", 0.11),
        (16, 64, 8, "auto", 0.31),
        (64, 64, 8, "auto", 0.14),
        (64, 32, 32, "auto", 0.026),
        (256, 32, 32, "blocks", 0.015),  # the fewest bytes, though not the least time
    ],
)
def test_bytes_of_many_ranks_by_the_plans_own_count(
    world: int, q_heads: int, kv_heads: int, circulate: str, share: float
) -> None:
    slow = replace(preset("cpu+ethernet-25g"), across=Link(latency=0.0, bytes_per_second=1e5))
    options = {
        "mask": Mask(),
        "layout": "zigzag",
        "route": "direct",
        "rank": 0,
        "world": world,
        "ulysses_degree": "auto",
    }
    schedule = make_schedule(128 * world, **options, planner=Planner(slow, tuple(range(world))))
    sizes = {"batch": 1, "head_dim": 128, "v_head_dim": 128, "io": 2, "partial": 2, "accumulate": 4}
    shape = Shape(q_heads=q_heads, kv_heads=kv_heads, **sizes)
    schedule = schedule.under(strategy=Strategy(circulate=circulate))
    groups, circulate = schedule.decide(shape)
    moved = bytes_moved(schedule.schedule, shape, circulate, groups)
    assert moved[0].mean() <= share * ring_flash_attn(128 * world, world, q_heads, kv_heads), groups
