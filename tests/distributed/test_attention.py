"""Distributed calls against the fp64 oracle, on every rank, gradients included."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from burst_attention import Mask, Strategy, burst_attention, make_plan
from burst_attention.attention.passes import Backward, Forward
from burst_attention.attention.sweep import sweep
from burst_attention.kernels import choose
from burst_attention.plan.cost import Shape
from burst_attention.plan.groups import WHOLE, Groups
from burst_attention.plan.program import Program
from burst_attention.plan.route import ROUTES
from burst_attention.plan.rows import Direction, Side
from burst_attention.plan.schedule import Schedule
from burst_attention.planner.planner import Planner
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import Link
from burst_attention.testing import Case, attend, check, local_world
from burst_attention.testing.check import compare, distributed_call, relative_l2
from tests.support.conditioning import greatest
from tests.support.pairwise import covering_array
from tests.support.schedules import assigned, bytes_moved, make_schedule

SEQLEN = 74  # divisible by 2 ranks, ragged over 3, 4 and 8
MASKS = {
    "full": Mask(causal=False),
    "causal": Mask(),
    "window": Mask(window=15),
    "window both ways": Mask(causal=False, window=12, cu_seqlens=[0, 47, SEQLEN]),
    "documents": Mask(cu_seqlens=[0, 20, 20, 21, 50, SEQLEN]),
    "prefix": Mask(prefix=17),
    "window in documents": Mask(window=11, cu_seqlens=[0, 35, 49, SEQLEN]),
    "together": Mask(
        window=10, cu_seqlens=[0, 20, SEQLEN], together=[n // 3 % 5 - n % 29 // 20 for n in range(SEQLEN)]
    ),
    "blocks": Mask(blocks=[[(3 * i + j) % 4 < 2 for j in range(10)] for i in range(10)], block=8),
    "blind": Mask(  # queries that see nothing, and keys that nothing sees
        causal=False, blocks=[[i not in (0, 3, 4) and j not in (2, 3) for j in range(8)] for i in range(8)], block=10
    ),
}
FACTORS = {
    "world": [2, 3, 4],
    "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    "mask": list(MASKS),
    "groups": [1, 4, 8],
    "layout": ["contiguous", "zigzag", "zigzag-by-halves", "striped", "zigzag-per-document", "balanced"],
    "circulate": ["query", "key-value", "nearest", "blocks"],
    "route": ["direct", "ring-attention"],
    "kernel": ["reference", "aten", "aten-fp32"],
}
CUT = {name: values for name, values in FACTORS.items() if name != "route"} | {
    "ulysses_degree": ["all", 2, "auto"],
    "cache_qkv": [True, False, "auto"],
    "chunks": [0, 1, 2, 3, "auto"],
    "dlse": [True, False],
}
SCORED = CUT | {
    "dtype": [torch.float64, torch.float32],
    "mask": ["causal", "window both ways", "documents", "together", "blind"],
    "ulysses_degree": [1, "all", "auto"],
    "kernel": ["reference", "blockwise", "auto"],
    "softcap": [None, 0.7, 3.0],
    "sinks": [True, False],
}


def case_of(row: dict[str, Any]) -> Case:
    """Heads that the world divides, of which the groups may be more than key-value heads."""
    world, mask, groups = (row[name] for name in ("world", "mask", "groups"))
    options = {name: value for name, value in row.items() if name not in ("world", "mask", "groups")}
    q_heads = 12 if world == 3 else 8
    heads = {"q_heads": q_heads, "kv_heads": {1: q_heads, 4: q_heads // 4, 8: 1}[groups], "head_dim": 16}
    degree = options.get("ulysses_degree", 1)
    if degree == 1:
        options |= {"cache_qkv": "auto", "chunks": "auto"}
    elif degree == 2 and world == 3:
        options |= {"ulysses_degree": 3}
    return Case(seqlen=SEQLEN, mask=MASKS[mask], **({"route": "direct"} | heads | options))


def failures(cases: list[Case], group: Any = None) -> list[str]:
    """On a rank: what went wrong, in words."""
    found = []
    for case in cases:
        report = check(case, group=group)
        world = dist.get_world_size() if group is None else group.size()
        assert {row.rank for row in report.rows} == set(range(world))
        assert {row.tensor for row in report.rows} == {"out", "lse", "dq", "dk", "dv", *["dsinks"] * case.sinks}
        found += [f"{report.title}: {row}" for row in report.rows if not row.passed]
    return found


def check_cases(world: int, cases: list[Case]) -> None:
    """All are right with as many ranks, as threads."""
    with local_world(world, timeout=120) as ranks:
        for found in ranks.run(lambda group: failures(cases, group)):
            assert not found, "\n".join(found)


@cache
def rows_of(kind: str) -> list[dict[str, Any]]:
    return covering_array({"whole": FACTORS, "cut": CUT, "scored": SCORED}[kind], seed=4)


@pytest.mark.parametrize("world", FACTORS["world"])
def test_every_two_values_meet(world: int) -> None:
    check_cases(world, [case_of(row) for row in rows_of("whole") if row["world"] == world])


@pytest.mark.parametrize("world", FACTORS["world"])
def test_every_two_values_meet_with_heads_cut(world: int) -> None:
    check_cases(world, [case_of(row) for row in rows_of("cut") if row["world"] == world])


def rounded_once(group: Any, case: Case) -> dict[str, float]:
    """On a rank: which share of dq and dk is not the fp64 gradient with D from the returned out, rounded once."""
    plan = make_plan(case.seqlen, mask=case.mask, strategy=case.strategy, group=group)
    inputs = case.inputs()
    q, k, v, dout, dlse = (inputs[name] for name in ("q", "k", "v", "dout", "dlse"))
    found = distributed_call(case, plan, inputs)
    with torch.no_grad():
        lost = (dout.double() * (attend(q, k, v, case.mask).out - plan.unshard(found.out, 2).double())).sum(-1)
    right = attend(q, k, v, case.mask, dout=dout, dlse=dlse.double() + lost)
    pairs = {"dq": (found.dq, right.dq), "dk": (found.dk, right.dk)}
    return {name: (x != plan.shard(y, 2).to(x.dtype)).double().mean().item() for name, (x, y) in pairs.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_with_a_gradient_of_lse_the_error_is_that_of_d_rounded_once(dtype: torch.dtype) -> None:
    """The errors of dq and dk are 1.27 and 1.49 of PyTorch's, whose gradients have larger maxima without dlse."""
    heads = {"q_heads": 8, "kv_heads": 8, "head_dim": 16, "ulysses_degree": "all", "cache_qkv": True, "chunks": 0}
    options = {"layout": "zigzag-per-document", "route": "direct", "kernel": "aten-fp32", "dlse": True}
    case = Case(seqlen=SEQLEN, mask=MASKS["window in documents"], dtype=dtype, circulate="query", **options, **heads)
    check_cases(4, [case])
    with local_world(4) as ranks:
        for shares in ranks.run(rounded_once, case):
            assert greatest(shares.values()) <= 0.01, shares  # with the D of an unrounded out, a quarter


@pytest.mark.parametrize("world", FACTORS["world"])
def test_soft_caps_and_sinks(world: int) -> None:
    cases = [case_of(row | {"logits": 2.0}) for row in rows_of("scored") if row["world"] == world]
    assert {case.softcap for case in cases} == {None, 0.7, 3.0}
    check_cases(world, cases)


def test_processes(pools) -> None:
    """Every dtype and route as messages of processes."""
    factors = {name: FACTORS[name] for name in ("dtype", "route")}
    fixed = {"world": 3, "mask": "window in documents", "groups": 4, "layout": "zigzag", "kernel": "aten-fp32"}
    rows = enumerate(covering_array(factors))
    cases = [case_of(fixed | {"circulate": FACTORS["circulate"][n // 2 % 4]} | row) for n, row in rows]
    cases += [
        case_of(fixed | {"circulate": "query", "ulysses_degree": 3, "dtype": dtype, "chunks": 2})
        for dtype in FACTORS["dtype"]
    ]
    for found in pools(3).run(failures, cases):
        assert not found, "\n".join(found)


@pytest.mark.slow
def test_eight_ranks() -> None:
    rows = covering_array({"layout": CUT["layout"], "circulate": CUT["circulate"], "ulysses_degree": [1, 2, 4, 8]})
    for n, row in enumerate(rows):
        row |= {"cache_qkv": CUT["cache_qkv"][n % 3], "chunks": CUT["chunks"][n % 5]}
        row |= {"world": 8, "mask": list(MASKS)[n % 10], "groups": FACTORS["groups"][n % 3], "kernel": "aten"}
        row |= (
            {"dtype": torch.float32, "dlse": n % 4 < 2} if n % 2 else {"dtype": torch.bfloat16, "kernel": "aten-fp32"}
        )
    check_cases(8, [case_of(row) for row in rows])


@pytest.mark.parametrize("world", [2, 3])
def test_keys_and_values_gathered_in_one_exchange(world: int) -> None:
    factors = {name: FACTORS[name][world - 2 :: 2] for name in ("layout", "mask", "dtype", "groups", "kernel")}
    fixed = {"world": world, "circulate": "key-value", "gather_kv": True}
    cases = [case_of(fixed | row) for row in covering_array(factors, seed=world)]
    check_cases(world, cases)
    ran, program = {}, Schedule.program

    def noted(self: Schedule, circulate: str, direction: Direction, groups: Groups = WHOLE) -> Program:
        ran[direction] = groups.gather
        return program(self, circulate, direction, groups)

    def gathers(group: Any) -> None:
        plan = make_plan(SEQLEN, mask=cases[0].mask, strategy=cases[0].strategy, group=group)
        patch.setattr(Schedule, "program", noted)
        compare(cases[0], plan)

    with pytest.MonkeyPatch.context() as patch, local_world(world) as ranks:
        ranks.run(gathers)
    assert ran == {Direction.FORWARD: True, Direction.BACKWARD: True}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ragged_and_empty_shards(world: int) -> None:
    cases = []
    for seqlen in range(4 * world + 2):
        n = (seqlen + world) % 6
        window = seqlen % 3 == 1
        mask = Mask(window=2, cu_seqlens=sorted({0, seqlen // 2, seqlen})) if window else Mask(causal=n > 0)
        options = {"layout": FACTORS["layout"][n], "route": FACTORS["route"][(seqlen + n // 2) % 2]}
        options |= {"circulate": FACTORS["circulate"][seqlen % 4], "kernel": ("aten", "reference")[(seqlen // 2) % 2]}
        dims = {"head_dim": [8, 1, 7, 33][seqlen % 4], "v_head_dim": [None, 5, 1][seqlen % 3]}
        heads = {"q_heads": 6, "kv_heads": [1, 2, 3][seqlen % 3], "batch": 2, "dtype": torch.float64}
        cases.append(Case(seqlen=seqlen, mask=mask, **options, **heads, **dims))
    check_cases(world, cases)


def test_value_dim_of_its_own() -> None:
    shapes = {"head_dim": 24, "batch": 2, "kv_heads": 2}
    names = {"v_head_dim": [8, 40], "kernel": FACTORS["kernel"], "circulate": FACTORS["circulate"]}
    check_cases(2, [Case(seqlen=30, **shapes, **row) for row in covering_array(names)])


@pytest.mark.parametrize("kernel", FACTORS["kernel"])
def test_extreme_logits(kernel: str) -> None:
    """Scores of +-1e4 and beyond: softmax saturates, and one overflow would be NaN."""
    case = Case(seqlen=64, kernel=kernel, dtype=torch.float64, logits=1e4, mask=Mask(window=40), route="ring-attention")
    with local_world(3) as ranks:
        for row in ranks.run(lambda group: check(case, group=group))[0].rows:
            assert row.error <= 1e-9, row  # the exponent of scores of 1e4 has an absolute error of 1e4 * 1e-16
    # An lse of up to 8e4 in fp32 has an error of 8e4 * 2^-24 = 5e-3.
    # P = e^(score - lse) then has this relative error.
    with local_world(2) as ranks:
        saturated = ranks.run(saturated_errors, kernel)
    assert greatest(greatest(errors) for errors in saturated) <= 5e-3, saturated


def saturated_errors(group: Any, kernel: str) -> list[float]:
    """q k' are exact multiples of 1e4 in fp32: what is left is the rounding of lse."""
    make = torch.Generator().manual_seed(1)
    q, k = (torch.randint(-1, 2, (1, 2, 32, 8), generator=make).float() for _ in range(2))
    q = q * 1e4
    v, dout = (torch.randn(1, 2, 32, 8, generator=make) for _ in range(2))
    plan = make_plan(32, group=group)
    local = [plan.shard(x, 2).requires_grad_() for x in (q, k, v)]
    out, lse = burst_attention(*local, plan, scale=1.0, kernel=kernel, return_lse=True)
    grads = torch.autograd.grad(out, local, plan.shard(dout, 2))
    oracle = attend(q, k, v, plan.mask, dout=dout, scale=1.0)
    expected = [plan.shard(x, 2) for _, x in oracle.items()]
    # dq and dk may be exactly 0 where one key has all the weight: measure against the inputs' size there.
    return [
        (a.double() - e).norm().item() / max(e.norm().item(), 1e-2 * x.norm().item())
        for a, e, x in zip((out, lse, *grads), expected, (v, q, q, q, v), strict=True)
    ]


@pytest.mark.parametrize("kernel", FACTORS["kernel"])
def test_the_lse_alone_has_a_gradient(kernel: str) -> None:
    """dO = 0 in some or all rows while dlse is not: D is then no row sum of dO * O."""
    bounds = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
    factors = {"circulate": ["query", "key-value", "nearest"], "blank": ["all", "half", "one entry"]}
    with local_world(2) as ranks:
        for row in covering_array(factors | {"dtype": list(bounds)}):
            worst = greatest(greatest(e) for e in ranks.run(lambda group, row=row: dlse_errors(group, kernel, **row)))
            assert worst <= bounds[row["dtype"]], (row, worst)


def dlse_errors(group: Any, kernel: str, circulate: str, blank: str, dtype: torch.dtype) -> list[float]:
    case = Case(seqlen=40, dtype=dtype, kv_heads=2, mask=Mask(window=29))
    inputs = case.inputs()
    dout = inputs["dout"]
    dout[{"all": ..., "half": np.s_[:, :, ::2], "one entry": np.s_[..., 1:]}[blank]] = 0
    plan = make_plan(40, mask=case.mask, strategy=Strategy(circulate=circulate), group=group)
    q, k, v = (plan.shard(inputs[n], 2).requires_grad_() for n in ("q", "k", "v"))
    out, lse = burst_attention(q, k, v, plan, kernel=kernel, return_lse=True)
    torch.autograd.backward([out, lse], [plan.shard(inputs[n], 2) for n in ("dout", "dlse")])
    oracle = attend(inputs["q"], inputs["k"], inputs["v"], plan.mask, dout=dout, dlse=inputs["dlse"])
    expected = [plan.shard(x, 2) for x in (oracle.dq, oracle.dk, oracle.dv)]
    return [relative_l2(a.grad, e) for a, e in zip((q, k, v), expected, strict=True)]


def swept(group: Any, seed: int, route: str, mask: Mask, groups: Groups = WHOLE, shared: int = 2) -> list[float]:
    """The sweep, forward and backward, with cells computed by whomever the dice say, two ranks on a node."""
    case = Case(seqlen=60, dtype=torch.float64, mask=mask, q_heads=4, kv_heads=shared, head_dim=8, seed=seed)
    layout = ["zigzag", "striped", "contiguous"][seed % 3]
    plan = make_plan(case.seqlen, mask=mask, strategy=Strategy(layout=layout, route=route), group=group)
    world = plan.world
    ranks = np.random.default_rng(seed).integers(0, world, (groups.query, world, world))
    nodes = tuple((r + world % 2) // 2 for r in range(world))  # the first alone where they are odd
    schedule = replace(plan.schedule, route=replace(plan.schedule.route, nodes=nodes))
    programs = {d: assigned(schedule, lambda i, j, g: ranks[g, i, j], d, groups) for d in Direction}
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


SEEDS = list(enumerate([Mask(causal=False), Mask(), Mask(window=20, cu_seqlens=[0, 34, 60])]))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("route", list(ROUTES))
def test_any_assignment_of_pairs(world: int, route: str) -> None:
    with local_world(world) as ranks:
        for seed, mask in SEEDS:
            for errors in ranks.run(swept, seed, route, mask):
                assert greatest(errors) <= 1e-12, (seed, mask, errors)


@pytest.mark.parametrize(("world", "count", "shared"), [(2, 2, 1), (4, 2, 2), (4, 2, 4), (4, 4, 1), (4, 4, 4)])
def test_any_assignment_of_cells(world: int, count: int, shared: int) -> None:
    with local_world(world) as ranks:
        for seed, mask in SEEDS:
            route = ["direct", "nodes"][seed % 2]
            groups = Groups.of(count, q_heads=4, kv_heads=shared, chunks=0 if route == "nodes" else 2 + seed)
            for errors in ranks.run(swept, seed, route, mask, groups, shared):
                assert greatest(errors) <= 1e-12, (seed, mask, errors)


def alone(group: Any, mask: Mask) -> tuple:
    """Bytes sent, the largest error of out against v, and the largest entry of dq."""
    plan = make_plan(12, mask=mask, strategy=Strategy(layout="contiguous"), group=group)
    q, k, v = (torch.randn(1, 2, plan.length, 4).requires_grad_() for _ in range(3))
    out = burst_attention(q, k, v, plan)
    out.sum().backward()
    return plan.transport.sent, (out - v).abs().max().item(), q.grad.abs().max().item()


def test_what_sees_nothing_of_another_rank_sends_nothing() -> None:
    with local_world(3) as ranks:
        for sent, error, dq in ranks.run(alone, Mask(window=1)):
            assert (sent, error) == (0, 0.0)
            assert dq < 1e-6  # P is 1: dP and D cancel
        blocks = torch.eye(3).bool()
        assert [sent for sent, *_ in ranks.run(alone, Mask(blocks=blocks, block=4))] == [0, 0, 0]
        blocks[2, 0] = True
        sent = [sent for sent, *_ in ranks.run(alone, Mask(blocks=blocks, block=4))]
    assert sent[1] == 0 < sent[0]


def views(group: Any, kernel: str, circulate: str, heads: int = 1) -> None:
    """Inputs and gradients in odd memory (every second element, transposed, expanded); gradients of some of them; all
    one tensor; under checkpointing and inference mode."""
    strategy = Strategy(ulysses_degree=heads, circulate=circulate)
    plan = make_plan(33, mask=Mask(window=20), strategy=strategy, group=group)
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


def test_views_subsets_and_checkpointing() -> None:
    rows = [("reference", "query"), ("aten", "key-value"), ("aten-fp32", "nearest"), ("aten", "auto", 2)]
    with local_world(2) as ranks:
        for row in rows:
            ranks.run(views, *row)


def overflowing_parts(group: Any, kernel: str) -> list[torch.Tensor]:
    """Each rank's part of dQ is beyond fp16; their sum is not."""
    strategy = Strategy(layout="contiguous", circulate="query")
    plan = make_plan(4, mask=Mask(causal=False), strategy=strategy, group=group)
    q, k, v = (torch.zeros(1, 1, 2, 8, dtype=torch.float16, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        k[:] = 240.0
        v[..., 0] = 60.0 if plan.rank == 0 else -60.0
    dout = torch.full_like(q, 60.0)
    out = burst_attention(q, k, v, plan, scale=8.0, kernel=kernel)
    return list(torch.autograd.grad(out, (q, k, v), dout))


@pytest.mark.parametrize("kernel", FACTORS["kernel"])
def test_parts_of_a_sum_do_not_overflow_on_the_wire(kernel: str) -> None:
    with local_world(2) as ranks:
        for grads in ranks.run(overflowing_parts, kernel):
            assert all(x.isfinite().all() for x in grads)
            assert grads[0].abs().max() <= 1.0


def byte_counts(case: Case, group: Any = None) -> tuple:
    """Bytes sent and received, forward and backward: counted, and predicted."""
    plan = make_plan(case.seqlen, mask=case.mask, strategy=case.strategy, group=group)
    names = ("batch", "q_heads", "kv_heads", "head_dim", "v_head_dim", "dtype")
    predicted = plan.bytes(**{name: getattr(case, name) for name in names})
    inputs = case.inputs()
    q, k, v, dout = (plan.shard(inputs[name], 2).requires_grad_() for name in ("q", "k", "v", "dout"))
    out = burst_attention(q, k, v, plan, kernel=case.kernel)
    forward = plan.transport.sent, plan.transport.received
    out.backward(dout)
    total = plan.transport.sent, plan.transport.received
    counted = (*forward, total[0] - forward[0], total[1] - forward[1])
    ends = ("forward_sent", "forward_received", "backward_sent", "backward_received")
    return counted, tuple(getattr(predicted, end) for end in ends)


def check_bytes(world: int, factors: dict[str, list], **fixed: Any) -> None:
    shape = {"kv_heads": 2, "head_dim": 8, "v_head_dim": 12, "batch": 2}
    total = 0
    with local_world(world) as ranks:
        for row in covering_array(factors):
            case = Case(seqlen=50, **shape, **fixed, **row)
            for counted, predicted in ranks.run(partial(lambda group, case: byte_counts(case, group), case=case)):
                assert counted == predicted, case
                total += sum(counted)
    assert total > 0


BYTES = {
    "dtype": [torch.float64, torch.bfloat16],
    "mask": [Mask(), Mask(window=9), Mask(cu_seqlens=[0, 30, 31, 50])],
}


@pytest.mark.parametrize("route", ["direct", "ring-attention"])
def test_bytes_are_as_predicted(route: str) -> None:
    factors = {"layout": FACTORS["layout"], "circulate": ["query", "key-value", "nearest", "auto"]}
    check_bytes(3, factors | BYTES, route=route, q_heads=4)


def test_bytes_are_as_predicted_with_heads_cut() -> None:
    factors = {"layout": ["contiguous", "zigzag"], "ulysses_degree": [2, 4, "auto"], "cache_qkv": [True, False]}
    factors |= {"dtype": [torch.float64, torch.float16], "mask": [Mask(), Mask(window=9), Mask(causal=False)]}
    check_bytes(4, factors, route="direct", q_heads=8)


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
    if world == 4:
        moved = [counted for counted, _ in pools(world).run(byte_counts, case)]
    else:
        with local_world(world) as ranks:
            moved = [counted for counted, _ in ranks.run(lambda group: byte_counts(case, group))]
    sent, received = (
        [forward + backward for forward, backward in zip(*ends, strict=True)]
        for ends in (([x[0] for x in moved], [x[2] for x in moved]), ([x[1] for x in moved], [x[3] for x in moved]))
    )
    assert sum(sent) / world <= mean * theirs and max(*sent, *received) <= busiest * theirs


@pytest.mark.parametrize(
    ("world", "q_heads", "kv_heads", "circulate", "share"),
    [
        (8, 32, 8, "auto", 0.32),
        (64, 32, 8, "auto", 0.11),
        (64, 64, 8, "auto", 0.14),
        (64, 32, 32, "auto", 0.026),
        (256, 32, 32, "blocks", 0.015),  # the fewest bytes, though not the least time
    ],
)
def test_bytes_of_many_ranks_by_the_plans_own_count(world, q_heads, kv_heads, circulate, share):
    slow = replace(preset("cpu+ethernet-25g"), across=Link(latency=0.0, bytes_per_second=1e5))
    options = {"mask": Mask(), "layout": "zigzag", "route": "direct", "world": world, "ulysses_degree": "auto"}
    schedule = make_schedule(128 * world, **options, planner=Planner(slow, tuple(range(world))))
    sizes = {"batch": 1, "head_dim": 128, "v_head_dim": 128, "io": 2, "partial": 2, "accumulate": 4}
    shape = Shape(q_heads=q_heads, kv_heads=kv_heads, **sizes)
    schedule = schedule.under(strategy=Strategy(circulate=circulate))
    groups, circulate = schedule.decide(shape)
    moved = bytes_moved(schedule.schedule, shape, circulate, groups)
    assert moved[0].mean() <= share * ring_flash_attn(128 * world, world, q_heads, kv_heads), groups
