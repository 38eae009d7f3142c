"""token_log_probs over ranks: one result on all of them, and losses of it whose gradients sum to one device's."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from burst_attention import Mask, Strategy, make_plan
from burst_attention.integrations import hf
from burst_attention.loss import next_token_loss, token_log_probs
from burst_attention.testing import local_world
from tests.support.hf_models import make_batch, make_model, make_plans
from tests.unit.test_token_log_probs import ALL, DIFFERENTIABLE, dense, relative

BATCH, WIDTH, VOCABULARY, PROMPT = 4, 8, 23, 6


@dataclass(frozen=True)
class Case:
    loss: str = "grpo"
    seqlen: int = 41
    layout: str = "zigzag"
    cu_seqlens: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    temperature: float = 1.0
    biased: bool = False
    factor: float = 1.0
    softcap: float | None = None
    prompt: int = 0  # this many first tokens are not labels

    @property
    def form(self):
        return {"temperature": self.temperature, "factor": self.factor, "softcap": self.softcap}


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


def one_device(case):
    """(fields, value, gradients) by torch alone, in fp64 of all logits at once."""
    leaves, ids = global_tensors(case)
    leaves = [None if x is None else x.double().requires_grad_() for x in leaves]
    ends = {*range(case.prompt), *(border - 1 for border in case.cu_seqlens or ())}
    expected = dense(*leaves, ids, ends=ends, **case.form)
    value = LOSSES[case.loss](*(expected[name] for name in DIFFERENTIABLE))
    value.backward()
    return expected, value.detach(), [x.grad for x in leaves if x is not None]


def run_case(case):
    """On each rank: all fields, the loss, and the errors of the gradients summed over ranks."""
    plan = make_plan(
        case.seqlen, mask=Mask(cu_seqlens=case.cu_seqlens), timeout=5, strategy=Strategy(layout=case.layout)
    )
    (hidden, weight, bias), ids = global_tensors(case)
    local = plan.shard(hidden, 1).requires_grad_()
    parameters = [x.requires_grad_() for x in (weight, bias) if x is not None]
    labels = plan.shard_labels(ids)
    labels[:, plan.positions < case.prompt] = -100
    options = {"bias": bias, "outputs": ALL, "chunk_tokens": 3}
    result = token_log_probs(local, weight, labels, plan, **case.form, **options)
    value = LOSSES[case.loss](*(getattr(result, name).double() for name in DIFFERENTIABLE))
    sent = plan.transport.sent
    for rank in range(plan.world):  # one rank's backward while the others wait: it can't be communicating
        if rank == plan.rank:
            value.backward()
        dist.barrier()
    assert plan.transport.sent == sent
    expected = one_device(case)
    summed = [x.grad.double() for x in parameters]
    for gradient in summed:
        dist.all_reduce(gradient)
    errors = [relative(x, y) for x, y in zip((plan.unshard(local.grad, 1), *summed), expected[2], strict=True)]
    fields = {name: getattr(result, name).detach() for name in ALL}
    assert all(fields[name].shape == expected[0][name].shape for name in ALL)
    assert case.dtype != torch.float64 or torch.equal(fields["is_top1"], expected[0]["is_top1"])
    of_fields = [relative(fields[name], expected[0][name]) for name in ALL if name != "is_top1"]
    return fields, value.item(), [relative(value, expected[1]), *of_fields], errors


CASES = {
    "zigzag": (2, Case()),
    "striped": (3, Case(layout="striped")),
    "dpo": (2, Case(loss="dpo", prompt=PROMPT, layout="striped", temperature=0.9)),
    "dpo with a shard of the prompt alone": (3, Case(loss="dpo", prompt=25, layout="contiguous")),
    "entropy": (1, Case(loss="entropy", temperature=1.4)),
    "documents": (3, Case(cu_seqlens=(0, 1, 9, 9, 30, 41))),
    "temperature": (2, Case(temperature=0.6, layout="contiguous")),
    "temperature and softcap": (2, Case(temperature=0.5, softcap=2.5)),
    "all": (3, Case(temperature=1.7, softcap=4, biased=True, factor=-1.5, layout="striped", prompt=PROMPT)),
    "shorter than the world": (3, Case(seqlen=2)),
    "one token": (2, Case(seqlen=1)),
    "fp32": (2, Case(dtype=torch.float32, temperature=0.8, biased=True)),
    "bf16": (3, Case(dtype=torch.bfloat16, temperature=0.8, softcap=6.0)),
}
BOUNDS = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 2**-8)}


@pytest.mark.parametrize("name", CASES)
def test_gradients_sum_to_the_one_device_gradient(pools, name):
    world, case = CASES[name]
    results = pools(world).run(run_case, case)
    first = results[0]
    of_values, of_gradients = BOUNDS[case.dtype]
    for fields, value, of_results, errors in results:
        assert all(torch.equal(fields[field], first[0][field]) for field in ALL), "the ranks' results differ"
        assert value == first[1]
        assert max(of_results) <= of_values
        assert len(errors) == (3 if case.biased else 2)
        assert max(errors) <= of_gradients


def gradients_again(case):
    return run_gradients(case), run_gradients(case)


def run_gradients(case):
    plan = make_plan(case.seqlen, timeout=5, strategy=Strategy(layout=case.layout))
    leaves, ids = global_tensors(case)
    leaves = [x.requires_grad_() for x in (plan.shard(leaves[0], 1), *leaves[1:]) if x is not None]
    result = token_log_probs(*leaves[:2], plan.shard_labels(ids), plan, temperature=0.7)
    grpo(result.log_probs, result.entropy).backward()
    return [result.log_probs.detach(), result.entropy.detach(), *(x.grad for x in leaves)]


def test_two_runs_are_bit_equal(pools):
    for first, second in pools(3).run(gradients_again, Case(dtype=torch.bfloat16)):
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


BAD = {
    "outputs holds 'kl', which is unknown": {"outputs": ("log_probs", "kl")},
    "labels has a label at the last position": {"labels": torch.zeros(BATCH, 10, dtype=torch.int64)},
    "disagree on temperature: rank 0 has 1.0, rank 1 has 2.0": {"temperature": 2.0},
    "disagree on outputs: rank 0 has ['log_probs', 'entropy'], rank 1 has ['log_probs']": {"outputs": ("log_probs",)},
    "disagree on bias: rank 0 has None, rank 1 has [23]": {"bias": torch.zeros(VOCABULARY, dtype=torch.float64)},
    "disagree on lm_head_weight: rank 0 has [23, 8], rank 1 has [24, 8]": {
        "lm_head_weight": torch.zeros(VOCABULARY + 1, WIDTH, dtype=torch.float64)
    },
}


def bad_on_rank_1(message):
    """[(class, text, seconds)] of the bad call, and a sum of a good one after it."""
    plan = make_plan(20, timeout=10, strategy=Strategy(layout="contiguous"))
    (hidden, weight, _), ids = global_tensors(Case(seqlen=20))
    good = {"hidden": plan.shard(hidden, 1), "lm_head_weight": weight, "labels": plan.shard_labels(ids), "plan": plan}
    dist.barrier()
    start = time.monotonic()
    try:
        token_log_probs(**(good | BAD[message] if plan.rank == 1 else good))
        reported = ("", "nothing was raised", 0.0)
    except (TypeError, ValueError) as error:
        reported = (type(error).__name__, str(error), time.monotonic() - start)
    return reported, token_log_probs(**good).log_probs.sum().item()


@pytest.mark.parametrize("message", BAD)
def test_a_bad_argument_on_one_rank_is_refused_on_all(pools, message):
    results = pools(2).run(bad_on_rank_1, message)
    assert len({kind for (kind, _, _), _ in results}) == 1
    for (_, text, seconds), value in results:
        assert message in text
        assert seconds < 5
        assert value == results[0][1]
    if "disagree" not in message:
        assert results[0][0][1].startswith("rank 1 refused the call")


def another_call_on_rank_1(group):
    plan = make_plan(20, group=group)
    (hidden, weight, _), ids = global_tensors(Case(seqlen=20))
    call = next_token_loss if plan.rank == 1 else token_log_probs
    with pytest.raises(ValueError) as raised:
        call(plan.shard(hidden, 1), weight, plan.shard_labels(ids), plan)
    return str(raised.value)


def test_another_loss_on_one_rank_is_refused_on_all():
    with local_world(2, timeout=4) as ranks:
        for text in ranks.run(another_call_on_rank_1):
            assert "the ranks are in different calls" in text
            assert "token_log_probs" in text


def of_a_model(name):
    """Errors of a model's results and of its summed gradients, against its own logits on one device."""
    plans = make_plans(name, 41, timeout=20, layout="zigzag")
    batch, theirs, ours = make_batch(41), make_model(name, "eager"), make_model(name)
    logits = theirs(batch["input_ids"], use_cache=False).logits[:, :-1] / 0.8
    log_p = logits.log_softmax(-1)
    log_probs = log_p.gather(-1, batch["labels"][:, 1:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    (log_probs.square().mean() - entropy.mean()).backward()
    shard = hf.shard_batch(batch, plans)
    hidden = ours.model(shard["input_ids"], position_ids=shard["position_ids"], plan=plans, use_cache=False)[0]
    result = hf.token_log_probs(ours, hidden, shard["shift_labels"], plans, temperature=0.8, outputs=ALL)
    (result.log_probs.square().mean() - result.entropy.mean()).backward()
    errors = {"log_probs": relative(result.log_probs, log_probs), "entropy": relative(result.entropy, entropy)}
    for (key, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        gradient = x.grad.clone()
        dist.all_reduce(gradient)
        errors[key] = relative(gradient, y.grad)
    return errors, result.is_top1.shape


@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_of_a_models_own_logits(pools, name):
    for errors, shape in pools(2).run(of_a_model, name, timeout=60.0):
        assert max(errors.values()) <= 2e-6, errors
        assert shape == (2, 40)


def odd_model_on_rank_1():
    plan = make_plan(40, timeout=10)
    labels, hidden = plan.shard_labels(make_batch()["labels"]), torch.ones(2, plan.length, 32, dtype=torch.float64)
    model = torch.nn.Linear(2, 2) if plan.rank == 1 else make_model("llama")
    with pytest.raises(TypeError) as raised:
        hf.token_log_probs(model, hidden, labels, plan)
    return str(raised.value)


def test_a_model_without_a_head_on_one_rank_is_refused_on_all(pools):
    assert all("model is a Linear, and its body or its head is not" in x for x in pools(2).run(odd_model_on_rank_1))
