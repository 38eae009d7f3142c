"""token_log_probs on one rank, against logits written out."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F

from burst_attention import Mask, make_plan
from burst_attention.loss import TokenLogProbs, token_log_probs

BATCH, SEQLEN, WIDTH, VOCABULARY = 2, 37, 12, 29
ALL = tuple(field.name for field in fields(TokenLogProbs))
DIFFERENTIABLE = ("log_probs", "entropy")
MASK = Mask(cu_seqlens=(0, 9, 10, SEQLEN))
FORMS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "bias": {"bias": True},
    "factor and temperature": {"factor": 0.25, "temperature": 3},
    "softcap and temperature": {"softcap": 2.5, "temperature": 0.5},
    "all": {"bias": True, "factor": -1.5, "softcap": 4, "temperature": 1.6},
}


def make_inputs(dtype=torch.float64, *, seqlen=SEQLEN, vocabulary=VOCABULARY, width=WIDTH, biased=True):
    """(hidden, weight, bias) leaves and token ids."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, seqlen, width), (vocabulary, width), (vocabulary,)][: 3 if biased else 2]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    ids = torch.randint(vocabulary, (BATCH, seqlen), generator=generator)
    return [x.requires_grad_() for x in leaves], ids


def dense(hidden, weight, bias, ids, *, temperature=1.0, factor=1.0, softcap=None, ends=()):
    """All fields for all positions at once, in the dtype of the inputs; ``ends``: positions without a label."""
    logits = F.linear(hidden[:, :-1], weight, bias) * factor
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits / temperature
    log_p, labels = logits.log_softmax(-1), ids[:, 1:, None]
    given = {
        "log_probs": log_p.gather(-1, labels).squeeze(-1),
        "entropy": torch.distributions.Categorical(logits=logits).entropy(),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == labels.squeeze(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
    }
    keeps = torch.tensor([position not in ends for position in range(ids.shape[1] - 1)])
    return {name: torch.where(keeps, x, torch.zeros((), dtype=x.dtype)) for name, x in given.items()}


def ends_of(mask):
    return {border - 1 for border in mask.cu_seqlens or ()}


def both(name, *, dtype=torch.float64, mask=MASK, outputs=ALL, exact=False, **options):
    """Per side (ours, dense): its fields, and its leaves. ``exact``: the dense side is in fp64."""
    form, sides = dict(FORMS[name]), []
    biased = form.pop("bias", False)
    for ours in (True, False):
        leaves, ids = make_inputs(dtype, biased=biased)
        if exact and not ours:
            leaves = [x.detach().double().requires_grad_() for x in leaves]
        hidden, weight, bias = leaves if biased else (*leaves, None)
        if ours:
            plan = make_plan(SEQLEN, mask=mask)
            labels = plan.shard_labels(ids)
            result = token_log_probs(hidden, weight, labels, plan, bias=bias, outputs=outputs, **form, **options)
            given = {field: getattr(result, field) for field in ALL}
        else:
            given = dense(hidden, weight, bias, ids, ends=ends_of(mask), **form)
        sides.append((given, leaves))
    return sides


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 1000])
@pytest.mark.parametrize("name", FORMS)
def test_fields_equal_the_dense_ones(name, chunk_tokens):
    (ours, _), (theirs, _) = both(name, chunk_tokens=chunk_tokens)
    for field in ALL:
        assert ours[field].shape == (BATCH, SEQLEN - 1)
        if field == "is_top1":
            assert torch.equal(ours[field], theirs[field])
            assert 0 < ours[field].sum() < ours[field].numel()
        else:
            assert ours[field].dtype == torch.float64
            assert relative(ours[field], theirs[field]) <= 1e-12
        assert not ours[field][:, [8, 9]].any(), "a document's last token has no label"


# Weights of log_probs and entropy in a loss, each [BATCH, SEQLEN - 1].
WEIGHTS = {
    "a mean of log_probs": lambda draw: (torch.full_like(draw(), -1 / 72), 0 * draw()),
    "log_probs": lambda draw: (draw(), 0 * draw()),
    "entropy": lambda draw: (0 * draw(), draw()),
    "both": lambda draw: (draw(), draw()),
    "few": lambda draw: (draw() * (draw() > 1), draw() * (draw() > 1)),
    "of all sizes": lambda draw: (draw() * 10 ** (4 * draw()), draw() * 10 ** (4 * draw())),
}


def weights_of(name, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return WEIGHTS[name](lambda: torch.randn(BATCH, SEQLEN - 1, generator=generator, dtype=torch.float64).to(dtype))


def gradients(side, weights):
    fields, leaves = side
    sum((w * fields[name]).sum() for w, name in zip(weights, DIFFERENTIABLE, strict=True)).backward()
    return [x.grad for x in leaves]


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_gradients_equal_the_dense_ones(name, weights, chunk_tokens):
    ours, theirs = (gradients(side, weights_of(weights)) for side in both(name, chunk_tokens=chunk_tokens))
    assert len(ours) == (3 if "bias" in FORMS[name] else 2)
    for x, y in zip(ours, theirs, strict=True):
        assert relative(x, y) <= 1e-12


def test_gradcheck():
    leaves, ids = make_inputs(seqlen=5, vocabulary=6, width=3)
    plan = make_plan(5)

    def fields(hidden, weight, bias):
        options = {"bias": bias, "factor": 1.3, "softcap": 3.0, "temperature": 0.8, "chunk_tokens": 3}
        result = token_log_probs(hidden, weight, plan.shard_labels(ids), plan, **options)
        return result.log_probs, result.entropy

    assert torch.autograd.gradcheck(fields, leaves)
