"""Scales of any sign and size: against fp64 on several ranks, in every kernel, through every entry, or refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from burst_attention import DisagreementError, Mask, Strategy, burst_attention, make_plan
from burst_attention.compat import ring_flash_attn as compat
from burst_attention.testing import Case, attend, local_world
from burst_attention.testing.check import relative_l2
from burst_train.step.compare import whole_attention
from tests.support.conditioning import greatest

SIGNS = (-0.7, 0.0, 0.3)
CASE = Case(seqlen=44, q_heads=4, kv_heads=2, head_dim=8)
MASKS = {"causal": Mask(), "window": Mask(window=9), "documents": Mask(cu_seqlens=[0, 5, 29, 44])}


def errors(case: Case, scale: float, attention=burst_attention, group=None) -> float:
    """The worst error of out and the gradients of q, k and v on this rank, against dense attention in fp64."""
    plan, inputs = make_plan(case.seqlen, mask=case.mask, group=group, strategy=case.strategy), case.inputs()
    chosen = {"kernel": case.kernel} if attention is burst_attention else {}
    leaves = [plan.shard(inputs[name], 2).requires_grad_() for name in ("q", "k", "v")]
    out = attention(*leaves, plan, scale=scale, **chosen)
    grads = torch.autograd.grad(out, leaves, plan.shard(inputs["dout"], 2))
    right = attend(inputs["q"], inputs["k"], inputs["v"], case.mask, dout=inputs["dout"], scale=scale)
    wanted = [plan.shard(x, 2) for x in (right.out, right.dq, right.dk, right.dv)]
    return max(map(relative_l2, (out, *grads), wanted))


def worst(world: int, case: Case, scale: float, attention: Any = burst_attention) -> float:
    with local_world(world) as ranks:
        return greatest(ranks.run(lambda group: errors(case, scale, attention, group)))


@pytest.mark.parametrize("scale", SIGNS)
@pytest.mark.parametrize("kernel", ["reference", "aten", "aten-fp32"])
def test_every_sign_on_the_cpu(kernel: str, scale: float) -> None:
    for mask, circulate in zip(MASKS, ("query", "key-value", "nearest"), strict=True):
        assert worst(2, replace(CASE, mask=MASKS[mask], kernel=kernel, circulate=circulate), scale) < 1e-5


@pytest.mark.parametrize("scale", SIGNS)
def test_every_sign_with_heads_cut(scale: float) -> None:
    for heads, keep in ((2, True), (4, False), (4, True)):
        assert worst(4, replace(CASE, ulysses_degree=heads, cache_qkv=keep, kv_heads=4), scale) < 1e-5


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, -0.7), (torch.float32, 0.0), (torch.float16, -0.7)])
@pytest.mark.long
def test_every_sign_in_the_triton_kernel(dtype, scale: float) -> None:
    pytest.importorskip("triton")
    case = replace(CASE, kernel="triton", dtype=dtype, mask=Mask(window=9), head_dim=16)
    assert worst(2, case, scale) < (1e-5 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("scale", SIGNS)
def test_every_sign_in_other_strategies(pools, scale: float) -> None:
    case = replace(CASE, mask=Mask(window=9), q_heads=4, kv_heads=4)

    def whole(q, k, v, plan, *, scale):
        return whole_attention(q, k, v, (0, plan.seqlen), window=plan.mask.window, scale=scale)

    assert errors(case, scale, whole) < 1e-5


def by_ring_flash_attn(group: Any, scale: float) -> float:
    inputs, plan = CASE.inputs(), make_plan(44, group=group, strategy=Strategy(layout="zigzag", ulysses_degree=1))
    q, k, v, dout = (plan.shard(inputs[name], 2).transpose(1, 2) for name in ("q", "k", "v", "dout"))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = compat.zigzag_ring_flash_attn_func(*leaves, softmax_scale=scale, causal=True, group=group)
    grads = torch.autograd.grad(out, leaves, dout)
    right = attend(inputs["q"], inputs["k"], inputs["v"], Mask(), dout=inputs["dout"], scale=scale)
    wanted = [plan.shard(x, 2).transpose(1, 2) for x in (right.out, right.dq, right.dk, right.dv)]
    return max(map(relative_l2, (out, *grads), wanted))


@pytest.mark.parametrize("scale", SIGNS)
def test_every_sign_by_other_packages_names(scale: float) -> None:
    with local_world(2) as ranks:
        assert greatest(ranks.run(by_ring_flash_attn, scale)) < 1e-5


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_every_sign_in_a_compiled_call(scale: float) -> None:
    def compiled(*tensors, scale: float, **_) -> torch.Tensor:
        torch.compiler.reset()  # a second scale would be a variable of the graph
        return torch.compile(burst_attention, fullgraph=True, backend="aot_eager")(*tensors, scale=scale)

    assert errors(CASE, scale, compiled) < 1e-5


def test_a_zero_scale_keeps_nan_in_sight() -> None:
    q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    q[0, 0, 3, 2] = torch.nan
    out = burst_attention(q, k, v, make_plan(10), scale=0.0)
    assert out[0, 0, 3].isnan().all() and out[0, 1].isfinite().all()


def signs_apart(group: Any) -> str:
    plan = make_plan(12, timeout=5, group=group)
    q, k, v = (torch.randn(1, 2, plan.length, 8) for _ in range(3))
    try:
        burst_attention(q, k, v, plan, scale=(0.5, -0.5)[plan.rank])
    except DisagreementError as error:
        return str(error)
    return "nothing"


def test_ranks_whose_scales_differ_in_sign_alone_disagree() -> None:
    with local_world(2) as ranks:
        texts = ranks.run(signs_apart)
    for text in texts:
        assert "the ranks disagree on scale: rank 0 has 0.5, rank 1 has -0.5" in text


OUT_OF_RANGE = {torch.float32: (5e-324, -1e-40, 1.1e-38, 2e38, -1e300), torch.float64: (5e-324, -1e-310, 1.2e308)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_that_scores_can_not_hold_is_refused(dtype) -> None:
    q, wide = torch.randn(1, 2, 10, 8).to(dtype), torch.promote_types(dtype, torch.float32)
    for scale in OUT_OF_RANGE[wide]:
        reported = rf"scale={scale} is too (small|large) for {wide}, .* Use 0, or a size from"
        with pytest.raises(ValueError, match=reported.replace("+", r"\+")):
            burst_attention(q, q, q, make_plan(10), scale=scale)
        with pytest.raises(ValueError, match="scale="):
            compat.ring_flash_attn_func(q, q, q, softmax_scale=np.float64(scale), causal=True)


@pytest.mark.parametrize("kernel", ["reference", "aten", "aten-fp32", "triton"])
def test_the_least_scale_gives_what_zero_gives(kernel: str) -> None:
    plan, given = make_plan(20, mask=Mask(window=7)), CASE.inputs()
    q, k, v = (given[name][:, :, :20].requires_grad_() for name in ("q", "k", "v"))
    least = burst_attention(q, k, v, plan, scale=torch.finfo(torch.float32).tiny, kernel=kernel)
    grads = torch.autograd.grad(least.sum(), (q, k, v))
    assert relative_l2(least, burst_attention(q, k, v, plan, scale=0.0, kernel=kernel)) < 1e-6
    assert all(x.isfinite().all() for x in grads)


def test_a_scale_with_a_gradient_is_refused() -> None:
    q = torch.randn(1, 1, 8, 4)
    plan = make_plan(8)
    assert torch.equal(
        burst_attention(q, q, q, plan, scale=torch.tensor(0.5)), burst_attention(q, q, q, plan, scale=0.5)
    )
    with pytest.raises(ValueError, match="must be a finite number"):
        burst_attention(q, q, q, plan, scale=torch.tensor(0.5, requires_grad=True))
