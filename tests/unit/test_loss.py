"""next_token_loss on one rank, compared with torch's own cross entropy."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_attention import make_plan
from burst_attention.loss import Head, LogitForm, next_token_loss, next_token_nll
from burst_attention.loss.head import default_chunk

BATCH, SEQLEN, WIDTH, VOCABULARY = 2, 37, 12, 29


def make_inputs(dtype=torch.float64, *, seqlen=SEQLEN, vocabulary=VOCABULARY, width=WIDTH, seed=0, drop=0.3):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, seqlen, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocabulary, (BATCH, seqlen), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < drop] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def torch_loss(hidden, weight, labels, num_valid=None, *, bias=None, factor=1.0, softcap=None):
    logits = F.linear(hidden, weight, bias) * factor
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum() if num_valid is None else num_valid)


def run(hidden, weight, labels, *, grad=None, loss=next_token_loss, **options):
    """Return (value, dhidden, dweight) for new leaves."""
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    if loss is next_token_loss:
        options = {"plan": make_plan(hidden.shape[1]), **options}
    value = loss(hidden, weight, labels, **options)
    value.backward(None if grad is None else torch.tensor(grad, dtype=value.dtype))
    return value.detach(), hidden.grad, weight.grad


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 1000])
@pytest.mark.parametrize("num_valid", [None, 5, 123.0, torch.tensor(64)])
def test_fp64_equals_torch(chunk_tokens, num_valid):
    inputs = make_inputs()
    ours = run(*inputs, chunk_tokens=chunk_tokens, num_valid=num_valid, grad=1.7)
    theirs = run(*inputs, loss=torch_loss, num_valid=num_valid, grad=1.7)
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == torch.float64
        assert relative(x, y) <= 1e-12


def test_gradcheck():
    hidden, weight, labels = make_inputs(seqlen=5, vocabulary=6, width=3)
    plan = make_plan(5)
    assert torch.autograd.gradcheck(lambda h, w: next_token_loss(h, w, labels, plan, chunk_tokens=2), (hidden, weight))


FORMS = {
    "bias": {"bias": True},
    "factor": {"factor": 0.125},
    "softcap": {"softcap": 5.0},
    "saturated softcap": {"softcap": 0.5},
    "all": {"bias": True, "factor": -3.0, "softcap": 7},
}


def with_bias(form, dtype=torch.float64, vocabulary=VOCABULARY):
    """Replace True in a form's options by a leaf."""
    if "bias" not in form:
        return form
    bias = torch.randn(vocabulary, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return form | {"bias": bias.to(dtype).requires_grad_()}


@pytest.mark.parametrize("chunk_tokens", [None, 7])
@pytest.mark.parametrize("name", FORMS)
def test_bias_factor_and_softcap_equal_torch(name, chunk_tokens):
    inputs, sides = make_inputs(), []
    for loss, options in ((next_token_loss, {"chunk_tokens": chunk_tokens}), (torch_loss, {})):
        form = with_bias(FORMS[name])
        sides.append([*run(*inputs, loss=loss, grad=1.7, **form, **options)])
        sides[-1] += [form["bias"].grad] if "bias" in form else []
    plain = run(*inputs, grad=1.7)
    for x, y in zip(*sides, strict=True):
        assert relative(x, y) <= 1e-12
    assert all(relative(x, y) > 1e-3 for x, y in zip(sides[0], plain, strict=False)), "the form changes nothing"


@pytest.mark.parametrize("name", FORMS)
def test_each_tokens_nll_is_what_the_loss_sums(name):
    hidden, weight, labels = make_inputs()
    form, plan = with_bias(FORMS[name]), make_plan(SEQLEN)
    nll = next_token_nll(hidden, weight, labels, plan, **form)
    assert relative(nll.sum(), torch_loss(hidden, weight, labels, 1, **form)) <= 1e-12
    assert not nll[labels == -100].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_logits_of_a_head(name, dtype):
    hidden, weight, _ = make_inputs(dtype)
    form = with_bias(FORMS[name], dtype)
    head = Head(weight, form.get("bias"), LogitForm(form.get("factor", 1.0), form.get("softcap")))
    expected = F.linear(hidden, weight, head.bias) * head.form.factor
    if head.form.softcap is not None:
        expected = torch.tanh(expected / head.form.softcap) * head.form.softcap
    assert torch.equal(head.logits(hidden), expected)
    assert not head.logits(hidden).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_factor_and_softcap_round_only_at_the_end(dtype):
    inputs = make_inputs(dtype, seqlen=300, vocabulary=101, width=48)
    ours = with_bias(FORMS["all"], dtype, 101)
    exact = ours | {"bias": ours["bias"].detach().double().requires_grad_()}
    expected = run(*(x.double() for x in inputs[:2]), inputs[2], loss=torch_loss, **exact)
    value, *gradients = run(*inputs, **ours, chunk_tokens=13)
    assert relative(value, expected[0]) <= 1e-6
    for x, y in zip((*gradients, ours["bias"].grad), (*expected[1:], exact["bias"].grad), strict=True):
        assert x.dtype == dtype
        bound = torch.finfo(dtype).eps / 2 * y.abs() + torch.finfo(dtype).smallest_normal + 4e-6 * y.abs().max()
        assert ((x.double() - y).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_at_the_end(dtype):
    inputs = make_inputs(dtype, seqlen=300, vocabulary=101, width=48)
    exact = run(*(x.double() for x in inputs[:2]), inputs[2], loss=torch_loss)
    ours = run(*inputs, chunk_tokens=13)
    theirs = run(*inputs, loss=torch_loss)
    assert ours[0].dtype == torch.float32
    assert relative(ours[0], exact[0]) <= 1e-6
    for x, their, y in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert x.dtype == dtype
        error, y = (x.double() - y).abs(), y.double()
        # One rounding to the dtype, and fp32 sums before it.
        bound = torch.finfo(dtype).eps / 2 * y.abs() + torch.finfo(dtype).smallest_normal + 2e-6 * y.abs().max()
        assert (error <= bound).all()
        if dtype != torch.float32:  # torch's own product rounds the logits; its fp32 errs as ours does
            assert error.max() <= 1.25 * (their.double() - y).abs().max()


def test_two_runs_are_bit_equal_and_inputs_unchanged():
    inputs = make_inputs(torch.bfloat16)
    before = [x.detach().clone() for x in inputs]
    first, second = run(*inputs, chunk_tokens=5), run(*inputs, chunk_tokens=5)
    plan = make_plan(SEQLEN)
    next_token_loss(*inputs, plan).backward()
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_autocast_changes_nothing():
    inputs = make_inputs(torch.float32)
    plain = run(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        under = run(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(plain, under, strict=True))


def test_strided_hidden_and_int32_labels():
    hidden, weight, labels = make_inputs()
    wide = torch.zeros(BATCH, SEQLEN, 2 * WIDTH, dtype=hidden.dtype)
    wide[..., ::2] = hidden.detach()
    wide.requires_grad_()
    value = next_token_loss(wide[..., ::2], weight, labels.int(), make_plan(SEQLEN))
    value.backward()
    expected = run(hidden, weight, labels)
    assert torch.equal(value, expected[0])
    assert torch.equal(wide.grad[..., ::2], expected[1])


def test_tied_embedding():
    _, weight, labels = make_inputs()
    ids = torch.randint(VOCABULARY, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(5))
    tied = [weight.detach().clone().requires_grad_() for _ in range(2)]
    next_token_loss(F.embedding(ids, tied[0]), tied[0], labels, make_plan(SEQLEN)).backward()
    torch_loss(F.embedding(ids, tied[1]), tied[1], labels).backward()
    assert relative(tied[0].grad, tied[1].grad) <= 1e-12


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_wanted(wanted):
    hidden, weight, labels = make_inputs()
    expected = run(hidden, weight, labels)
    hidden, weight = hidden.detach().requires_grad_(wanted[0]), weight.detach().requires_grad_(wanted[1])
    value = next_token_loss(hidden, weight, labels, make_plan(SEQLEN))
    assert torch.equal(value.detach(), expected[0])
    assert value.requires_grad == any(wanted)
    if value.requires_grad:
        value.backward()
    for x, y, wants in zip((hidden, weight), expected[1:], wanted, strict=True):
        assert torch.equal(x.grad, y) if wants else x.grad is None


def test_rows_without_a_target_are_not_read():
    hidden, weight, labels = make_inputs()
    expected = run(hidden, weight, labels)
    poisoned = hidden.detach().clone()
    poisoned[labels == -100] = float("nan")
    value, dhidden, dweight = run(poisoned, weight, labels)
    assert torch.equal(value, expected[0])
    assert torch.equal(dhidden, expected[1])
    assert torch.equal(dweight, expected[2])


def test_ignore_index_inside_the_vocabulary():
    hidden, weight, labels = make_inputs(drop=0.0)
    assert (labels == 3).any()
    ours = run(hidden, weight, labels, ignore_index=3)
    theirs = run(hidden, weight, labels.masked_fill(labels == 3, -100), loss=torch_loss)
    assert all(relative(x, y) <= 1e-12 for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("num_valid", [None, 0, 7])
@pytest.mark.parametrize("seqlen", [0, SEQLEN])
def test_no_valid_token_gives_zero_and_stays_connected(num_valid, seqlen):
    hidden, weight, labels = make_inputs(torch.bfloat16, seqlen=seqlen, drop=1.1)
    assert (labels == -100).all()
    value, dhidden, dweight = run(hidden, weight, labels, num_valid=num_valid, grad=float("inf"))
    assert value.item() == 0.0
    assert torch.equal(dhidden, torch.zeros_like(hidden))
    assert torch.equal(dweight, torch.zeros_like(weight))


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


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_logits_of_the_shard_never_exist_at_once(chunk_tokens, softcap):
    seqlen, vocabulary = 400, 600
    hidden, weight, labels = make_inputs(torch.float32, seqlen=seqlen, vocabulary=vocabulary, width=8, drop=0.0)
    tokens = BATCH * seqlen
    with Largest(hidden, weight) as largest:
        options = {"chunk_tokens": chunk_tokens, "softcap": softcap}
        next_token_loss(hidden, weight, labels, make_plan(seqlen), **options).backward()
    assert largest.numel == (tokens // 4 if chunk_tokens is None else chunk_tokens) * vocabulary


def test_nothing_of_the_size_of_logits_is_saved():
    hidden, weight, labels = make_inputs(torch.float32, seqlen=400, vocabulary=600, width=8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        next_token_loss(hidden, weight, labels, make_plan(400))
    assert sum(x.numel() for x in saved) <= hidden.numel() + weight.numel() + 3 * labels.numel()


@pytest.mark.parametrize("tokens", [1, 5, 1000, 16384])
@pytest.mark.parametrize("vocabulary", [1, 256, 128256])
@pytest.mark.parametrize("width", [8, 4096])
def test_default_chunk(tokens, vocabulary, width):
    chunk = default_chunk(tokens, vocabulary, width)
    assert 1 <= chunk <= -(-tokens // 4)
    assert chunk == 1 or chunk * vocabulary <= max(2**22, tokens * width)


REFUSED = {
    "plan={None:": lambda a: a | {"plan": {None: a["plan"]}},
    "hidden has dtype": lambda a: a | {"hidden": a["hidden"].long()},
    "hidden is a list": lambda a: a | {"hidden": a["hidden"].tolist()},
    "hidden has shape": lambda a: a | {"hidden": a["hidden"][0]},
    "hidden has 36 tokens": lambda a: a | {"hidden": a["hidden"][:, 1:], "labels": a["labels"][:, 1:]},
    "lm_head_weight has dtype torch.bfloat16, hidden torch.float64": lambda a: (
        a | {"lm_head_weight": a["lm_head_weight"].bfloat16()}
    ),
    "lm_head_weight has shape": lambda a: a | {"lm_head_weight": a["lm_head_weight"].T},
    "lm_head_weight is on meta": lambda a: a | {"lm_head_weight": a["lm_head_weight"].to("meta")},
    "labels has dtype": lambda a: a | {"labels": a["labels"].double()},
    "labels has shape": lambda a: a | {"labels": a["labels"][:, 1:]},
    "labels holds 29, neither": lambda a: a | {"labels": a["labels"].index_fill(1, torch.tensor([3]), 29)},
    "labels holds -1, neither": lambda a: a | {"labels": a["labels"].index_fill(1, torch.tensor([3]), -1)},
    "ignore_index=None": lambda a: a | {"ignore_index": None},
    "num_valid=-3": lambda a: a | {"num_valid": -3},
    "num_valid=nan": lambda a: a | {"num_valid": float("nan")},
    "num_valid=True": lambda a: a | {"num_valid": True},
    "num_valid='5'": lambda a: a | {"num_valid": "5"},
    "num_valid=0, but the group holds": lambda a: a | {"num_valid": 0},
    "factor='2' must be a number": lambda a: a | {"factor": "2"},
    "factor=None must be a number": lambda a: a | {"factor": None},
    "factor=inf must be finite and not 0": lambda a: a | {"factor": float("inf")},
    "factor=0.0 must be finite and not 0": lambda a: a | {"factor": 0.0},
    "softcap=True must be a number": lambda a: a | {"softcap": True},
    "softcap=0 must be finite and greater than 0": lambda a: a | {"softcap": 0},
    "softcap=nan must be finite and greater than 0": lambda a: a | {"softcap": float("nan")},
    "bias is a list": lambda a: a | {"bias": [0.0] * VOCABULARY},
    "bias has shape [28]; pass [29]": lambda a: a | {"bias": a["lm_head_weight"][1:, 0]},
    "bias has dtype torch.float32, hidden torch.float64": lambda a: a | {"bias": torch.zeros(VOCABULARY)},
    "bias is on meta": lambda a: a | {"bias": torch.zeros(VOCABULARY, device="meta", dtype=torch.float64)},
    "chunk_tokens=0": lambda a: a | {"chunk_tokens": 0},
    "chunk_tokens=2.5": lambda a: a | {"chunk_tokens": 2.5},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_argument_and_value(message):
    hidden, weight, labels = make_inputs()
    arguments = {"hidden": hidden, "lm_head_weight": weight, "labels": labels, "plan": make_plan(SEQLEN)}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        next_token_loss(**REFUSED[message](arguments))


def test_options_are_keyword_only():
    hidden, weight, labels = make_inputs()
    with pytest.raises(TypeError, match="positional"):
        next_token_loss(hidden, weight, labels, make_plan(SEQLEN), -100)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_rounds_only_operands_and_result(dtype):
    inputs = make_inputs(dtype, seqlen=300, vocabulary=101, width=48)
    exact = run(*(x.double() for x in inputs[:2]), inputs[2], loss=torch_loss)
    ours = run(*(x.cuda() for x in inputs), chunk_tokens=13)
    theirs = run(*(x.cuda() for x in inputs), loss=torch_loss)
    assert relative(ours[0].cpu(), exact[0]) <= 1e-6
    for x, their, y in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert (x.cpu().double() - y).abs().max() <= 1.25 * (their.cpu().double() - y).abs().max()
