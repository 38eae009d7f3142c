"""Compare a strategy's results with fp64. Wrong strategies get no figures."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from burst_attention.testing.check import relative_l2
from burst_train.step.model import quieten_transformers

from .calls import errors_over_ranks, reference
from .subjects import AttentionSubject, ModelSubject, llama_config, make_subject, random_ids, refusal, shared
from .trace import Trace
from .workload import Workload, random_qkv

FLOOR = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
# Allowed differences relative to a tensor's size, where roundings add up: between strategies, in sums over tokens.
AGREEMENT = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
FACTOR = 3.0  # times the error of a single rank in the same dtype


def judge(workload: Workload) -> dict[str, tuple[float, float]]:
    """Return (relative L2 error against fp64, its bound) of each strategy that supports ``workload``.

    Both are those of the worst tensor. The tensors are out, dq, dk and dv; each parameter's gradient; or the logits. A
    bound is ``FACTOR`` times the error of a single rank in the same dtype. All ranks must call this and get the same
    figures. ``seq_len`` must be short enough for fp64.
    """
    quieten_transformers()
    able = [spec for spec in workload.strategies if refusal(workload, shared(spec)) is None]
    if workload.task == "attention":
        exact, by_name = reference(workload, dense=True)
        stock = list(by_name.values())
        errors = {spec: _attention_errors(workload, spec, exact) for spec in able}
    else:
        exact = _stock(workload)
        alone = ModelSubject(workload, shared("single"), Trace(), groups=dist.get_world_size())
        stock = _errors(_gradients_or_logits(alone), exact)
        errors = {spec: _model_errors(workload, spec, exact) for spec in able}
    bounds = [max(FACTOR * error, FLOOR[workload.dtype]) for error in stock]
    return {spec: _worst(own, bounds) for spec, own in errors.items()}


def _worst(errors: list[float], bounds: list[float]) -> tuple[float, float]:
    """Return the error with the largest ratio to its bound, and the bound; NaN counts as largest."""
    return max(
        zip(errors, bounds, strict=True), key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / pair[1]
    )


def sampled_error(workload: Workload, subject: Any, rows: int = 32) -> float | None:
    """Return the error of an attention subject's last out and dq, against fp64, in a few rows of each rank.

    A few rows are affordable at any length. Two sums of dK and of dV show errors above :data:`AGREEMENT`. The result is
    None for other subjects.
    """
    if not isinstance(subject, AttentionSubject):
        return None
    q, k, v, dout = random_qkv(workload)
    positions = subject.plan.positions
    picked = torch.randperm(len(positions), generator=torch.Generator().manual_seed(workload.seed))[:rows]
    squares = torch.zeros(2, 2, dtype=torch.float64)
    for local in picked.tolist():
        at = int(positions[local])
        expected = _one_row(q[0, :, at], k[0, :, : at + 1], v[0, :, : at + 1], dout[0, :, at])
        for n, right in enumerate(expected):
            actual = subject.results[n][0, :, local].double()
            squares[n] += torch.stack([(actual - right).square().sum(), right.square().sum()])
    dist.all_reduce(squares)
    sampled, off = (squares[:, 0] / squares[:, 1]).sqrt().max(), _off_balance(subject)  # NaN if one of them is
    return (sampled if off <= AGREEMENT[workload.dtype] else torch.maximum(sampled, off)).item()


def _off_balance(subject: AttentionSubject) -> Tensor:
    """Return the error of sum(dV * V) = sum(dO * O) and sum(dK * K) = sum(dQ * Q), relative to the terms' size."""
    out, *grads = subject.results
    q, k, v, dout = subject.inputs
    products = [x.double() * y.double() for x, y in zip((dout, *grads), (out, q, k, v), strict=True)]
    totals = torch.stack([torch.stack([x.sum(), x.square().sum()]) for x in products])
    dist.all_reduce(totals)
    sums, weights = totals.unbind(1)  # of dO * O, dQ * Q, dK * K, dV * V
    return ((sums[[3, 2]] - sums[:2]).abs() / (weights[[3, 2]] + weights[:2]).sqrt()).max()


def _one_row(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, dq) [H, D] of one query in fp64, from q and dout [Hq, D], k and v [Hkv, S, D]."""
    group = q.shape[0] // k.shape[0]
    q, k, v, dout = q.double(), k.double(), v.double(), dout.double()
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.softmax(torch.einsum("hd,hsd->hs", q, k) * scale, -1)
    out = torch.einsum("hs,hsd->hd", p, v)
    ds = p * (torch.einsum("hd,hsd->hs", dout, v) - (dout * out).sum(-1, keepdim=True))
    return out, scale * torch.einsum("hs,hsd->hd", ds, k)


def _attention_errors(workload: Workload, spec: str, exact: list[Tensor]) -> list[float]:
    subject = make_subject(workload, shared(spec), Trace())
    assert isinstance(subject, AttentionSubject)
    subject.run()
    return errors_over_ranks(subject.results, [subject.plan.shard(whole, 2) for whole in exact])


def _model_errors(workload: Workload, spec: str, exact: list[Tensor]) -> list[float]:
    subject = make_subject(workload, shared(spec), Trace())
    assert isinstance(subject, ModelSubject)
    return _errors(_gradients_or_logits(subject), exact)


def _stock(workload: Workload) -> list[Tensor]:
    """Return the results of transformers' own model in fp64, without our code; every rank computes the same."""
    torch.manual_seed(workload.seed)
    model: Any = AutoModelForCausalLM.from_config(llama_config(workload), attn_implementation="sdpa").double()
    ids = random_ids(workload)
    if workload.task == "prefill":
        with torch.no_grad():
            return [model(input_ids=ids, logits_to_keep=1).logits[:, 0]]
    model(input_ids=ids, labels=ids).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def _gradients_or_logits(subject: ModelSubject) -> list[Tensor]:
    """Return each parameter's gradient, or the logits, on every rank."""
    if subject.workload.task == "prefill":
        return [subject.logits()]
    subject.backward()
    grads: list[Any] = [p.grad for p in subject.model.parameters()]
    return [grad.full_tensor() for grad in grads]


def _errors(actual: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [relative_l2(x, y) for x, y in zip(actual, exact, strict=True)]
