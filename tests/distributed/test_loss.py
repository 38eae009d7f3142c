"""next_token_loss over ranks: gradients sum to the one-device gradient, and all ranks refuse together."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from burst_attention import Mask, Strategy, make_plan
from burst_attention.loss import next_token_loss

BATCH, WIDTH, VOCABULARY = 2, 8, 23


@dataclass(frozen=True)
class Case:
    seqlen: int = 41
    layout: str = "zigzag"
    cu_seqlens: tuple[int, ...] | None = None
    num_valid: float | None = None
    grad: float = 1.0
    without: tuple[int, ...] = ()  # ranks that hold no valid token
    dtype: torch.dtype = torch.float64
    biased: bool = False
    factor: float = 1.0
    softcap: float | None = None


def global_tensors(case):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH, case.seqlen, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)
    ids = torch.randint(VOCABULARY, (BATCH, case.seqlen), generator=generator)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(case.dtype)
    return hidden, weight, bias if case.biased else None, ids


def one_device(case, owner):
    """(value, dhidden, dweight, dbias if any) in fp64 by torch alone, from the definition of a target."""
    hidden, weight, bias, ids = global_tensors(case)
    targets = torch.full_like(ids, -100)
    ends = {case.seqlen - 1, *(border - 1 for border in case.cu_seqlens or ())}
    for position in range(case.seqlen):
        if position not in ends and owner[position] not in case.without:
            targets[:, position] = ids[:, position + 1]
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = case.factor * F.linear(*leaves)
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    count = (targets != -100).sum().item() if case.num_valid is None else case.num_valid
    value = total / count if count else total
    (case.grad * value).backward()
    return value.detach(), *(x.grad for x in leaves)


def relative(x, y):
    return ((x.double() - y).norm() / y.norm().clamp_min(1e-300)).item()


def run_case(case):
    """On each rank: its value, and the errors of the gradients summed over ranks."""
    plan = make_plan(
        case.seqlen, mask=Mask(cu_seqlens=case.cu_seqlens), timeout=5, strategy=Strategy(layout=case.layout)
    )
    hidden, weight, bias, ids = global_tensors(case)
    local = plan.shard(hidden, 1).requires_grad_()
    parameters = [x.requires_grad_() for x in (weight, bias) if x is not None]
    labels = plan.shard_labels(ids)
    if plan.rank in case.without:
        labels.fill_(-100)
    form = {"bias": bias, "factor": case.factor, "softcap": case.softcap}
    value = next_token_loss(local, weight, labels, plan, **form, num_valid=case.num_valid, chunk_tokens=3)
    sent = plan.transport.sent
    for rank in range(plan.world):  # one rank's backward while the others wait: it can't be communicating
        if rank == plan.rank:
            (case.grad * value).backward()
        dist.barrier()
    assert plan.transport.sent == sent
    if plan.rank in case.without:
        assert not any(x.grad.any() for x in (local, *parameters))
    owner = plan.unshard(torch.full((1, plan.length), plan.rank), 1)[0].tolist()
    expected = one_device(case, owner)
    summed = [x.grad.double() for x in parameters]
    for gradient in summed:
        dist.all_reduce(gradient)
    return value.item(), [
        abs(value.item() - expected[0].item()) / max(expected[0].item(), 1e-300),
        relative(plan.unshard(local.grad, 1), expected[1]),
        *(relative(x, y) for x, y in zip(summed, expected[2:], strict=True)),
    ]


CASES = {
    "zigzag": (2, Case()),
    "contiguous": (3, Case(layout="contiguous")),
    "documents striped": (3, Case(cu_seqlens=(0, 1, 9, 9, 30, 41), layout="striped")),
    "num_valid and scaled gradient": (2, Case(num_valid=777, grad=-2.5)),
    "rank 0 has no target": (2, Case(without=(0,))),
    "shorter than the world": (3, Case(seqlen=2)),
    "one token": (2, Case(seqlen=1)),
    "fp32": (2, Case(dtype=torch.float32)),
    "factor": (2, Case(factor=0.3)),
    "softcap": (3, Case(softcap=2.5, without=(1,))),
    "bias": (2, Case(biased=True, layout="striped")),
    "bias, factor and softcap": (3, Case(biased=True, factor=-1.7, softcap=4, num_valid=9, grad=3.0, without=(0,))),
    "bias, factor and softcap in bf16": (2, Case(biased=True, factor=0.5, softcap=3.0, dtype=torch.bfloat16)),
}
BOUNDS = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-6, 1e-6), torch.bfloat16: (1e-6, 2**-8)}


@pytest.mark.parametrize("name", CASES)
def test_gradients_sum_to_the_one_device_gradient(pools, name):
    world, case = CASES[name]
    results = pools(world).run(run_case, case)
    assert len({value for value, _ in results}) == 1, "the ranks' values differ"
    of_value, of_gradients = BOUNDS[case.dtype]
    for _, (value, *gradients) in results:
        assert value <= of_value
        assert len(gradients) == (3 if case.biased else 2)
        assert max(gradients) <= of_gradients


BAD = {
    "labels holds 23": {"labels": torch.full((BATCH, 10), VOCABULARY)},
    "num_valid differs over the ranks (rank 0: None, rank 1: 5.0)": {"num_valid": 5},
    "factor differs over the ranks (rank 0: 1.0, rank 1: 0.5)": {"factor": 0.5},
    "softcap differs over the ranks (rank 0: None, rank 1: 30.0)": {"softcap": 30.0},
    "the length of bias differs over the ranks (rank 0: None, rank 1: 23.0)": {
        "bias": torch.zeros(VOCABULARY, dtype=torch.float64)
    },
    "lm_head_weight is a DTensor": {"lm_head_weight": None},
}


def bad_on_rank_1(message):
    """[(class, text, seconds)] of the bad call, and the value of a good one after it."""
    plan = make_plan(20, timeout=10)
    hidden, weight, _, ids = global_tensors(Case(seqlen=20))
    good = {"hidden": plan.shard(hidden, 1), "lm_head_weight": weight, "labels": plan.shard_labels(ids), "plan": plan}
    bad = good | BAD[message]
    if "DTensor" in message:
        mesh = init_device_mesh("cpu", (plan.world,))
        bad["lm_head_weight"] = distribute_tensor(weight.detach(), mesh, [Replicate()], src_data_rank=None)
    dist.barrier()
    start = time.monotonic()
    try:
        next_token_loss(**(bad if plan.rank == 1 else good))
        reported = ("", "nothing was raised", 0.0)
    except (TypeError, ValueError) as error:
        reported = (type(error).__name__, str(error), time.monotonic() - start)
    return reported, next_token_loss(**good).item()


@pytest.mark.parametrize("message", BAD)
def test_a_bad_argument_on_one_rank_is_refused_on_all(pools, message):
    results = pools(2).run(bad_on_rank_1, message)
    assert len({kind for (kind, _, _), _ in results}) == 1
    for (_, text, seconds), value in results:
        assert message in text
        assert seconds < 5
        assert value == results[0][1]
    if "differs" not in message:
        assert results[0][0][1].startswith("rank 1 refused the call")


class Head(torch.nn.Module):
    """An FSDP root whose forward returns the loss, as it must: only in it is the weight whole."""

    def __init__(self, weight):
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=weight.dtype)
        with torch.no_grad():
            self.body.weight.copy_(torch.eye(WIDTH))
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden, labels, plan):
        return next_token_loss(self.body(hidden), self.weight, labels, plan)


def under_fsdp():
    """Errors of the reduced gradients where rank 0 has no target: FSDP waits for a gradient from every rank."""
    case = Case(without=(0,))
    plan = make_plan(case.seqlen, timeout=10)
    hidden, weight, _, ids = global_tensors(case)
    root = fully_shard(Head(weight), mesh=init_device_mesh("cpu", (plan.world,)))
    root.set_gradient_divide_factor(1.0)
    root.set_force_sum_reduction_for_comms(True)
    labels = plan.shard_labels(ids)
    if plan.rank == 0:
        labels.fill_(-100)
    root(plan.shard(hidden, 1), labels, plan).backward()
    owner = plan.unshard(torch.full((1, plan.length), plan.rank), 1)[0].tolist()
    _, dhidden, dweight = one_device(case, owner)
    dbody = dhidden.flatten(0, 1).T @ hidden.flatten(0, 1)
    return [
        relative(root.weight.grad.full_tensor(), dweight),
        relative(root.body.weight.grad.full_tensor(), dbody),
    ]


def test_under_fsdp_with_a_rank_without_targets(pools):
    for errors in pools(2).run(under_fsdp, timeout=60.0):
        assert max(errors) <= 1e-12
