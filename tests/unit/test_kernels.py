"""Kernels on one device: pieces, merging, surrogate outputs, and comparison with the reference and the oracle."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from burst_attention import Mask
from burst_attention.kernels import choose
from burst_attention.kernels.aten import SMALL, split_into_pieces
from burst_attention.kernels.contract import BackwardInputs, blank_output, finite_lse, merge_
from burst_attention.kernels.stock import appended_columns, backward_calls, surrogate_output
from burst_attention.plan.layout import Layout
from burst_attention.plan.tile import Tile, Tiles
from burst_attention.testing import attend, dense_attention
from burst_attention.testing.check import relative_l2
from burst_attention.testing.oracle import torch_attention
from tests.support.conditioning import half_an_ulp_away
from tests.support.pairwise import covering_array
from tests.support.schedules import pair_tiles
from tests.unit.test_plan import seen_by_tile, worlds

CPU = torch.device("cpu")

ANYWHERE = ("reference", "aten", "aten-fp32", "blockwise")  # what every CPU runs; test_triton.py has the other


def tiles_of(mask: Mask, seqlen: int) -> Tiles:
    layout = Layout("contiguous", seqlen, 1)
    return pair_tiles(layout, layout, mask.regions(seqlen), [0], [0])[0, 0]


def seen_by_pieces(tiles: Tiles, shape: tuple[int, int]) -> np.ndarray:
    seen = np.zeros(shape, int)
    for piece in split_into_pieces(tiles):
        rows, columns = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
        inside = np.ones((rows, columns), bool)
        if piece.causal:
            assert rows >= columns, "the flash kernel's causal mask is aligned to the top left"
            inside = np.tril(inside)
        if piece.reverse:
            inside = inside[::-1, ::-1]
        if piece.masked:
            assert not piece.causal and not piece.reverse
            inside = np.zeros((rows, columns), bool)
            for tile in piece.masked:
                top, left = tile.q_start - piece.q_start, tile.k_start - piece.k_start
                inside[top : top + tile.rows, left : left + tile.columns] |= seen_by_tile(tile)
        seen[piece.q_start : piece.q_stop, piece.k_start : piece.k_stop] += inside
    return seen


def seen_by_tiles(tiles: Tiles, shape: tuple[int, int]) -> np.ndarray:
    seen = np.zeros(shape, int)
    for tile in tiles:
        seen[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += seen_by_tile(tile)
    return seen


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_pieces_cover_tiles_once(world) -> None:
    layout, mask = world
    ranks = range(layout.world)
    for (i, j), tiles in pair_tiles(layout, layout, mask.regions(layout.seqlen), ranks, ranks).items():
        shape = layout.lengths[i], layout.lengths[j]
        np.testing.assert_array_equal(seen_by_pieces(tiles, shape), seen_by_tiles(tiles, shape))


def test_large_bands_are_cut_exactly() -> None:
    factors = {
        "rows": [300, 511, 767, 900],  # also a row less than blocks of 256
        "columns": [280, 1000],
        "lo": [-2000, -900, -300, -5, -1, 0, 40, 250],
        "width": [1, 7, 100, 256, 257, 600, 5000],
    }
    for case in covering_array(factors) + covering_array(factors, seed=1):
        rows, columns, lo = case["rows"], case["columns"], case["lo"]
        whole, hi = Tile(0, rows, 0, columns, 1 - columns, rows - 1), min(lo + case["width"] - 1, rows - 1)
        tile = whole._replace(lo=max(lo, 1 - columns), hi=hi).part((0, rows), (0, columns))
        if tile is not None:
            tiles = Tiles(np.array([tile]))
            pieces = list(split_into_pieces(tiles))
            np.testing.assert_array_equal(seen_by_pieces(tiles, (rows, columns)), seen_by_tiles(tiles, (rows, columns)))
            computed = sum((p.q_stop - p.q_start) * (p.k_stop - p.k_start) for p in pieces)
            assert computed <= 2 * tiles.area + len(pieces) * SMALL * (SMALL + 128), "a band costs what it covers"


def test_many_small_documents_take_few_launches() -> None:
    tiles = tiles_of(Mask(cu_seqlens=range(0, 4001, 10)), 4000)
    assert len(tiles) == 400 and len(list(split_into_pieces(tiles))) <= 4000 // (SMALL // 2)


def test_short_windows_take_few_launches() -> None:
    for window in (1, 8, 100, 255, 256, 700):
        launches = list(split_into_pieces(tiles_of(Mask(window=window), 4096)))
        assert len(launches) <= 4096 // (SMALL // 2) + 2
        assert all(each.q_stop - each.q_start <= max(SMALL, window) for each in launches)


CASES = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "narrow window": Mask(window=33),
    "wide window": Mask(window=300),
    "documents": Mask(cu_seqlens=[0, 1, 5, 300, 301, 680, 700]),
    "prefix": Mask(prefix=130),
    "window in documents": Mask(window=270, cu_seqlens=[0, 650, 700]),
}


def inputs(dtype: torch.dtype, seqlen: int = 700, dim: int = 24, value_dim: int = 24) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(5)
    shapes = [(4, dim), (2, dim), (2, value_dim), (4, value_dim)]
    # [B, S, H, D] in memory, as models give it
    return [torch.randn(2, seqlen, h, d, generator=make, dtype=dtype).transpose(1, 2) for h, d in shapes]


@cache
def oracle_of(name: str, dtype: torch.dtype, softcap: float | None):
    q, k, v, dout = given = inputs(dtype, value_dim=40 if name == "prefix" else 24)
    return given, attend(q, k, v, CASES[name], dout=dout, softcap=softcap)


@cache
def changes_of(name: str, dtype: torch.dtype) -> dict[str, float]:
    """Return how far the oracle's results move when q, k and v move by half an ulp of their dtype."""
    (*tensors, dout), oracle = oracle_of(name, dtype, None)
    moved = attend(*half_an_ulp_away(tensors, dtype), CASES[name], dout=dout)
    return {what: relative_l2(x, y) for (what, y), (_, x) in zip(oracle.items(), moved.items(), strict=True)}


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MATRIX = covering_array({"kernel": [*ANYWHERE, "reference-0.3", "blockwise-2.0"], "mask": [*CASES], "dtype": DTYPES})
MATRIX.append({"kernel": "aten", "mask": "narrow window", "dtype": torch.float64})  # which gets a mask


@pytest.mark.parametrize(
    ("kernel", "mask", "dtype"), [pytest.param(*row.values(), id="-".join(map(str, row.values()))) for row in MATRIX]
)
def test_kernels_against_the_oracle(kernel: str, mask: str, dtype: torch.dtype) -> None:
    name, _, cap = kernel.partition("-") if "." in kernel else (kernel, "", "")
    softcap, wide = float(cap) if cap else None, torch.promote_types(dtype, torch.float32)
    (q, k, v, dout), oracle = oracle_of(mask, dtype, softcap)
    chosen = choose(name, device=CPU, dtype=dtype, softcap=softcap)
    tiles, scale = tiles_of(CASES[mask], 700), 24**-0.5
    out, lse = chosen.forward(q, k, v, tiles, scale)
    assert lse.dtype == wide
    delta = (oracle.out * dout.double()).sum(-1).to(wide)
    grads = chosen.backward(BackwardInputs(dout, q, k, v, oracle.lse.to(wide), delta, tiles, scale))
    exact = chosen.exact_partials(dtype)
    if exact:
        assert {x.dtype for x in (out, *grads)} == {wide}
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(wide if exact else dtype)
    plain = oracle_of(mask, dtype, None)[1]
    for actual, (what, expected), (_, other) in zip((out, lse, *grads), oracle.items(), plain.items(), strict=True):
        assert actual.shape == expected.shape
        # A kernel that rounds each tile to its dtype may be off by what the rounding of its inputs does.
        most = 4 * changes_of(mask, dtype)[what] if bound is None else bound
        assert relative_l2(actual, expected) <= most, what
        assert not cap or relative_l2(other, expected) > 100 * most, "the cap must matter"


@pytest.mark.parametrize("kernel", ANYWHERE)
def test_rows_that_no_tile_covers(kernel: str) -> None:
    """A gap of rows inside the buffers: out 0, lse -inf, gradient 0, and no NaN from lse -inf in the backward."""
    q, k, v, dout = inputs(torch.float32, seqlen=40)
    tiles = Tiles(np.array([(0, 10, 0, 10, 0, 9), (30, 40, 0, 12, -11, 9)]))
    chosen = choose(kernel, device=CPU, dtype=torch.float32)
    out, lse = chosen.forward(q, k, v, tiles, 0.2)
    assert (out[:, :, 10:30] == 0).all() and (lse[:, :, 10:30] == -math.inf).all()
    assert lse[:, :, :10].isfinite().all() and lse[:, :, 30:].isfinite().all()
    delta = (out * dout).sum(-1)
    dq, dk, dv = chosen.backward(BackwardInputs(dout, q, k, v, finite_lse(lse), delta, tiles, 0.2))
    assert (dq[:, :, 10:30] == 0).all() and (dk[:, :, 12:] == 0).all() and (dv[:, :, 12:] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("kernel", ANYWHERE)
def test_kernels_write_to_nothing_they_are_given(kernel: str) -> None:
    tensors = inputs(torch.float32, seqlen=50)
    q, k, v, dout = tensors
    chosen, tiles = choose(kernel, device=CPU, dtype=torch.float32), tiles_of(Mask(window=9), 50)
    out, lse = chosen.forward(q, k, v, tiles, 0.2)
    delta = (out * dout).sum(-1)
    tensors += [lse, delta]
    copies = [x.clone() for x in tensors]
    chosen.backward(BackwardInputs(dout, q, k, v, lse, delta, tiles, 0.2))
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_merge_is_a_split_softmax() -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 30, 8, generator=make, dtype=torch.float64) for _ in range(3))
    whole, lse = dense_attention(q, k, v, Mask(causal=False))
    out, total = blank_output(q, v, 30, torch.float64)
    for part in (slice(0, 11), slice(11, 12), slice(12, 30)):
        scores = q @ k[:, :, part].mT / 8**0.5
        merge_(out, total, torch.softmax(scores, -1) @ v[:, :, part], torch.logsumexp(scores, -1))
    assert relative_l2(out, whole) < 1e-14 and relative_l2(total, lse) < 1e-14


def test_merge_with_rows_that_see_nothing() -> None:
    blank = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -math.inf)
    some = torch.ones(1, 1, 2, 3), torch.tensor([[[0.5, -math.inf]]])
    some[0][:, :, 1] = 0
    for a, b in ((blank, some), (some, blank)):
        out, lse = a[0].clone(), a[1].clone()
        merge_(out, lse, *b)
        assert torch.equal(out, some[0]) and torch.equal(lse, some[1])
    out, lse = blank[0].clone(), blank[1].clone()
    merge_(out, lse, *blank)
    assert torch.equal(out, blank[0]) and torch.equal(lse, blank[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_surrogate_carries_delta(dtype: torch.dtype) -> None:
    for dim in (1, 2, 64):
        dout, out = (torch.randn(1, 4, 100, dim, dtype=torch.float64).to(dtype) for _ in range(2))
        wide = torch.promote_types(dtype, torch.float32)
        delta = (dout.to(wide) * out.to(wide)).sum(-1)
        dout[0, 0, :50], delta[0, 0, :50] = 0, 0
        surrogate = surrogate_output(dout, delta)
        carried = (dout.double() * surrogate.double()).sum(-1)
        # One column rounds D once in the dtype; a second takes up what was lost.
        bound = torch.finfo(dtype).eps if dim == 1 else min(torch.finfo(dtype).eps, 1e-4)
        assert relative_l2(carried, delta) <= bound


@pytest.mark.parametrize("shrink", [1.0, 1e-25])
def test_a_surrogate_carries_delta_of_any_size(shrink: float) -> None:
    for scale in (1e-30, 3e-22, 1e-12, 1e12, 1e18, 1e25):
        make = torch.Generator().manual_seed(0)
        dout, out = (torch.randn(1, 2, 50, 64, generator=make) for _ in range(2))
        dout *= scale
        delta = (dout.double() * out.double() * shrink).sum(-1).float()
        surrogate = surrogate_output(dout, delta)
        carried = (dout.double() * surrogate.double()).sum(-1)
        normal = delta.abs() >= torch.finfo(torch.float32).tiny
        assert ((carried - delta).abs() <= 4e-7 * delta.abs())[normal].all()


def test_appended_columns_carry_what_no_gradient_can() -> None:
    dout, delta = torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5)
    dout[0, 1, 2] = 0
    assert (surrogate_output(dout, delta)[0, 1, 2] == 0).all()
    ones, columns = appended_columns(dout.bfloat16(), delta)
    carried = (ones.double() * columns.double()).sum(-1)
    assert ones.shape[-1] == columns.shape[-1] == 11 and relative_l2(carried, delta) < 1e-6
    (call,) = backward_calls(dout, delta, widest=None, of_lse=True)
    assert call.out.shape[-1] == 11


def test_memory_that_nothing_was_written_to_holds_nan() -> None:
    for empty in (torch.empty(3, 4), torch.zeros(2).new_empty(5), torch.empty_like(torch.zeros(3).half())):
        assert empty.isnan().all()


class Blind(Mask):
    """A causal mask under which the first two queries attend to no key."""

    def dense(self, seqlen: int) -> np.ndarray:
        seen = super().dense(seqlen)
        seen[:2] = False
        return seen


@pytest.mark.parametrize("mask", [Mask(), Blind()])
@pytest.mark.parametrize("length", [0, 7])
def test_the_oracle_takes_the_gradient_of_the_lse_alone(length, mask) -> None:
    q, k, v, dout, dlse = (torch.randn(1, 2, length, 4) for _ in range(5))
    dlse = dlse[..., 0]
    alone = attend(q, k, v, mask, dlse=dlse)
    both = attend(q, k, v, mask, dout=torch.zeros_like(dout), dlse=dlse)
    for name, gradient in alone.items():
        assert torch.equal(gradient, dict(both.items())[name]) and gradient.isnan().sum() == 0
    assert [name for name, _ in alone.items()] == ["out", "lse", "dq", "dk", "dv"]
    # d lse / d q = p @ k, by differences.
    if length and isinstance(mask, Blind):
        assert not alone.dq[:, :, :2].any()
    step = 1e-6 * torch.randn(1, 2, length, 4, dtype=torch.float64)
    seen = torch.from_numpy(mask.dense(length).any(1))
    moved, lse = (dense_attention(x, k.double(), v.double(), mask)[1] for x in (q + step, q.double()))
    change = ((moved - lse)[:, :, seen] * dlse[:, :, seen]).sum()
    torch.testing.assert_close(change, (alone.dq * step).sum(), rtol=1e-4, atol=1e-11)


@pytest.mark.parametrize(("mask", "scale"), [(Mask(), 0.9), (Mask(window=3), None), (Mask(cu_seqlens=[0, 4, 11]), 0.9)])
def test_the_measure_of_a_dtype_s_error_is_the_same_attention(mask: Mask, scale: float | None) -> None:
    q, k, v, dout = (torch.randn(2, heads, 11, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    exact = dict(attend(q, k, v, mask, dout=dout, scale=scale).items())
    for name, found in torch_attention(q, k, v, mask, dout=dout, scale=scale).items():
        torch.testing.assert_close(found, exact[name], rtol=1e-10, atol=1e-12)
