"""A NaN in an input reaches all rows that attend to it, in out, lse and every gradient, for each kernel."""

import math

import pytest
import torch
from torch import Tensor

from burst_attention import Mask, Strategy, burst_attention, make_plan
from burst_attention.kernels import choose
from burst_attention.kernels.contract import BackwardInputs
from burst_attention.testing import local_world
from tests.unit.test_kernels import tiles_of

CPU = torch.device("cpu")
LENGTH = 80
INPUTS, RESULTS = ("q", "k", "v", "dout"), ("out", "lse", "dq", "dk", "dv")
MASKS = {
    "documents": Mask(cu_seqlens=[0, 7, 8, 30, 31, 70, 79, 80]),
    "causal": Mask(),
    "window": Mask(window=9),
    "full documents": Mask(causal=False, cu_seqlens=[0, 3, 40, 41, 80]),
    "one key each": Mask(window=1),
}


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(3)
    shapes = {"q": (2, 16), "k": (1, 16), "v": (1, 8), "dout": (2, 8)}
    return {name: torch.randn(1, h, LENGTH, d, generator=make).to(dtype) for name, (h, d) in shapes.items()}


def spoiled(given: dict[str, Tensor], name: str, at: int) -> dict[str, Tensor]:
    """Replace one number in the first head of ``name``."""
    copy = given[name].clone()
    copy[0, 0, at, -1] = math.nan
    return given | {name: copy}


def reached(mask: Mask, name: str, at: int) -> dict[str, Tensor]:
    """Return bool [heads, rows]: rows that a NaN in the first head reaches in dense attention over unmasked pairs."""
    seen = torch.from_numpy(mask.dense(LENGTH))
    row, key = torch.zeros(2, LENGTH, dtype=torch.bool), torch.zeros(1, LENGTH, dtype=torch.bool)
    queries, keys = row.clone(), key.clone()
    (queries if name in ("q", "dout") else keys)[0, at] = True
    sees = queries | ((keys.float() @ seen.T.float()) > 0).repeat_interleave(2, 0)

    def keys_of(rows: Tensor) -> Tensor:
        return ((rows.float() @ seen.float()) > 0).any(0, keepdim=True)

    return {
        "out": row if name == "dout" else sees,
        "lse": sees if name in ("q", "k") else row,
        "dq": sees,
        "dk": keys_of(sees),
        "dv": key if name == "v" else keys_of(sees),
    }


def compare(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """No row that sees a NaN is finite. Kernels that multiply masked entries by 0 may spoil other rows, too."""
    for name in RESULTS:
        lost = mine[name][0].float().reshape(*mine[name].shape[1:3], -1).isnan().any(-1)
        assert lost[expected[name]].all(), name


def through_kernel(kernel, given: dict[str, Tensor], mask: Mask) -> dict[str, Tensor]:
    q, k, v, dout = (given[name] for name in INPUTS)
    tiles = tiles_of(mask, LENGTH)
    out, lse = kernel.forward(q, k, v, tiles, 0.25)
    delta = (out.float() * dout.float()).sum(-1)
    grads = kernel.backward(BackwardInputs(dout, q, k, v, lse, delta, tiles, 0.25))
    return dict(zip(RESULTS, (out, lse, *grads), strict=True))


def judge(kernel, dtype: torch.dtype, mask: Mask, places=(0, 7, 50, 79)) -> None:
    given = tensors(dtype)
    for name in INPUTS:
        for at in places:
            compare(through_kernel(kernel, spoiled(given, name, at), mask), reached(mask, name, at))


@pytest.mark.parametrize(
    ("kernel", "dtype", "mask"),
    [
        ("reference", torch.float32, "documents"),
        ("reference", torch.bfloat16, "window"),
        ("aten", torch.float32, "documents"),
        ("aten", torch.float32, "one key each"),
        ("aten", torch.bfloat16, "causal"),
        ("aten", torch.float16, "full documents"),
        ("aten-fp32", torch.bfloat16, "window"),
        ("aten-fp32", torch.float16, "causal"),
    ],
    ids=str,
)
def test_a_nan_reaches_what_sees_it(kernel: str, dtype: torch.dtype, mask: str) -> None:
    judge(choose(kernel, device=CPU, dtype=dtype), dtype, MASKS[mask])


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_nan_in_our_triton_kernel() -> None:
    pytest.importorskip("triton")
    judge(choose("triton", device=CPU, dtype=torch.float32), torch.float32, MASKS["documents"], (50,))


@pytest.mark.parametrize("kernel", ["reference", "aten"])
def test_sums_that_overflow_make_no_nan(kernel: str) -> None:
    """All numbers are finite although their sum is not; that alone is no error."""
    given = tensors(torch.float32)
    given["v"][:] = 1e37
    q, k, v, _ = (given[name] for name in INPUTS)
    chosen, tiles = choose(kernel, device=CPU, dtype=torch.float32), tiles_of(MASKS["documents"], LENGTH)
    out, lse = chosen.forward(q, k, v, tiles, 0.25)
    torch.testing.assert_close(out, torch.full_like(out, 1e37))
    assert lse.isfinite().all()


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {"layout": "contiguous"}),
        (2, {"layout": "zigzag", "circulate": "query"}),
        (3, {"layout": "striped", "circulate": "key-value"}),
        (3, {"layout": "contiguous", "circulate": "nearest"}),
        *((2, {"layout": "zigzag", "ulysses_degree": 2, "cache_qkv": True, "chunks": n}) for n in (1, 2)),
    ],
    ids=str,
)
def test_a_nan_on_any_number_of_ranks(world: int, options: dict) -> None:
    """With cached results the backward looks at out in place of q, k and v."""
    mask, given = MASKS["documents"], tensors(torch.float32)

    def call(group, given: dict[str, Tensor]) -> dict[str, Tensor]:
        plan = make_plan(LENGTH, mask=mask, group=group, strategy=Strategy(**options))
        q, k, v, dout = (plan.shard(given[name], 2) for name in INPUTS)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = burst_attention(*leaves, plan, kernel="aten")
        grads = torch.autograd.grad(out, leaves, dout)
        with torch.set_grad_enabled("cache_qkv" not in options):
            _, lse = burst_attention(*leaves, plan, kernel="aten", return_lse=True)
        return {name: plan.unshard(x.detach(), 2) for name, x in zip(RESULTS, (out, lse, *grads), strict=True)}

    with local_world(world) as ranks:
        for name in INPUTS:
            for mine in ranks.run(call, spoiled(given, name, 50)):
                compare(mine, reached(mask, name, 50))
