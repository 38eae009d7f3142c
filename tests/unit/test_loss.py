"""next_token_loss on one rank, compared with torch's own cross entropy."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from burst_attention import make_plan
from burst_attention.loss import Head, LogitForm, next_token_loss
from burst_attention.loss.head import default_chunk

BATCH, SEQLEN, WIDTH, VOCABULARY = 2, 37, 12, 29


def make_inputs(dtype=torch.float64, *, seqlen=SEQLEN, vocabulary=VOCABULARY, width=WIDTH, seed=0, drop=0.3):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, seqlen, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocabulary, (BATCH, seqlen), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < drop] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def torch_loss(hidden, weight, labels, num_valid=None):
    logits = F.linear(hidden, weight)
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


@pytest.mark.parametrize(("chunk_tokens", "num_valid"), [(None, 5), (1, None), (7, 123.0), (1000, torch.tensor(64))])
def test_fp64_equals_torch(chunk_tokens, num_valid):
    inputs = make_inputs()
    ours = run(*inputs, chunk_tokens=chunk_tokens, num_valid=num_valid, grad=1.7)
    theirs = run(*inputs, loss=torch_loss, num_valid=num_valid, grad=1.7)
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == torch.float64
        assert relative(x, y) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_of_a_head(dtype):
    hidden, weight, _ = make_inputs(dtype)
    bias = torch.linspace(-1, 1, VOCABULARY, dtype=dtype, requires_grad=True)
    head = Head(weight, bias, LogitForm(-3.0, 7))
    expected = F.linear(hidden, weight, head.bias) * head.form.factor
    expected = torch.tanh(expected / head.form.softcap) * head.form.softcap
    assert torch.equal(head.logits(hidden), expected)
    assert not head.logits(hidden).requires_grad


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


@pytest.mark.parametrize(("num_valid", "seqlen"), [(None, SEQLEN), (0, 0), (7, SEQLEN)])
def test_no_valid_token_gives_zero_and_stays_connected(num_valid, seqlen):
    hidden, weight, labels = make_inputs(torch.bfloat16, seqlen=seqlen, drop=1.1)
    assert (labels == -100).all()
    value, dhidden, dweight = run(hidden, weight, labels, num_valid=num_valid, grad=float("inf"))
    assert value.item() == 0.0
    assert torch.equal(dhidden, torch.zeros_like(hidden))
    assert torch.equal(dweight, torch.zeros_like(weight))


def test_default_chunk():
    for tokens, vocabulary, width in itertools.product((1, 5, 1000, 16384), (1, 256, 128256), (8, 4096)):
        chunk = default_chunk(tokens, vocabulary, width)
        assert 1 <= chunk <= -(-tokens // 4)
        assert chunk == 1 or chunk * vocabulary <= max(2**22, tokens * width)


def test_options_are_keyword_only():
    hidden, weight, labels = make_inputs()
    with pytest.raises(TypeError, match="positional"):
        next_token_loss(hidden, weight, labels, make_plan(SEQLEN), -100)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_rounds_only_operands_and_result(dtype):
    inputs = make_inputs(dtype, seqlen=300, vocabulary=101, width=48)
    exact = run(*(x.double() for x in inputs[:2]), inputs[2], loss=torch_loss)
    ours, theirs = (run(*(x.cuda() for x in inputs), loss=loss) for loss in (next_token_loss, torch_loss))
    assert relative(ours[0].cpu(), exact[0]) <= 1e-6
    for x, their, y in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert (x.cpu().double() - y).abs().max() <= 1.25 * (their.cpu().double() - y).abs().max()
