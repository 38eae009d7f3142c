"""next_token_loss and token_log_probs over ranks: one result, gradients that sum to one device's, and refusals."""

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
from burst_attention.loss import next_token_loss, token_log_probs
from burst_attention.testing import local_world
from tests.support.conditioning import greatest
from tests.unit.test_token_log_probs import ALL, DIFFERENTIABLE, dense, relative

BATCH, WIDTH, VOCABULARY, PROMPT = 4, 8, 23, 6


@dataclass(frozen=True)
class Case:
    """``loss``: next_token_loss, or a loss of the results of token_log_probs."""

    loss: str = "next token"
    seqlen: int = 41
    layout: str = "zigzag"
    cu_seqlens: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    temperature: float = 1.0
    biased: bool = False
    factor: float = 1.0
    softcap: float | None = None
    chunk: int | None = 3
    prompt: int = 0  # this many first tokens are not labels
    num_valid: float | None = None
    grad: float = 1.0
    without: tuple[int, ...] = ()  # ranks that hold no valid token

    @property
    def form(self):
        tempered = {} if self.loss == "next token" else {"temperature": self.temperature}
        return {"factor": self.factor, "softcap": self.softcap, **tempered}


def global_tensors(case):
    """(leaves, ids): hidden, weight and a bias or None."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, case.seqlen, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes]
    ids = torch.randint(VOCABULARY, (BATCH, case.seqlen), generator=generator)
    return leaves if case.biased else [*leaves[:2], None], ids


def dpo(log_probs, entropy):
    """Rows come in pairs, the first of each preferred; a model that it started from gave half of it."""
    margin = (log_probs - 0.5 * log_probs.detach() + 0.1).sum(1).view(-1, 2)
    return -F.logsigmoid(0.1 * (margin[:, 0] - margin[:, 1])).mean()


def grpo(log_probs, entropy):
    """Clipped ratios to an older policy, an advantage for each row, a bonus for entropy."""
    generator = torch.Generator().manual_seed(4)
    older = log_probs.detach() + 0.3 * torch.randn(log_probs.shape, generator=generator, dtype=torch.float64)
    advantage = torch.tensor([1.5, -0.5, 0.25, -1.25], dtype=torch.float64)[:, None]
    ratio = (log_probs - older).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(surrogate + 0.05 * entropy).sum() / max(log_probs.numel(), 1)


LOSSES = {"dpo": dpo, "grpo": grpo, "entropy": lambda log_probs, entropy: -entropy.square().sum()}


def one_device(case, owner):
    """(fields, value, gradients) by torch alone, in fp64 of all logits at once. ``owner``: the rank of each token."""
    leaves, ids = global_tensors(case)
    leaves = [None if x is None else x.double().requires_grad_() for x in leaves]
    ends = {*range(case.prompt), *(border - 1 for border in case.cu_seqlens or ())}
    ends |= {position for position, rank in enumerate(owner) if rank in case.without}
    expected = dense(*leaves, ids, ends=ends, **case.form)
    if case.loss == "next token":
        count = BATCH * len({*range(case.seqlen - 1)} - ends) if case.num_valid is None else case.num_valid
        value = -expected["log_probs"].sum() / (count or 1)
    else:
        value = LOSSES[case.loss](*(expected[name] for name in DIFFERENTIABLE))
    (case.grad * value).backward()
    return expected, value.detach(), [x.grad for x in leaves if x is not None]


def run_case(case):
    """On each rank: the results, the loss, the errors of both, and those of the gradients summed over ranks."""
    mask, strategy = Mask(cu_seqlens=case.cu_seqlens), Strategy(layout=case.layout)
    plan = make_plan(case.seqlen, mask=mask, timeout=5, strategy=strategy)
    (hidden, weight, bias), ids = global_tensors(case)
    local = plan.shard(hidden, 1).requires_grad_()
    parameters = [x.requires_grad_() for x in (weight, bias) if x is not None]
    labels = plan.shard_labels(ids)
    labels[:, plan.positions < case.prompt] = -100
    if plan.rank in case.without:
        labels.fill_(-100)
    options, fields = {"bias": bias, "chunk_tokens": case.chunk, **case.form}, {}
    if case.loss == "next token":
        value = next_token_loss(local, weight, labels, plan, num_valid=case.num_valid, **options)
    else:
        result = token_log_probs(local, weight, labels, plan, outputs=ALL, **options)
        value = LOSSES[case.loss](*(getattr(result, name).double() for name in DIFFERENTIABLE))
        fields = {name: getattr(result, name).detach() for name in ALL}
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
    errors = [relative(x, y) for x, y in zip((plan.unshard(local.grad, 1), *summed), expected[2], strict=True)]
    assert all(x.shape == expected[0][name].shape for name, x in fields.items())
    if fields and case.dtype == torch.float64:
        assert torch.equal(fields["is_top1"], expected[0]["is_top1"])
    of_fields = [relative(x, expected[0][name]) for name, x in fields.items() if name != "is_top1"]
    return fields, value.item(), [relative(value, expected[1]), *of_fields], errors


CASES = {
    "zigzag": (2, Case()),
    "contiguous": (3, Case(layout="contiguous")),
    "documents striped": (3, Case(cu_seqlens=(0, 1, 9, 9, 30, 41), layout="striped")),
    "num_valid and scaled gradient": (2, Case(num_valid=777, grad=-2.5)),
    "rank 0 has no target": (2, Case(without=(0,))),
    "shorter than the world": (3, Case(seqlen=2)),
    "one token": (2, Case(seqlen=1)),
    "fp32": (2, Case(dtype=torch.float32)),
    "factor": (2, Case(factor=0.3, chunk=1)),
    "softcap": (3, Case(softcap=2.5, without=(1,))),
    "bias": (2, Case(biased=True, layout="striped")),
    "bias, factor and softcap": (3, Case(biased=True, factor=-1.7, softcap=4, num_valid=9, grad=3.0, without=(0,))),
    "bias, factor and softcap in bf16": (2, Case(biased=True, factor=0.5, softcap=3.0, dtype=torch.bfloat16)),
    "grpo": (2, Case("grpo", chunk=None)),
    "grpo striped": (3, Case("grpo", layout="striped")),
    "grpo documents": (3, Case("grpo", cu_seqlens=(0, 1, 9, 9, 30, 41))),
    "grpo temperature": (2, Case("grpo", temperature=0.6, layout="contiguous")),
    "grpo temperature and softcap": (2, Case("grpo", temperature=0.5, softcap=2.5)),
    "grpo all": (
        3,
        Case("grpo", temperature=1.7, softcap=4, biased=True, factor=-1.5, layout="striped", prompt=PROMPT),
    ),
    "grpo shorter than the world": (3, Case("grpo", seqlen=2)),
    "grpo one token": (2, Case("grpo", seqlen=1)),
    "grpo fp32": (2, Case("grpo", dtype=torch.float32, temperature=0.8, biased=True)),
    "grpo bf16": (3, Case("grpo", dtype=torch.bfloat16, temperature=0.8, softcap=6.0)),
    "dpo": (2, Case("dpo", prompt=PROMPT, layout="striped", temperature=0.9)),
    "dpo with a shard of the prompt alone": (3, Case("dpo", prompt=25, layout="contiguous")),
    "entropy": (1, Case("entropy", temperature=1.4, chunk=1000)),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of gradients


@pytest.mark.parametrize("name", CASES)
def test_gradients_sum_to_the_one_device_gradient(pools, name):
    world, case = CASES[name]
    results = pools(world).run(run_case, case)
    exact, bound = case.dtype == torch.float64, BOUNDS[case.dtype]
    for fields, value, of_values, errors in results:
        assert value == results[0][1], "the ranks' values differ"
        assert all(torch.equal(x, results[0][0][field]) for field, x in fields.items()), "the ranks' results differ"
        assert greatest(of_values) <= (1e-12 if exact else 1e-6 if case.loss == "next token" else 1e-5)
        assert len(errors) == (3 if case.biased else 2)
        assert greatest(errors) <= (1e-5 if case.dtype == torch.float32 and case.loss != "next token" else bound)


def run_gradients(case):
    plan = make_plan(case.seqlen, timeout=5)
    leaves, ids = global_tensors(case)
    leaves = [x.requires_grad_() for x in (plan.shard(leaves[0], 1), *leaves[1:]) if x is not None]
    result = token_log_probs(*leaves, plan.shard_labels(ids), plan, temperature=0.7)
    grpo(result.log_probs, result.entropy).backward()
    return [result.log_probs.detach(), result.entropy.detach(), *(x.grad for x in leaves)]


def test_two_runs_are_bit_equal(pools):
    for first, second in zip(*(pools(3).run(run_gradients, Case(dtype=torch.bfloat16)) for _ in range(2)), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


BIAS, WIDER = (torch.zeros(*shape, dtype=torch.float64) for shape in ((VOCABULARY,), (VOCABULARY + 1, WIDTH)))
# Text of the error: the function, and what rank 1 alone passes to it.
BAD = {
    "labels holds 23": (next_token_loss, {"labels": torch.full((BATCH, 10), VOCABULARY)}),
    "num_valid differs over the ranks (rank 0: None, rank 1: 5.0)": (next_token_loss, {"num_valid": 5}),
    "factor differs over the ranks (rank 0: 1.0, rank 1: 0.5)": (next_token_loss, {"factor": 0.5}),
    "softcap differs over the ranks (rank 0: None, rank 1: 30.0)": (next_token_loss, {"softcap": 30.0}),
    "the length of bias differs over the ranks (rank 0: None, rank 1: 23.0)": (next_token_loss, {"bias": BIAS}),
    "lm_head_weight is a DTensor": (next_token_loss, {}),
    "outputs holds 'kl', which is unknown": (token_log_probs, {"outputs": ("log_probs", "kl")}),
    "labels has a label at the last position": (token_log_probs, {"labels": torch.zeros(BATCH, 10).long()}),
    "disagree on temperature: rank 0 has 1.0, rank 1 has 2.0": (token_log_probs, {"temperature": 2.0}),
    "disagree on outputs: rank 0 has ['log_probs', 'entropy'], rank 1": (token_log_probs, {"outputs": ("log_probs",)}),
    "disagree on bias: rank 0 has None, rank 1 has [23]": (token_log_probs, {"bias": BIAS}),
    "disagree on lm_head_weight: rank 0 has [23, 8], rank 1 has [24, 8]": (token_log_probs, {"lm_head_weight": WIDER}),
}


def bad_on_rank_1(message):
    """[(class, text, seconds)] of the bad call, and a sum of a good one after it."""
    plan = make_plan(20, timeout=10, strategy=Strategy(layout="contiguous"))
    (hidden, weight, _), ids = global_tensors(Case(seqlen=20))
    good = {"hidden": plan.shard(hidden, 1), "lm_head_weight": weight, "labels": plan.shard_labels(ids), "plan": plan}
    function, changes = BAD[message]
    bad = good | changes
    if "DTensor" in message:
        mesh = init_device_mesh("cpu", (plan.world,))
        bad["lm_head_weight"] = distribute_tensor(weight.detach(), mesh, [Replicate()], src_data_rank=None)
    dist.barrier()
    start = time.monotonic()
    try:
        function(**(bad if plan.rank == 1 else good))
        reported = ("", "nothing was raised", 0.0)
    except (TypeError, ValueError) as error:
        reported = (type(error).__name__, str(error), time.monotonic() - start)
    again = function(**good)
    return reported, getattr(again, "log_probs", again).sum().item()


@pytest.mark.parametrize("message", BAD)
def test_a_bad_argument_on_one_rank_is_refused_on_all(pools, message):
    results = pools(2).run(bad_on_rank_1, message)
    assert len({kind for (kind, _, _), _ in results}) == 1
    for (_, text, seconds), value in results:
        assert message in text
        assert seconds < 5
        assert value == results[0][1]
    if "differs" not in message and "disagree" not in message:
        assert results[0][0][1].startswith("rank 1 refused the call")


def another_call_on_rank_1(group):
    plan = make_plan(20, group=group)
    (hidden, weight, _), ids = global_tensors(Case(seqlen=20))
    call = next_token_loss if plan.rank == 1 else token_log_probs
    with pytest.raises(ValueError, match=r"the ranks are in different calls.*token_log_probs"):
        call(plan.shard(hidden, 1), weight, plan.shard_labels(ids), plan)


def test_another_loss_on_one_rank_is_refused_on_all():
    with local_world(2, timeout=4) as ranks:
        ranks.run(another_call_on_rank_1)


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
    (hidden, weight, _), ids = global_tensors(case)
    root = fully_shard(Head(weight), mesh=init_device_mesh("cpu", (plan.world,)))
    root.set_gradient_divide_factor(1.0)
    root.set_force_sum_reduction_for_comms(True)
    labels = plan.shard_labels(ids)
    if plan.rank == 0:
        labels.fill_(-100)
    root(plan.shard(hidden, 1), labels, plan).backward()
    owner = plan.unshard(torch.full((1, plan.length), plan.rank), 1)[0].tolist()
    dhidden, dweight = one_device(case, owner)[2]
    dbody = dhidden.flatten(0, 1).T @ hidden.flatten(0, 1)
    return [
        relative(root.weight.grad.full_tensor(), dweight),
        relative(root.body.weight.grad.full_tensor(), dbody),
    ]


def test_under_fsdp_with_a_rank_without_targets(pools):
    for errors in pools(2).run(under_fsdp, timeout=60.0):
        assert greatest(errors) <= 1e-12
