"""Torch's fused attention operators behind one interface that hides their differences.

They take [B, H, S, D] of one head dimension and return the natural-log lse [B, Hq, Sq] in fp32 (fp64 for fp64).
:class:`CudaFlash` takes [B, S, H, D] instead, as :class:`~.windowed.WindowedOps` requires.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from .precision import DTYPES
from .stock import Ops
from .widths import WIDEST, check_gpu
from .windowed import MULTIPLE, Window

_aten = torch.ops.aten


class MaskAndScale(NamedTuple):
    """The mask and scale of a call.

    Everything is visible, unless ``causal`` (a triangle aligned to the top left) or ``mask`` ([1, 1, rows, columns],
    added to the scores) is set.
    """

    mask: Tensor | None
    causal: bool
    scale: float


class AtenOps(Ops, Protocol):
    """A fused attention operator."""

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the backward of such inputs runs."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: MaskAndScale) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: MaskAndScale
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        ...


def has_bf16_products() -> bool:
    """Return whether torch multiplies bf16 matrices on this CPU by oneDNN; otherwise plain loops do in a backward."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class CpuFlash:
    """``_scaled_dot_product_flash_attention_for_cpu`` (FlashAttention-2's algorithm, arXiv 2307.08691)."""

    name: ClassVar[str] = "aten"
    multiple: ClassVar[int] = 1
    widest: ClassVar[int | None] = None
    takes_delta: ClassVar[bool] = False

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu":
            raise ValueError(f"kernel='aten' runs on cpu, the tensors are on {device}; use kernel='aten-flash'")
        if dtype not in DTYPES:
            raise ValueError(f"kernel='aten' does not take {dtype}; use one of {', '.join(map(str, DTYPES))}")

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Avoid half precision where its products are slow: fp16 everywhere, bf16 without AVX-512."""
        slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bf16_products())
        return torch.float32 if slow else dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: MaskAndScale) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, seen.causal, attn_mask=seen.mask, scale=seen.scale
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: MaskAndScale
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, seen.causal, attn_mask=seen.mask, scale=seen.scale
        )
        return dq, dk, dv


@dataclass(frozen=True)
class Cudnn:
    """``_scaled_dot_product_cudnn_attention``: its lse is [B, H, Sq, 1].

    It needs dO and out in the same memory order. It fails on a single query or key; :class:`Efficient` computes those.
    """

    name: ClassVar[str] = "aten-cudnn"
    multiple: ClassVar[int] = 8
    widest: ClassVar[int | None] = 128
    takes_delta: ClassVar[bool] = False

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        check_gpu(self.name, device, dtype, range(8, 13))

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: MaskAndScale) -> tuple[Tensor, Tensor]:
        if min(q.shape[2], k.shape[2]) == 1:
            return Efficient().forward(q, k, v, seen)
        k, v = (_repeated(x, q) for x in (k, v))
        mask = _aligned(seen.mask, q, heads=1)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, mask, True, 0.0, seen.causal, False, scale=seen.scale
        )
        return out, lse.squeeze(-1) if lse.ndim == 4 else lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: MaskAndScale
    ) -> tuple[Tensor, Tensor, Tensor]:
        if min(q.shape[2], k.shape[2]) == 1:
            return Efficient().backward(dout, q, k, v, out, lse, seen)
        heads, mask = k.shape[1], _aligned(seen.mask, q, heads=1)
        dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous().unsqueeze(-1)
        inputs = (dout, q, _repeated(k, q), _repeated(v, q), out, lse)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            *inputs, *_no_dropout(q), mask, *lengths, 0.0, seen.causal, scale=seen.scale
        )
        return dq, _summed(dk, heads), _summed(dv, heads)


@dataclass(frozen=True)
class Efficient:
    """``_scaled_dot_product_efficient_attention``: pads the lse's rows to a multiple of 32. Supports fp32 too.

    Its backward assumes that ``out`` is [B, S, H, D] in memory and ignores its strides.
    """

    name: ClassVar[str] = "aten-efficient"
    multiple: ClassVar[int] = 8
    widest: ClassVar[int | None] = WIDEST
    takes_delta: ClassVar[bool] = False

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        check_gpu(self.name, device, torch.float16 if dtype == torch.float32 else dtype, range(8, 13))

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: MaskAndScale) -> tuple[Tensor, Tensor]:
        k, v = (_repeated(x, q) for x in (k, v))
        mask = _aligned(seen.mask, q, heads=q.shape[1])
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, 0.0, seen.causal, scale=seen.scale
        )
        return out, lse[..., : q.shape[2]]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: MaskAndScale
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, mask = k.shape[1], _aligned(seen.mask, q, heads=q.shape[1])
        padded = pad(lse, (0, -lse.shape[-1] % 32), value=math.inf).contiguous()  # lse inf gives P = 0 in padded rows
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        tail = (*_no_dropout(q), 0.0, [True, True, True, False], seen.causal)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, _repeated(k, q), _repeated(v, q), mask, out, padded, *tail, scale=seen.scale
        )
        return dq, _summed(dk, heads), _summed(dv, heads)


@dataclass(frozen=True)
class CudaFlash:
    """Torch's FlashAttention-2, ``_flash_attention_forward``, for :class:`~.windowed.Windowed`.

    Its backward sums dQ in no fixed order unless ``torch.use_deterministic_algorithms(True)``.
    """

    name: ClassVar[str] = "aten-flash"
    multiple: ClassVar[int] = MULTIPLE
    widest: ClassVar[int] = WIDEST
    takes_delta: ClassVar[bool] = False

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        check_gpu(self.name, device, dtype, range(8, 13))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> tuple[Tensor, Tensor]:
        lengths = (None, None, q.shape[1], k.shape[1])
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, False, False, scale=scale, **_sides(window)
        )
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        window: Window,
        scale: float,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = (None, None, q.shape[1], k.shape[1])
        dq, dk, dv = _aten._flash_attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, False, *_no_dropout(q), scale=scale, **_sides(window)
        )
        return dq, dk, dv


def _sides(window: Window) -> dict[str, int]:
    left, right = (-1 if side is None else side for side in window)
    return {"window_size_left": left, "window_size_right": right}


def _no_dropout(like: Tensor) -> tuple[Tensor, ...]:
    """Return a generator state that is never used."""
    return tuple(torch.zeros((), dtype=torch.int64, device=like.device) for _ in range(2))


def _aligned(mask: Tensor | None, q: Tensor, *, heads: int) -> Tensor | None:
    """Return the mask as [B, heads, rows, columns] with rows aligned to 16 bytes, as GPU kernels require."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    return pad(mask, (0, -columns % 8))[..., :columns].expand(q.shape[0], heads, -1, -1)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key-value heads to the number of query heads."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Reduce the gradient of :func:`_repeated` to ``heads`` key-value heads, summed in fp32."""
    return gradient if gradient.shape[1] == heads else gradient.float().unflatten(1, (heads, -1)).sum(2)
