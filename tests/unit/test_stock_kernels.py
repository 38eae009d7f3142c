"""Adapters of GPU packages, tested with CPU emulations that have the packages' signatures and quirks.

tests/gpu tests the packages themselves. These tests cover windows, pieces, padding, layouts, lse and refusals.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from burst_attention import Mask, burst_attention, kernels, make_plan
from burst_attention.attention import call as attention_call
from burst_attention.kernels import aten, choose, cudnn_graphs, explain, flash, prove, windowed
from burst_attention.kernels.contract import BackwardInputs, merge_
from burst_attention.kernels.cudnn_graphs import CudnnGraphs
from burst_attention.kernels.prove import Remembered, check_against_reference
from burst_attention.kernels.reference import BLOCK, Reference
from burst_attention.kernels.stock import surrogate_output
from burst_attention.kernels.windowed import Window, Windowed, launches_of, window_of
from burst_attention.plan.tile import Tile, Tiles
from burst_attention.testing import attend, local_world
from burst_attention.testing.check import relative_l2
from tests.support.conditioning import half_an_ulp_away
from tests.support.tile_cases import BANDS, LARGE, compare, inputs
from tests.unit.test_plan import seen_by_tile

CPU = torch.device("cpu")


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return dense attention of [B, H, S, D] tensors, with key-value heads repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0) @ v, lse


def gradients(dout, q, k, v, out, lse, seen, scale, dlse=None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`dense` as flash backwards compute them: D from ``out``, P from ``lse``."""
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    p = torch.exp(q @ wide_k.mT * scale - lse.unsqueeze(-1)) * seen
    delta = (dout * out).sum(-1) - (0 if dlse is None else dlse)
    ds = p * (dout @ wide_v.mT - delta.unsqueeze(-1)) * scale
    dk, dv = ((x.mT @ y).unflatten(1, (heads, groups)).sum(2) for x, y in ((ds, q), (p, dout)))
    return ds @ wide_k, dk, dv


def bottom_right(rows: int, columns: int, left: int | None, right: int | None) -> Tensor:
    """Return the keys visible in FlashAttention 2's windows, with the rules of its set_params_fprop.

    None, a negative number, or at least the number of keys means no limit. If one side has a limit, no limit on the
    other side means the number of keys.
    """
    left, right = (None if side is None or side < 0 or side >= columns else side for side in (left, right))
    if (left is None) != (right is None):
        left, right = (columns if side is None else side for side in (left, right))
    middle = torch.arange(rows)[:, None] + columns - rows
    j = torch.arange(columns)[None]
    before = left is None or j >= middle - left
    after = right is None or j <= middle + right
    return torch.ones(rows, columns, dtype=torch.bool) & before & after


def windowed_forward(q, k, v, left, right, scale, two_dims=False) -> tuple[Tensor, Tensor]:
    assert q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0 and q.stride(-1) == 1
    assert max(q.shape[-1], v.shape[-1]) <= 256 and (two_dims or q.shape[-1] == v.shape[-1])
    seen = bottom_right(q.shape[1], k.shape[1], left, right)
    out, lse = dense(*(x.transpose(1, 2) for x in (q, k, v)), seen, scale)
    return out.transpose(1, 2).contiguous(), lse


def windowed_backward(dout, q, k, v, out, lse, left, right, scale, dlse=None) -> list[Tensor]:
    assert lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    seen = bottom_right(q.shape[1], k.shape[1], left, right)
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    return [x.transpose(1, 2) for x in gradients(dout, q, k, v, out, lse, seen, scale, dlse)]


def fill(buffers, grads) -> None:
    for buffer, grad in zip(buffers, grads, strict=True):
        buffer.copy_(grad)


def flash2_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    assert not (dropout_p or causal or softcap or return_softmax) and alibi_slopes is None
    return *windowed_forward(q, k, v, window_size_left, window_size_right, softmax_scale), None, None


def flash2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert deterministic and not (dropout_p or causal or softcap)
    sides = (window_size_left, window_size_right)
    fill((dq, dk, dv), windowed_backward(dout, q, k, v, out, softmax_lse, *sides, softmax_scale))


@torch.library.custom_op("burst_tests::flash3_forward", mutates_args=())
def flash3_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert softmax_scale is not None and not causal
    return windowed_forward(q, k, v, window_size_left, window_size_right, softmax_scale)


@torch.library.custom_op("burst_tests::flash3_backward", mutates_args=("dq", "dk", "dv"))
def flash3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, softmax_scale: float, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    assert deterministic and not is_causal
    sides = (window_size_left, window_size_right)
    fill((dq, dk, dv), windowed_backward(dout, q, k, v, out, softmax_lse, *sides, softmax_scale))
    return torch.zeros(())


def flash4_forward(
    q, k, v, softmax_scale=None, causal=False, window_size_left=None, window_size_right=None, return_lse=False
):
    assert return_lse and not causal
    assert all(side is None or side >= 0 for side in (window_size_left, window_size_right))
    check_flash4_dims(q, v)
    return windowed_forward(q, k, v, window_size_left, window_size_right, softmax_scale, two_dims=True)


def check_flash4_dims(q, v) -> None:
    """Of version b36: on 10.x few head dims; on 9.x its backward of grouped queries needs equal ones."""
    dims = q.shape[-1], v.shape[-1]
    if flash.major_capability(q.device) == 10:
        assert max(dims) <= 128 or dims in ((192, 128), (256, 256)), f"{dims} is not supported on SM100"
    else:
        assert dims[0] == dims[1], "GQA backward requires head_dim == head_dim_v"


def flash4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, window_size_left=None, window_size_right=None,
    deterministic=False, dq=None, dk=None, dv=None, dlse=None,
):  # fmt: skip
    assert deterministic
    check_flash4_dims(q, v)
    if flash.major_capability(q.device) == 10 and q.shape[-1] == 256:
        assert dlse is None, "SM100 backward with head_dim=256 does not support dlse"
    sides = (window_size_left, window_size_right)
    assert dlse is None or (dlse.is_contiguous() and not out.any()), "D is given in one way"
    fill((dq, dk, dv), windowed_backward(dout, q, k, v, out, lse, *sides, softmax_scale, dlse))
    return dq, dk, dv


FLASH = {
    2: {"_flash_attn_forward": flash2_forward, "_flash_attn_backward": flash2_backward},
    3: {"_flash_attn_forward": flash3_forward, "_flash_attn_backward": flash3_backward},
    4: {"_flash_attn_fwd": flash4_forward, "_flash_attn_bwd": flash4_backward},
}


@pytest.fixture
def installed(monkeypatch):
    """Make a generation of flash_attn importable, with these functions."""
    flash.flash_ops.cache_clear()

    def install(generation: int, functions: dict) -> None:
        name = flash.GENERATIONS[generation].module
        parts = name.split(".")
        for n in range(len(parts)):
            module = ModuleType(".".join(parts[: n + 1]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(sys.modules[name]).update(functions)

    yield install
    flash.flash_ops.cache_clear()


class Emulated:
    """An emulated ``torch.ops.aten``; arguments must match the real operator's schema."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.least_lse = math.inf  # that a backward of cuDNN was given

    def __getattr__(self, name: str):
        schema = getattr(torch.ops.aten, name).default._schema

        def call(*args, **kwargs):
            bound = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            assert set(bound) <= {a.name for a in schema.arguments}, name
            assert all(a.name in bound or a.has_default_value() for a in schema.arguments), name
            self.called.add(name)
            return getattr(self, f"emulate{name}")(SimpleNamespace(**bound))

        return call

    def emulate_flash_attention_forward(self, a):
        assert (a.max_q, a.max_k) == (a.query.shape[1], a.key.shape[1])
        sides = (a.window_size_left, a.window_size_right)
        return *windowed_forward(a.query, a.key, a.value, *sides, a.scale), None, None, None

    def emulate_flash_attention_backward(self, a):
        sides = (a.window_size_left, a.window_size_right)
        return windowed_backward(a.grad_out, a.query, a.key, a.value, a.out, a.logsumexp, *sides, a.scale)

    def seen(self, a) -> Tensor:
        rows, columns = a.query.shape[2], a.key.shape[2]
        assert a.query.shape[1] == a.key.shape[1] and a.query.shape[3] % 8 == 0
        if a.attn_bias is not None:
            assert a.attn_bias.shape[0] == a.query.shape[0] and a.attn_bias.shape[1] in (1, a.query.shape[1])
            assert a.attn_bias.shape[2:] == (rows, columns) and a.attn_bias.stride(2) % 8 == 0
            assert not a.is_causal
            return a.attn_bias == 0
        seen = torch.ones(rows, columns, dtype=torch.bool)
        return seen.tril() if a.is_causal else seen

    def emulate_scaled_dot_product_cudnn_attention(self, a):
        assert a.compute_log_sumexp and not a.dropout_p
        out, lse = dense(a.query, a.key, a.value, self.seen(a), a.scale)
        return out, lse.unsqueeze(-1), None, None, 0, 0, None, None, None

    def emulate_scaled_dot_product_cudnn_attention_backward(self, a):
        assert a.logsumexp.shape == (*a.query.shape[:3], 1) and min(a.query.shape[2], a.key.shape[2]) > 1
        assert a.grad_out.stride() == a.out.stride()
        assert (a.max_q, a.max_k) == (a.query.shape[2], a.key.shape[2])
        lse = a.logsumexp.squeeze(-1)
        dq, dk, dv = gradients(a.grad_out, a.query, a.key, a.value, a.out, lse, self.seen(a), a.scale)
        self.least_lse = min(self.least_lse, lse.min().item())
        faulty = (torch.backends.cudnn.version() or 0) < 92600 and a.key.shape[2] % 128 == 64
        return dq.fill_(math.nan) if faulty and (lse < -88.7).any() else dq, dk, dv

    def emulate_scaled_dot_product_efficient_attention(self, a):
        out, lse = dense(a.query, a.key, a.value, self.seen(a), a.scale)
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf), None, None

    def emulate_scaled_dot_product_efficient_attention_backward(self, a):
        rows = a.query.shape[2]
        assert a.logsumexp.shape[-1] % 32 == 0 and a.logsumexp.is_contiguous()
        assert list(a.grad_input_mask) == [True, True, True, False]
        assert a.out.transpose(1, 2).is_contiguous(), "read so by the kernel, whatever the strides"
        assert (a.logsumexp[..., rows:] == math.inf).all(), "the rows of padding have a share in dK and dV"
        inputs = (a.grad_out_, a.query, a.key, a.value, a.out, a.logsumexp[..., :rows])
        return *gradients(*inputs, self.seen(a), a.scale), None


class Place:
    """A tensor of an emulated graph: its type, its dims and strides."""

    def __init__(self, kind: str = "", dims=None, strides=None) -> None:
        self.kind, self.dims, self.strides, self.output = kind, dims, strides, False

    def set_output(self, output: bool) -> Place:
        self.output = output
        return self

    def set_dim(self, dims: list[int]) -> Place:
        self.dims = dims
        return self

    def set_stride(self, strides: list[int]) -> Place:
        self.strides = strides
        return self

    def set_data_type(self, kind: str) -> Place:
        self.kind = kind
        return self


class Graph:
    """A graph of cuDNN's front end, with the faults of versions before 9.26."""

    STEPS = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
    KINDS: ClassVar = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT"}

    def __init__(self, *, io_data_type: str, intermediate_data_type: str, compute_data_type: str, handle: str) -> None:
        assert intermediate_data_type == compute_data_type == "FLOAT" and handle == "a handle"
        self.io, self.steps, self.runs = io_data_type, list[str](), 0

    def __getattr__(self, name: str):
        assert name in self.STEPS, name
        return lambda *_: self.steps.append(name)

    def tensor_like(self, x: Tensor) -> Place:
        return Place(self.KINDS[x.dtype], list(x.shape), list(x.stride()))

    def sdpa(self, *, name, q, k, v, generate_stats, attn_scale, **mask) -> tuple[Place, ...]:
        assert name and generate_stats
        self.inputs, self.scale, self.mask = (q, k, v), attn_scale, mask
        self.outputs = Place(self.io), Place()
        return self.outputs

    def sdpa_backward(self, *, name, q, k, v, o, dO, stats, attn_scale, **mask) -> tuple[Place, ...]:
        assert name and stats.kind == "FLOAT" and stats.dims == [*q.dims[:3], 1]
        self.inputs, self.scale, self.mask = (q, k, v, o, dO, stats), attn_scale, mask
        self.outputs = Place(self.io), Place(self.io), Place(self.io)
        return self.outputs

    def get_workspace_size(self) -> int:
        return 0

    def seen(self, rows: int, columns: int) -> Tensor:
        mask = dict(self.mask)
        corner, right = mask.pop("diagonal_alignment", None), mask.pop("diagonal_band_right_bound", None)
        left = mask.pop("diagonal_band_left_bound", None)
        assert not mask and right in (None, 0) and (left is None or (left >= 1 and rows == columns))
        middle = torch.arange(rows)[:, None] + (columns - rows if corner == "BOTTOM_RIGHT" else 0)
        j, seen = torch.arange(columns)[None], torch.ones(rows, columns, dtype=torch.bool)
        seen = seen if right is None else seen & (j <= middle)
        return seen if left is None else seen & (j > middle - left)

    def execute(self, buffers: dict[Place, Tensor], workspace: Tensor, *, handle: str) -> None:
        assert tuple(self.steps) == self.STEPS and handle == "a handle" and workspace.dtype == torch.uint8
        for place, x in buffers.items():
            assert (place.dims, place.strides) == (list(x.shape), list(x.stride())) and x.stride(-1) == 1
            assert place.kind == self.KINDS[x.dtype]
        assert {*buffers} == {*self.inputs, *self.outputs} and all(place.output for place in self.outputs)
        self.runs += 1
        q, k, v, *rest = (buffers[place] for place in self.inputs)
        seen = self.seen(q.shape[2], k.shape[2])
        if not rest:
            out, lse = dense(q, k, v, seen, self.scale)
            fill((buffers[place] for place in self.outputs), (out, lse.unsqueeze(-1)))
            return
        out, dout, lse = rest[0], rest[1], rest[2].squeeze(-1)
        grads = [x.clone() for x in gradients(dout, q, k, v, out, lse, seen, self.scale)]
        if k.shape[2] % 128 == 64 and (lse < -88.7).any():
            grads[0].fill_(math.nan)
        if q.shape[2] == 1 and (lse < 0).any():
            grads[1].fill_(math.nan)
        fill((buffers[place] for place in self.outputs), grads)


FRONTEND = SimpleNamespace(
    pygraph=Graph,
    data_type=SimpleNamespace(FLOAT="FLOAT", HALF="HALF", BFLOAT16="BFLOAT16"),
    heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
    diagonal_alignment=SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT"),
    backend_version=lambda: 91900,
)


class EmulatedGraphs(CudnnGraphs):
    def _handle(self, device: torch.device) -> contextlib.AbstractContextManager[str]:
        return contextlib.nullcontext("a handle")


def kernel_over(name: str, installed, monkeypatch):
    if name.startswith("flash"):
        installed(int(name[-1]), FLASH[int(name[-1])])
        return Windowed(flash.flash_ops(int(name[-1])))
    for module in (aten, windowed):
        monkeypatch.setattr(module, "_aten", Emulated())
    if name == "cudnn":
        return Windowed(EmulatedGraphs(FRONTEND, windowed.CudaFlash()))
    ops = {"aten-flash": windowed.CudaFlash, "aten-cudnn": aten.Cudnn, "aten-efficient": aten.Efficient}[name]()
    return Windowed(ops) if name == "aten-flash" else aten.Aten(ops)


STOCK = ("flash2", "flash3", "flash4", "aten-flash", "aten-cudnn", "aten-efficient", "cudnn")


@pytest.mark.parametrize("name", STOCK)
def test_every_band(name, installed, monkeypatch):
    kernel = kernel_over(name, installed, monkeypatch)
    assert kernel.name == name
    for table in (BANDS | LARGE).values():
        compare(kernel, table, 16, 16, batch=1)


VARIANTS = {
    "over a wire": ("several", 16, 16, {"heads_first": True}),  # [B, H, S, D] in memory
    "padded head dims": ("several", 20, 12, {}),
    "wider values": ("several", 7, 40, {}),
    "gradient of the lse alone": ("causal", 16, 16, {"dlse": True}),
}


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(name, variant, installed, monkeypatch):
    band, dim, value_dim, options = VARIANTS[variant]
    compare(kernel_over(name, installed, monkeypatch), BANDS[band], dim, value_dim, **options)


@pytest.mark.parametrize(
    ("name", "scale"), [*((name, -0.7) for name in STOCK), ("flash2", 0.0), ("aten-cudnn", 0.0), ("cudnn", 0.0)]
)
def test_calls_give_it_a_positive_scale(name, scale, installed, monkeypatch):
    """These kernels compute the maximum of unscaled scores, and multiply a mask's -inf by the scale."""
    kernel, given = kernel_over(name, installed, monkeypatch), []
    for each in ("run_forward", "run_backward"):
        run = getattr(kernel, each)
        keep = lambda *a, run=run, **more: (given.append(a[-1]), run(*a, **more))[1]  # noqa: E731
        object.__setattr__(kernel, each, keep)
    monkeypatch.setattr("burst_attention.attention.call.choose", lambda *_, **__: kernel)
    plan = make_plan(40, mask=Mask(window=9))
    q, k, v, dout = inputs(40, 40, 16, 16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = burst_attention(*leaves, plan, scale=scale, return_lse=True)
    grads = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    right = attend(q, k, v, plan.mask, dout=dout, dlse=torch.ones_like(lse), scale=scale)
    assert given and min(given) > 0
    for actual, (_, expected) in zip((out, lse, *grads), right.items(), strict=True):
        assert relative_l2(actual, expected) < 1e-5


def test_windows_say_what_tiles_say():
    assert window_of(Tile(0, 5, 0, 7, -6, 4)) == Window(None, None)
    for table in (BANDS | LARGE).values():
        for row in table:
            tile = Tile(*row)
            left, right = window_of(tile)
            assert all(side is None or side >= 0 for side in (left, right))
            seen = np.zeros((tile.rows, tile.columns), bool)
            for part in launches_of(Tiles(np.array([row]))):
                inside = bottom_right(part.rows, part.columns, *window_of(part)).numpy()
                top, edge = part.q_start - tile.q_start, part.k_start - tile.k_start
                assert not seen[top : top + part.rows].any()
                seen[top : top + part.rows, edge : edge + part.columns] = inside
            np.testing.assert_array_equal(seen, seen_by_tile(tile))


@pytest.mark.parametrize(
    ("name", "module", "needs"),
    [
        ("flash3", "flash_attn_interface", r"flash_attn_interface \(.*\): pip install flash-attn-3"),
        ("cudnn", "cudnn", "cuDNN's front end .* pip install nvidia-cudnn-frontend"),
    ],
)
def test_a_package_that_is_not_there(monkeypatch, name, module, needs):
    flash.flash_ops.cache_clear()
    cudnn_graphs.cudnn_graphs.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"kernel='{name}' needs {needs}"):
        choose(name, device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "function", "reported"),
    [
        ("forward", lambda q, k, v, softmax_scale, window_size, surprise: None, "surprise"),
        ("forward", lambda q, k, v, window_size: None, "has an unsupported signature"),
        ("forward", lambda q, k, v, softmax_scale: None, "has an unsupported signature"),
        ("forward", lambda q, k, v, softmax_scale, window_size, dq: None, "has an unsupported signature"),
        ("forward", None, "has no _flash_attn_forward"),
        (  # no fixed order of sums
            "backward",
            lambda dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, window_size: None,
            r"_flash_attn_backward\(dout, .* has an unsupported signature",
        ),
    ],
)
def test_versions_that_are_not_known_are_refused(name, function, reported, installed, monkeypatch):
    monkeypatch.setattr(flash, "version_of", lambda package: "9.9")
    installed(2, {**FLASH[2], f"_flash_attn_{name}": function} if function else {})
    with pytest.raises(ValueError, match=rf"flash-attn 9\.9: .*{reported}"):
        flash.flash_ops(2)


def test_an_lse_of_another_shape_is_refused(installed):
    def forward(q, k, v, softmax_scale, window_size):
        return q, torch.zeros(1, 2, 3)

    installed(2, {**FLASH[2], "_flash_attn_forward": forward})
    q, k, v, _ = inputs(50, 50, 16, 16)
    with pytest.raises(RuntimeError, match=r"gave an lse of shape \[1, 2, 3\]"):
        Windowed(flash.flash_ops(2)).forward(q, k, v, Tiles(np.array(BANDS["causal"])), 1.0)


def test_widths_without_a_program_are_refused(installed, monkeypatch):
    for name, widest in (("flash2", 256), ("aten-cudnn", 128), ("cudnn", 128), ("aten-efficient", 256)):
        kernel = kernel_over(name, installed, monkeypatch)
        monkeypatch.setattr(type(kernel.ops), "check", lambda *_: None)  # which asks for a GPU
        kernel.check(CPU, torch.bfloat16, (widest, 16))
        with pytest.raises(ValueError, match=f"kernel='{name}' takes head dims up to {widest}, not 264"):
            kernel.check(CPU, torch.bfloat16, (16, 264))


@pytest.mark.parametrize(("name", "dim"), [("flash2", 256), ("aten-flash", 254), ("aten-cudnn", 128), ("cudnn", 128)])
def test_the_widest_heads_have_room_for_a_gradient_of_the_lse_alone(name, dim, installed, monkeypatch):
    """No column can be appended, so a separate call adds D's contribution."""
    compare(kernel_over(name, installed, monkeypatch), BANDS["several"], dim, dim, dlse=True)


@pytest.mark.parametrize("name", ["aten-cudnn", "cudnn"])
def test_a_single_query_or_key_goes_around_cudnn(name, installed, monkeypatch):
    kernel = kernel_over(name, installed, monkeypatch)
    compare(kernel, [(0, 1, 0, 1, 0, 0)], 16, 16)
    compare(kernel, [(0, 1, 0, 9, -8, 0)], 16, 16)


def test_cudnn_gets_the_bands_that_it_computes_well(installed, monkeypatch):
    ops = kernel_over("cudnn", installed, monkeypatch).ops
    well = {(9, 9, None, None), (9, 9, None, 0), (5, 9, None, 0), (9, 9, 4, 0), (9, 5, None, None)}
    elsewhere = {
        (5, 9, 4, 0),  # slow
        (9, 9, 4, 4),
        (9, 9, None, 4),
        (9, 9, 4, None),
        (1, 9, None, 0),  # NaN where lse is negative
        (9, 1, None, None),
        (9, 192, None, None),  # NaN in dQ where lse is below -88.7
    }
    for rows, columns, left, right in well | elsewhere:
        assert ops.takes(rows, columns, Window(left, right)) == ((rows, columns, left, right) in well)
    newer = replace(ops, frontend=SimpleNamespace(backend_version=lambda: 92600))
    assert newer.takes(9, 192, Window(None, None))


@pytest.mark.parametrize("version", [None, 91900, 92400, 92600])
def test_keys_that_old_versions_of_cudnn_get_wrong_go_to_another_kernel(version, installed, monkeypatch):
    """Keys of 64 more than a multiple of 128, full, causal, and of masked documents, with an lse below -88.7."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    kernel = kernel_over("aten-cudnn", installed, monkeypatch)
    emulated = aten._aten
    documents = [(0, 90, 0, 90, 0, 89), (90, 192, 90, 192, 0, 101)]
    for table in ([(0, 100, 0, 192, -191, 99)], [(0, 320, 0, 320, 0, 319)], documents):
        tiles = Tiles(np.array(table))
        rows, columns = tiles.table[:, [1, 3]].max(0).tolist()
        q, k, v, dout = inputs(rows, columns, 16, 16)
        q[..., 0], k[..., 0] = 200, -1
        out, lse = kernel.forward(q, k, v, tiles, 0.5)
        assert lse.max() < -88.7
        grads = kernel.backward(BackwardInputs(dout, q, k, v, lse, None, tiles, 0.5, out=out))
        wide = Reference().backward(
            BackwardInputs(*(x.double() for x in (dout, q, k, v, lse)), None, tiles, 0.5, out=out)
        )
        for mine, right in zip(grads, wide, strict=True):
            assert relative_l2(mine, right) < 1e-4
    assert ("_scaled_dot_product_cudnn_attention" in emulated.called) == (version == 92600)


@pytest.mark.parametrize("name", ["aten-cudnn", "cudnn"])
def test_cudnn_proves_right_with_scores_far_below_zero_that_it_computes_itself(name, installed, monkeypatch):
    kernel = kernel_over(name, installed, monkeypatch)
    check_against_reference(kernel, CPU, torch.float32, (24, 16))
    if name == "aten-cudnn":
        assert aten._aten.least_lse < -88.7
    else:
        shapes = {layout[0][1] for operator, _, layout, *_ in kernel.ops.built if operator == "sdpa_backward"}
        assert (2, 4, 256, 24) in shapes, "the rows of prove.FAR"


def test_a_graph_is_built_once_for_each_shape_band_and_scale(installed, monkeypatch):
    monkeypatch.setattr(cudnn_graphs, "MOST_GRAPHS", 3)
    ops = kernel_over("cudnn", installed, monkeypatch).ops
    q, k, v = (torch.randn(1, 9, heads, 16) for heads in (4, 2, 2))
    for _ in range(2):
        for scale, window in ((1.0, Window(None, 0)), (0.5, Window(None, 0)), (0.5, Window(3, 0))):
            out, lse = ops.forward(q, k, v, window, scale)
            seen = bottom_right(9, 9, *window)
            expected = dense(*(x.transpose(1, 2) for x in (q, k, v)), seen, scale)
            for x, y in zip((out.transpose(1, 2), lse), expected, strict=True):
                assert relative_l2(x, y) < 1e-6
    assert [graph.runs for graph, *_ in ops.built.values()] == [2, 2, 2]
    ops.forward(q, k, v, Window(None, None), 1.0)
    assert len(ops.built) == 3


def test_packed_documents_build_no_graph_for_each_length(fresh, installed, monkeypatch, asked):
    monkeypatch.setattr(kernels, "_capability", lambda _: 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(kernels, "check_once", lambda *_, **__: None)
    monkeypatch.setitem(kernels._MAKERS, "cudnn", lambda: kernel_over("cudnn", installed, monkeypatch))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    half = {"device": torch.device("cuda"), "dtype": torch.float16, "head_dims": (64, 64)}
    assert choose("auto", **half).name == "cudnn"
    for documents in (2, 20, 63):
        assert choose("auto", **half, documents=documents).name == "aten-flash"
        assert choose("auto", **half, documents=documents, banded=True).name == "triton"
    text = explain(device="cuda", dtype=torch.float16, documents=20)
    assert text.startswith("auto takes aten-flash for torch.float16 on cuda, several documents; faster")


@pytest.mark.parametrize("dims", [(192, 128), (130, 7), (256, 256), (128, 192), (200, 200), (96, 128)])
@pytest.mark.parametrize("dlse", [False, True])
def test_flash_attention_4_gets_the_head_dims_that_blackwell_has(dims, dlse, installed, monkeypatch):
    monkeypatch.setattr(flash, "major_capability", lambda _: 10)
    compare(kernel_over("flash4", installed, monkeypatch), BANDS["several"], *dims, dlse=dlse)


def test_a_soft_cap_over_the_widest_heads_of_blackwell_is_refused(installed, monkeypatch):
    def forward(q, k, v, softmax_scale, window_size_left, window_size_right, return_lse, softcap):
        return q, k

    def backward(
        q, k, v, out, dout, lse, softmax_scale, window_size_left, window_size_right, deterministic, dq, dk, dv, dlse,
        softcap,
    ):  # fmt: skip
        return q, k, v

    installed(4, {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward})
    half = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "softcap": 2.0}
    for capability, refused in ((9, False), (10, True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, major=capability: (major, 0))
        choose("flash4", **half, head_dims=(192, 128))
        expectation = (
            pytest.raises(ValueError, match=r"kernel='flash4' has no soft cap for head dims 256 and 256 on cuda; for a")
            if refused
            else contextlib.nullcontext()
        )
        with expectation:
            choose("flash4", **half, head_dims=(256, 256))


@pytest.mark.parametrize(
    ("version", "right"),
    [("4.0.0b11", False), ("4.0.0b9.dev3", False), ("4.0.0b12", True), ("4.0.0b36", True), ("4.0.1", True)],
)
def test_versions_of_flash_attention_4_with_wrong_windows_are_refused(version, right, installed, monkeypatch):
    monkeypatch.setattr(flash, "version_of", lambda _: version)
    installed(4, FLASH[4])
    if right:
        assert flash.flash_ops(4).name == "flash4"
        return
    with pytest.raises(ValueError, match=rf"needs flash-attn-4 4\.0\.0b12 or newer, not {re.escape(version)}"):
        flash.flash_ops(4)


def test_flash_attention_runs_on_the_tensors_device(installed, monkeypatch):
    """It launches on CUDA's current device, and compiles for that one."""
    entered = []

    @contextlib.contextmanager
    def on_device_of(x):
        entered.append(x.device)
        yield
        entered.pop()

    def guarded(function):
        return functools.wraps(function)(lambda *a, **more: [function(*a, **more), entered[0]][0])

    monkeypatch.setattr(flash, "on_device_of", on_device_of)
    installed(4, {name: guarded(function) for name, function in FLASH[4].items()})
    compare(Windowed(flash.flash_ops(4)), BANDS["causal"], 16, 16)
    assert not entered


def test_flash_attention_4_keeps_its_programs_on_disk(monkeypatch, tmp_path):
    """It reads the environment once, when it is imported."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "interface.py").write_text(
        "import os\n\nFOUND = {k: v for k, v in os.environ.items() if k.startswith('FLASH_ATTENTION_CUTE')}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prefix = "FLASH_ATTENTION_CUTE_DSL_CACHE"
    folder = str(tmp_path / "burst-attention" / "flash-attention-4")
    parts = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    for name in parts:  # which restores them at the end
        monkeypatch.setitem(sys.modules, name, None)
    for answers, expected in (
        ({}, {f"{prefix}_ENABLED": "1", f"{prefix}_DIR": folder}),
        ({f"{prefix}_DIR": "here"}, {f"{prefix}_ENABLED": "1", f"{prefix}_DIR": "here"}),
        ({f"{prefix}_ENABLED": "0"}, {f"{prefix}_ENABLED": "0"}),
    ):
        for name in parts:
            del sys.modules[name]
        flash.flash_ops.cache_clear()
        with monkeypatch.context() as environment:
            for name, value in answers.items():
                environment.setenv(name, value)
            before = dict(os.environ)
            with pytest.raises(ValueError, match="has no _flash_attn_fwd"):
                flash.flash_ops(4)
            assert dict(os.environ) == before
        assert expected == sys.modules["flash_attn.cute.interface"].FOUND


def test_a_proof_without_windows_compiles_two_kinds_of_programs(installed, monkeypatch, fresh):
    """FlashAttention 4 compiles for each kind of window, and for a single block of 128 rows or columns."""
    kinds = set()

    def forward(q, k, v, softmax_scale=None, window_size_left=None, window_size_right=None, return_lse=False):
        kinds.add((window_size_left is None, window_size_right, q.shape[1] > 128, k.shape[1] > 128))
        return windowed_forward(q, k, v, window_size_left, window_size_right, softmax_scale)

    installed(4, FLASH[4] | {"_flash_attn_fwd": forward})
    kernel, proofs = Windowed(flash.flash_ops(4)), []
    check_against_reference(kernel, CPU, torch.float32, (16, 16), banded=False)
    assert kinds == {(True, None, True, True), (True, 0, True, True)}
    monkeypatch.setattr(kernels, "check_once", lambda *_, **options: proofs.append(options["banded"]))
    monkeypatch.setattr(kernels, "candidates", lambda *_, **__: ("flash4",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    half = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    for options in ({}, {"banded": True}, {"documents": 3}, {"documents": 3, "banded": True}, {"documents": 99}):
        choose("auto", **half, **options)
    assert proofs == [False, True, False, True, True]


def test_cudnn_computes_the_widest_heads_on_hopper(installed, monkeypatch):
    monkeypatch.setattr(cudnn_graphs, "major_capability", lambda _: 9)
    kernel = kernel_over("cudnn", installed, monkeypatch)
    monkeypatch.setattr(type(kernel.ops), "check", lambda *_: None)  # which asks for a GPU
    kernel.check(CPU, torch.bfloat16, (256, 256))
    with pytest.raises(ValueError, match="takes head dims up to 256, not 264"):
        kernel.check(CPU, torch.bfloat16, (264, 256))
    compare(kernel, BANDS["causal"], 256, 256)
    kernel.ops.built.clear()
    compare(kernel, BANDS["causal"], 128, 128, dlse=True)
    assert sum(name == "sdpa_backward" for name, *_ in kernel.ops.built) == 1, "D has room in one call"


def test_kernels_that_take_d_come_first_where_cudnn_has_no_room_for_it(monkeypatch, asked):
    monkeypatch.setattr(kernels, "_capability", lambda _: 9)
    wide = kernels.candidates(torch.device("cuda"), torch.float16, wide=True)
    assert wide == ("flash4", "triton", "cudnn", "aten-cudnn", "flash3", "flash2", "aten-flash", "reference")
    taken = []
    monkeypatch.setattr(kernels, "_choose_auto", lambda *given: taken.append(given[-1]) or (Reference(), ()))
    half = {"device": torch.device("cuda"), "dtype": torch.float16}
    for dims, exact_delta in (((128, 128), True), ((64, 128), True), ((120, 120), True), ((128, 128), False)):
        choose("auto", **half, head_dims=dims, exact_delta=exact_delta)
    assert taken == [True, True, False, False]


def test_a_call_tells_whether_its_backward_gets_d(monkeypatch):
    seen = []
    monkeypatch.setattr(
        attention_call, "choose", lambda *_, **options: seen.append(options["exact_delta"]) or Reference()
    )

    def run(group, dtype, return_lse):
        x = torch.ones(1, 1, 4, 8, dtype=dtype)
        burst_attention(x, x, x, make_plan(8 if group else 4, group=group), return_lse=return_lse)

    for dtype in (torch.bfloat16, torch.float16):
        for return_lse in (False, True):
            run(None, dtype, return_lse)
    assert seen == [False, True, False, True]
    seen.clear()
    with local_world(2) as ranks:
        for dtype in (torch.bfloat16, torch.float16):
            ranks.run(run, dtype, False)
    assert seen == [False, False, True, True]


@pytest.mark.parametrize("empty", [slice(0, 16), slice(16, 32), slice(0, 62), slice(0, 0)])
def test_d_is_carried_wherever_a_gradient_has_columns(empty):
    make = torch.Generator().manual_seed(0)
    dout, delta = (torch.randn(2, 3, 100, *dims, generator=make) for dims in ((64,), ()))
    dout[:, 1, ..., empty] = 0
    dout[:, :, 7], delta[:, :, 7] = 0, 0
    out = surrogate_output(dout.bfloat16(), delta)
    assert relative_l2((out.double() * dout.bfloat16().double()).sum(-1), delta) < 1e-4


@pytest.mark.parametrize("width", [1, 7, 16, 72])
def test_d_is_carried_by_one_triton_program(width):
    """In Triton's interpreter, which computes what one launch computes on a GPU."""
    carried = pytest.importorskip("burst_attention.kernels.triton.kernel").carried
    make = torch.Generator().manual_seed(0)
    dout, out = (torch.randn(2, 70, 3, width, generator=make).half().transpose(1, 2) for _ in range(2))
    dout[:, 0, 3], dout[:, 1, 5, 1:] = 0, 0  # nothing, and a single column
    delta = (dout.float() * out.float()).sum(-1)
    made, plain = carried(dout, delta), surrogate_output(dout, delta)
    size = dout.abs().sort(-1, descending=True).values
    tied = (size[..., :-1][..., :2] == size[..., 1:3]).any(-1)  # either column may come first
    assert tied.sum() < 20
    torch.testing.assert_close(made[~tied], plain[~tied], rtol=0, atol=0)
    for each in (made, plain):
        assert relative_l2((each.double() * dout.double()).sum(-1), delta) < 1e-5


def test_a_right_kernel_proves_right_and_a_wrong_one_does_not(installed):
    def forward_moved(aside):
        def forward(q, k, v, softmax_scale=None, window_size_left=None, window_size_right=None, return_lse=False):
            moved = aside(k.shape[1] - q.shape[1])
            sides = (
                None if x is None else x + d for x, d in zip((window_size_left, window_size_right), moved, strict=True)
            )
            return windowed_forward(q, k, v, *sides, softmax_scale)

        return forward

    off_by_one, top_left = (lambda d: (0, 1)), (lambda d: (-d, d))
    for aside in (None, off_by_one, top_left):
        installed(4, FLASH[4] | ({"_flash_attn_fwd": forward_moved(aside)} if aside else {}))
        flash.flash_ops.cache_clear()
        kernel = Windowed(flash.flash_ops(4))
        if aside is None:
            check_against_reference(kernel, CPU, torch.float32, (24, 16))
            continue
        with pytest.raises(ArithmeticError, match="its out is wrong on this device: relative L2"):
            check_against_reference(kernel, CPU, torch.float32, (24, 16))


class Wavering(Reference):
    runs = 0

    def forward(self, *args):
        self.runs += 1
        out, lse = super().forward(*args)
        return out * (1 + self.runs * 1e-6), lse


class GradientsWrong(Reference):
    def backward(self, inputs):
        dq, dk, dv = super().backward(inputs)
        return dq, dk, dv * 1.1


class BlindRowsWrong(Reference):
    def forward(self, *args):
        out, lse = super().forward(*args)
        return out, lse.masked_fill(lse == -math.inf, 0.0)


class LostWithoutDo(Reference):
    """A kernel that computes D from dO and out only, as kernels without a D argument do."""

    def backward(self, inputs):
        return super().backward(replace(inputs, delta=inputs.delta * inputs.dout.any(-1)))


class CarriedWrong(Reference):
    continues = True

    def extend(self, q, k, v, tiles, scale, out, lse):
        out.copy_(self.forward(q, k, v, tiles, scale)[0])


class FewKeysWrong(Reference):
    continues = True

    def extend(self, q, k, v, tiles, scale, out, lse):
        merge_(out, lse, *self.forward(q, k, v, tiles, scale))

    def backward(self, inputs):
        dq, dk, dv = super().backward(inputs)
        return dq * (1.1 if inputs.k.shape[2] < 64 else 1.0), dk, dv


@pytest.mark.parametrize(
    ("kernel", "reported"),
    [
        (FewKeysWrong, "its dq is wrong"),
        (GradientsWrong, "its dv is wrong"),
        (BlindRowsWrong, "its lse is wrong on this device: relative L2 error inf"),
        (LostWithoutDo, "its dq is wrong"),
        (CarriedWrong, "its out after extend is wrong"),
        (Wavering, "its out differs from run to run"),
    ],
)
def test_whatever_a_kernel_gives_must_prove_right(kernel, reported):
    with pytest.raises(ArithmeticError, match=reported):
        check_against_reference(kernel(), CPU, torch.float32, (16, 16))


@pytest.fixture
def fresh():
    kernels._choose_auto.cache_clear()
    yield
    kernels._choose_auto.cache_clear()


def test_auto_takes_the_first_that_can_be_used_and_tells_why_not_the_others(fresh):
    for cpu in (CPU, "cpu"):
        reported = explain(device=cpu, dtype=torch.bfloat16)
        assert reported == "auto takes aten for torch.bfloat16 on cpu, full and causal tiles"
    if torch.cuda.is_available():
        pytest.skip("the rest is about a machine without a GPU")
    reported = explain(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert re.fullmatch(
        r"auto takes reference for torch.bfloat16 on cuda, full and causal tiles; faster, if they could be used: "
        r"flash2 \(.*: pip install flash-attn, .*\), aten-flash \(.*\), triton \(.*\)",
        reported,
    )


def test_auto_passes_over_a_kernel_that_proves_wrong(fresh, monkeypatch, tmp_path):
    class Wrong(Reference):
        name = "wrong"

        def forward(self, *args):
            out, lse = super().forward(*args)
            return out * 1.1, lse

    monkeypatch.setitem(kernels._MAKERS, "triton", Wrong)
    monkeypatch.setattr(kernels, "candidates", lambda *_, **__: ("triton", "reference"))
    device = torch.device("meta")  # not the CPU, because its kernels aren't checked again
    proofs = []

    def check(kernel, _, dtype, dims, **options):
        proofs.append(kernel.name)
        check_against_reference(kernel, CPU, dtype, dims, **options)

    monkeypatch.setattr(prove, "check_against_reference", check)
    monkeypatch.setattr(prove, "_PROVED", Remembered("proved.json", tmp_path))
    assert choose("auto", device=device, dtype=torch.float32).name == "reference"
    assert "triton (its out is wrong" in explain(device=device, dtype=torch.float32)
    assert proofs == ["wrong"]


def test_what_proved_right_is_remembered_by_the_next_process(fresh, monkeypatch, tmp_path):
    monkeypatch.setitem(kernels._MAKERS, "triton", lambda: replace(Reference(), block=BLOCK))
    monkeypatch.setattr(kernels, "candidates", lambda *_, **__: ("triton", "reference"))
    monkeypatch.setattr(prove, "_PROVED", Remembered("proved.json", tmp_path))
    proofs = []
    monkeypatch.setattr(prove, "check_against_reference", lambda kernel, *_, **how: proofs.append(how["fixed_order"]))
    for ordered in (False, False, True):
        kernels._choose_auto.cache_clear()  # as a new process has none
        kernels._choose_auto(torch.device("meta"), torch.float32, (16, 16), kernels._PLAIN, None, ordered)
    assert proofs == [False, True]


def test_a_soft_cap_goes_to_a_kernel_that_has_one(installed):
    cuda = torch.device("cuda")
    assert kernels.candidates(CPU, torch.float32, capped=True) == ("blockwise",)
    assert kernels.candidates(cuda, torch.float64, capped=True) == ("blockwise",)
    assert kernels.candidates(cuda, torch.float32, capped=True) == ("triton", "blockwise")
    assert choose("auto", device=CPU, dtype=torch.float32, softcap=2.0) == Reference(2.0, BLOCK)
    for name in ("aten", "aten-fp32"):
        with pytest.raises(ValueError, match=f"kernel='{name}' has no soft cap"):
            choose(name, device=CPU, dtype=torch.float32, softcap=2.0)
    with pytest.raises(ValueError, match="kernel='aten-flash' has no soft cap"):
        Windowed(windowed.CudaFlash()).capped(2.0)
    for generation, has in ((2, True), (3, False), (4, False)):  # the emulated versions
        installed(generation, FLASH[generation])
        kernel = Windowed(flash.flash_ops(generation))
        if has:
            assert kernel.capped(2.0).ops._settings(Window(None, 0), 1.0)["softcap"] == 2.0
            assert kernel.ops._settings(Window(None, 0), 1.0)["softcap"] == 0.0
        else:
            with pytest.raises(ValueError, match="has no soft cap"):
                kernel.capped(2.0)


@pytest.fixture
def asked(monkeypatch):
    """``asked(ordered)`` asks PyTorch for a fixed order of sums, or not."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked.ordered)
    asked.ordered = False
    return asked


@pytest.mark.parametrize(
    ("capability", "plain", "windows"),
    [
        (8, ["flash2", "aten-flash", "triton"], ["flash2", "triton"]),
        (
            9,
            ["flash4", "cudnn", "aten-cudnn", "flash3", "flash2", "aten-flash", "triton"],
            ["flash4", "cudnn", "flash3", "flash2", "triton"],
        ),
        (10, ["flash4", "cudnn", "aten-cudnn", "flash2", "triton"], ["flash4", "cudnn", "flash2", "triton"]),
        (12, ["flash4", "cudnn", "aten-cudnn", "flash2", "triton"], ["flash4", "cudnn", "flash2", "triton"]),
    ],
)
def test_auto_tries_the_fastest_first_unless_sums_must_have_an_order(monkeypatch, asked, capability, plain, windows):
    monkeypatch.setattr(kernels, "_capability", lambda _: capability)
    gpu = torch.device("cuda"), torch.bfloat16
    assert list(kernels.candidates(*gpu)) == [*plain, "reference"]
    assert list(kernels.candidates(*gpu, kernels._BANDED)) == [*windows, "reference"]
    many = ["triton", *(name for name in plain if name.startswith("flash"))]
    assert list(kernels.candidates(*gpu, kernels._MANY)) == [*many, "reference"]
    assert kernels.candidates(torch.device("cuda"), torch.float64) == ("reference",)
    assert kernels.candidates(torch.device("cuda"), torch.float32) == ("triton", "reference")
    asked.ordered = True
    assert list(kernels.candidates(*gpu)) == [*(name for name in plain if "cudnn" not in name), "reference"]


# capability, packages that are installed, a mask with windows, a fixed order -> the kernel, and what would be faster
EXPLAINED = {
    (8, (), False, False): ("aten-flash", ["flash2"]),
    (8, (2,), False, False): ("flash2", []),
    (8, (), True, False): ("triton", ["flash2"]),
    (9, (), False, False): ("aten-cudnn", ["flash4", "cudnn"]),
    (9, (4,), False, False): ("flash4", []),
    (9, ("cudnn", 2), False, False): ("cudnn", ["flash4"]),
    (9, (), True, False): ("triton", ["flash4", "cudnn", "flash3", "flash2"]),
    (9, ("cudnn",), True, False): ("cudnn", ["flash4"]),
    (9, (), False, True): ("aten-flash", ["flash4", "flash3", "flash2"]),
    (9, (3, "cudnn"), False, True): ("flash3", ["flash4"]),
    (9, (4, "cudnn"), True, True): ("flash4", []),
    (10, (), False, False): ("aten-cudnn", ["flash4", "cudnn"]),
    (10, (2,), True, True): ("flash2", ["flash4"]),
    (10, (), False, True): ("triton", ["flash4", "flash2"]),
}


@pytest.mark.parametrize("emulated", EXPLAINED, ids=str)
def test_a_sentence_says_what_a_gpu_takes_and_what_would_be_faster(fresh, installed, monkeypatch, asked, emulated):
    capability, packages, banded, asked.ordered = emulated
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    monkeypatch.setattr(kernels, "_capability", lambda _: capability)
    monkeypatch.setattr(kernels, "check_once", lambda *_, **__: None)
    cudnn_graphs.cudnn_graphs.cache_clear()
    monkeypatch.setitem(sys.modules, "cudnn", FRONTEND if "cudnn" in packages else None)
    for generation in set(packages) - {"cudnn"}:
        installed(generation, FLASH[generation])
    explained = explain(device="cuda", dtype=torch.float16, banded=banded)  # which the interpreter has
    taken, faster = EXPLAINED[emulated]
    kind = "windows" if banded else "full and causal tiles"
    assert explained.startswith(f"auto takes {taken} for torch.float16 on cuda, {kind}")
    assert re.findall(r"[,:] (\S+) \(kernel='", explained) == faster
    assert explained.count("pip install") == len(faster)
    cudnn_graphs.cudnn_graphs.cache_clear()


def test_flash_attention_adds_in_a_fixed_order_only_if_asked(installed, asked):
    installed(2, FLASH[2])
    ops = flash.flash_ops(2)
    assert ops._settings(Window(None, 0), 1.0)["deterministic"] is False
    asked.ordered = True
    assert ops._settings(Window(None, 0), 1.0)["deterministic"] is True


def test_the_kernel_of_a_call_follows_its_mask(monkeypatch):
    seen = []
    monkeypatch.setattr(attention_call, "choose", lambda *_, **options: seen.append(options) or Reference())
    x = torch.ones(1, 1, 100, 8)
    for mask in (Mask(), Mask(window=3), Mask(cu_seqlens=range(101))):
        burst_attention(x, x, x, make_plan(100, mask=mask))
    assert [(each["banded"], each["documents"]) for each in seen] == [(False, 1), (True, 1), (False, 100)]


def test_gradients_of_repeated_heads_are_summed_in_fp32():
    gradient = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16).view(1, 4, 1, 1)
    total = aten._summed(gradient, 1)
    assert total.dtype == torch.float32 and total.item() == 259  # bf16 has no 259


@pytest.mark.parametrize(
    ("dtype", "products"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)]
)
def test_a_backward_runs_where_products_are_fast(monkeypatch, dtype, products):
    """In fp32 it is more accurate too; a CPU that multiplies bf16 matrices fast keeps its results."""
    monkeypatch.setattr(aten, "has_bf16_products", lambda: products)
    taken = []
    stock = aten.CpuFlash.backward
    monkeypatch.setattr(aten.CpuFlash, "backward", lambda self, *x: taken.append(x[0].q.dtype) or stock(self, *x))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 64, 16, generator=generator).to(dtype) for _ in range(4))
    plan = make_plan(64)
    results = []
    for leaves in ([q, k, v], [x.double() for x in (q, k, v)], half_an_ulp_away((q, k, v), dtype)):
        for x in leaves:
            x.requires_grad_()
        burst_attention(*leaves, plan).backward(dout.to(leaves[0].dtype))
        results.append([x.grad for x in leaves])
    assert taken[0] == (torch.bfloat16 if dtype == torch.bfloat16 and products else torch.float32)
    for mine, exact, moved in zip(*results, strict=True):
        assert mine.dtype == dtype
        assert relative_l2(mine, exact) < 4 * relative_l2(moved, exact)
