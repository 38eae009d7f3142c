"""token_log_probs on one rank, compared with explicit logits."""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_attention import Mask, make_plan
from burst_attention.loss import TokenLogProbs, next_token_loss, next_token_nll, token_log_probs

BATCH, SEQLEN, WIDTH, VOCABULARY = 2, 37, 12, 29
ALL = tuple(field.name for field in fields(TokenLogProbs))
DIFFERENTIABLE = ("log_probs", "entropy")
MASK = Mask(cu_seqlens=(0, 9, 10, SEQLEN))
FORM = {"factor": -1.5, "softcap": 4, "temperature": 1.6}


def make_inputs(dtype=torch.float64, *, seqlen=SEQLEN, vocabulary=VOCABULARY, width=WIDTH, biased=True):
    """Return (hidden, weight, bias) leaves and token ids."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, seqlen, width), (vocabulary, width), (vocabulary,)][: 3 if biased else 2]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    ids = torch.randint(vocabulary, (BATCH, seqlen), generator=generator)
    return [x.requires_grad_() for x in leaves], ids


def dense(hidden, weight, bias, ids, *, temperature=1.0, factor=1.0, softcap=None, ends=()):
    """Return all fields for all positions, in the inputs' dtype; ``ends`` are positions without a label."""
    logits = F.linear(hidden[:, :-1], weight, bias) * factor
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits / temperature
    log_p, labels = logits.log_softmax(-1), ids[:, 1:, None]
    given = {
        "log_probs": log_p.gather(-1, labels).squeeze(-1),
        "entropy": torch.distributions.Categorical(logits=logits, validate_args=False).entropy(),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == labels.squeeze(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
    }
    keeps = torch.tensor([position not in ends for position in range(ids.shape[1] - 1)], dtype=torch.bool)
    return {name: torch.where(keeps, x, torch.zeros((), dtype=x.dtype)) for name, x in given.items()}


def both(dtype, *, exact=False, **options):
    """Return fields and leaves of (ours, dense), with all that may follow the head's product.

    With ``exact`` the dense side is in fp64.
    """
    sides = []
    for ours in (True, False):
        leaves, ids = make_inputs(dtype)
        if exact and not ours:
            leaves = [x.detach().double().requires_grad_() for x in leaves]
        hidden, weight, bias = leaves
        if ours:
            plan = make_plan(SEQLEN, mask=MASK)
            result = token_log_probs(
                hidden, weight, plan.shard_labels(ids), plan, bias=bias, outputs=ALL, **FORM, **options
            )
            given = {field: getattr(result, field) for field in ALL}
        else:
            given = dense(*leaves, ids, ends={border - 1 for border in MASK.cu_seqlens}, **FORM)
        sides.append((given, leaves))
    return sides


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-300)).item()


def weights_of(dtype=torch.float64):
    """Weights of log_probs and entropy in a loss, each [BATCH, SEQLEN - 1]."""
    generator = torch.Generator().manual_seed(2)
    shape = BATCH, SEQLEN - 1
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in DIFFERENTIABLE]


def gradients(side, weights):
    fields, leaves = side
    sum((w * fields[name]).sum() for w, name in zip(weights, DIFFERENTIABLE, strict=True)).backward()
    return [x.grad for x in leaves]


@pytest.mark.parametrize("change", [lambda x: x * (x > 1), lambda x: x * 10 ** (4 * x)], ids=["few", "of all sizes"])
def test_gradients_of_few_tokens_and_of_all_sizes(change):
    weights = [change(x) for x in weights_of()]
    for x, y in zip(*(gradients(side, weights) for side in both(torch.float64, chunk_tokens=5)), strict=True):
        assert relative(x, y) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_at_the_end(dtype):
    weights = weights_of()
    ours, theirs = both(dtype, exact=True, chunk_tokens=13)
    for field in ALL:
        if field != "is_top1":
            assert ours[0][field].dtype == torch.float32
            assert relative(ours[0][field], theirs[0][field]) <= 2e-6
    for x, y in zip(gradients(ours, weights), gradients(theirs, weights), strict=True):
        assert x.dtype == dtype
        # One rounding to the dtype, and fp32 sums before it.
        bound = torch.finfo(dtype).eps / 2 * y.abs() + torch.finfo(dtype).smallest_normal + 1e-5 * y.abs().max()
        assert ((x.double() - y).abs() <= bound).all()


def test_the_least_gradients_of_tokens_lose_no_digits():
    """Gradients of a mean over many tokens are small; times probabilities they would vanish in low precision."""
    sizes, form, results = (1.0, 2.0**-126), {"factor": 2.0**30, "temperature": 0.5}, []
    for size in sizes:
        leaves, ids = make_inputs(torch.float32, biased=False)
        with torch.no_grad():
            for x in leaves:
                x *= 2.0**-16
        plan = make_plan(SEQLEN)
        result = token_log_probs(*leaves, plan.shard_labels(ids), plan, **form)
        given = (1 + torch.rand(2, BATCH, SEQLEN - 1, generator=torch.Generator().manual_seed(4))) * size
        results.append(torch.autograd.grad((result.log_probs, result.entropy), leaves, given.unbind(0)))
    for usual, least in zip(*results, strict=True):
        assert usual.any()
        assert torch.equal(least.double() / sizes[1], usual.double())


def test_the_loss_and_each_nll_are_of_the_same_numbers():
    (hidden, weight, bias), ids = make_inputs(torch.bfloat16)
    plan = make_plan(SEQLEN, mask=MASK)
    labels, form = plan.shard_labels(ids), {"bias": bias, "factor": 0.5, "softcap": 3.0}
    ours = token_log_probs(hidden, weight, labels, plan, **form).log_probs
    assert torch.equal(next_token_nll(hidden, weight, labels, plan, **form)[:, :-1], -ours.detach())
    count = (labels != -100).sum()
    expected = torch.autograd.grad(next_token_loss(hidden, weight, labels, plan, **form), (hidden, weight, bias))
    mean = torch.autograd.grad(-ours.sum() / count, (hidden, weight, bias))
    assert all(torch.equal(x, y) for x, y in zip(mean, expected, strict=True))


def test_only_what_is_asked_for():
    (hidden, weight, _), ids = make_inputs()
    plan = make_plan(SEQLEN)
    labels = plan.shard_labels(ids)
    everything = token_log_probs(hidden, weight, labels, plan, outputs=ALL)
    for outputs in ((), *((name,) for name in ALL), ("is_top1", "entropy"), {"mean_logits"}, ["entropy"] * 2):
        given = token_log_probs(hidden, weight, labels, plan, outputs=outputs)
        for name in ALL:
            field = getattr(given, name)
            if name in outputs or name == "log_probs":
                assert torch.equal(field, getattr(everything, name))
                assert field.requires_grad == (name in DIFFERENTIABLE)
            else:
                assert field is None


def results_with(dtype):
    weights = weights_of(dtype)
    (fields, leaves), _ = both(dtype, chunk_tokens=5)
    before = [x.detach().clone() for x in leaves]
    results = [fields[name].detach() for name in ALL] + gradients((fields, leaves), weights)
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True)), "an input was written to"
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bit_equal_also_under_autocast(dtype):
    plain = results_with(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(x, y) for x, y in zip(plain, results_with(dtype), strict=True))


def test_one_rows_infinity_stays_in_its_row_of_hidden():
    (hidden, weight), ids = make_inputs(biased=False)
    plan = make_plan(SEQLEN)
    result = token_log_probs(hidden, weight, plan.shard_labels(ids), plan)
    given = torch.ones_like(result.log_probs)
    given[1, 5] = float("inf")
    dhidden, dweight = torch.autograd.grad((result.log_probs, result.entropy), (hidden, weight), (given, given))
    assert not dhidden[1, 5].isfinite().any()
    assert dhidden.isfinite().all(-1).sum() == dhidden[..., 0].numel() - 1
    assert not dweight.isfinite().any()


def test_a_token_that_a_bias_rules_out_has_probability_zero():
    (hidden, weight, bias), ids = make_inputs()
    keeps = [v for v in range(VOCABULARY) if v != 7]
    ids[ids == 7] = 8
    with torch.no_grad():
        bias[7] = -float("inf")
    plan = make_plan(SEQLEN)
    result = token_log_probs(hidden, weight, plan.shard_labels(ids), plan, bias=bias, outputs=ALL)
    (result.log_probs + result.entropy).sum().backward()
    ours = hidden.grad.clone(), weight.grad[keeps], bias.grad[keeps]
    assert not weight.grad[7].any()
    assert not bias.grad[7].any()
    part = [weight.detach()[keeps].requires_grad_(), bias.detach()[keeps].requires_grad_()]
    hidden.grad = None
    expected = dense(hidden, *part, ids - (ids > 7).long())
    (expected["log_probs"] + expected["entropy"]).sum().backward()
    for name in ("log_probs", "entropy", "log_sum_sq_probs"):
        assert relative(getattr(result, name), expected[name]) <= 1e-12
    for x, y in zip(ours, (hidden.grad, part[0].grad, part[1].grad), strict=True):
        assert relative(x, y) <= 1e-12


def test_of_equal_logits_the_label_is_one_of_the_greatest():
    weight = torch.zeros(3, 4)
    weight[0] = -1
    plan = make_plan(5)
    ids = torch.tensor([[0, 0, 1, 2, 0]])
    result = token_log_probs(torch.ones(1, 5, 4), weight, plan.shard_labels(ids), plan, outputs=["is_top1"])
    assert result.is_top1.tolist() == [[False, True, True, False]]


def test_without_a_label_gradients_are_zeros_and_hidden_is_not_read():
    leaves, _ = make_inputs()
    with torch.no_grad():
        leaves[0].fill_(float("nan"))
    labels = torch.full((BATCH, SEQLEN), -100)
    result = token_log_probs(*leaves[:2], labels, make_plan(SEQLEN), bias=leaves[2], outputs=ALL)
    assert not any(getattr(result, name).any() for name in ALL)
    (result.log_probs.sum() * float("inf") + result.entropy.sum()).backward()
    assert not any(x.grad.any() for x in leaves)


class Largest(TorchDispatchMode):
    """A mode that records the largest number of elements of any new tensor, except views of ``known``."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.numel = {x.untyped_storage().data_ptr() for x in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize(("softcap", "chunk_tokens"), [(None, None), (2.0, 16)])
def test_logits_of_the_shard_never_exist_at_once(chunk_tokens, softcap):
    (hidden, weight), ids = make_inputs(torch.float32, seqlen=401, vocabulary=600, width=8, biased=False)
    plan = make_plan(401)
    labels = plan.shard_labels(ids)
    options = {"chunk_tokens": chunk_tokens, "softcap": softcap, "temperature": 0.5, "outputs": ALL}
    with Largest(hidden, weight) as largest:
        result = token_log_probs(hidden, weight, labels, plan, **options)
        (result.log_probs * result.entropy).sum().backward()
    assert largest.numel == (BATCH * 100 if chunk_tokens is None else chunk_tokens) * 600


def test_nothing_of_the_size_of_logits_is_saved():
    (hidden, weight), ids = make_inputs(torch.float32, seqlen=400, vocabulary=600, width=8, biased=False)
    plan, saved = make_plan(400), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        token_log_probs(hidden, weight, plan.shard_labels(ids), plan, outputs=ALL)
    assert sum(x.numel() for x in saved) <= hidden.numel() + weight.numel() + 6 * ids.numel()
