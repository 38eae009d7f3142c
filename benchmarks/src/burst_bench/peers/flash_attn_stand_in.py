"""A stand-in for flash_attn on torch's CPU flash kernels, for processes without a GPU.

ring-flash-attn and yunchang import flash_attn, which can't be installed without CUDA. :func:`install` puts modules of
the same names into ``sys.modules``, in this process only. They compute what flash_attn 2.8's dense functions compute;
other functions and arguments raise NotImplementedError.

flash_attn's tensors are [B, S, H, D]. torch's kernels take [B, H, S, D] in any strides, but need a tenth longer if a
head's rows aren't adjacent. Copying the inputs first takes less time. The real package needs neither these copies nor
those of a backward's three results into the caller's buffers. :func:`copying` returns the time that both took.

On CPUs that multiply bf16 slowly, a backward runs in fp32, as the library's own ``aten`` kernel does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from burst_attention.kernels.aten import CpuFlash

VERSION = "2.8.3"  # the version whose signatures these functions have

# Parameters of flash_attn's backward after ``causal``, in order.
_REST = ("window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic", "rng_state")
_copied = [0.0]  # seconds of copies in this process
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, **others: Any
) -> tuple[Tensor, Tensor, None, None]:
    """Return (out [B, Sq, H, D], lse [B, H, Sq] in fp32, None, None) of q [B, Sq, H, D] and k, v [B, Sk, H, D]."""
    _check(q, k, causal, dropout_p=dropout_p, **others)
    q, k, v = (_heads_first(x) for x in (q, k, v))
    out, lse = _forward(q, k, v, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse, None, None


def flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    *rest: Any,
    **others: Any,
) -> None:
    """Write the gradients into dq, dk and dv.

    The real function also returns rowsum(dout * out), which no caller reads.
    """
    _check(q, k, causal, dropout_p=dropout_p, **dict(zip(_REST, rest, strict=False)), **others)
    wider = CpuFlash().backward_dtype(q.dtype)
    dout, q, k, v = (_heads_first(x).to(wider) for x in (dout, q, k, v))
    grads = _backward(dout, q, k, v, out.transpose(1, 2).to(wider), softmax_lse, 0.0, causal, scale=softmax_scale)
    with _watched():
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad.transpose(1, 2))


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> Tensor:
    """Return out [B, S, H, D], as the public, differentiable function does."""
    _check(q, k, causal, dropout_p=dropout_p, **others)
    result: Tensor = _Differentiable.apply(
        q, k, v, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, causal
    )
    return result


class _Differentiable(torch.autograd.Function):
    """The two passes above, as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out, lse, _, _ = flash_attn_forward(q, k, v, 0.0, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, ctx.scale, ctx.causal)
        return *grads, None, None


def install() -> None:
    """Make ``flash_attn`` and ``flash_attn.flash_attn_interface`` importable in this process."""
    package, interface = (_module(name) for name in ("flash_attn", "flash_attn.flash_attn_interface"))
    functions = {"_flash_attn_forward": flash_attn_forward, "_flash_attn_backward": flash_attn_backward}
    refused = {name: _refused(name) for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")}
    vars(interface).update(functions, **refused, flash_attn_func=flash_attn_func)
    vars(package).update(__version__=VERSION, flash_attn_func=flash_attn_func, flash_attn_interface=interface)
    package.__path__ = []  # without a path, Python can't import the submodule


def install_adapters() -> None:
    """Install empty stand-ins for ``ring_flash_attn.adapters``, which fails to import with transformers 5."""
    adapters = _module("ring_flash_attn.adapters")
    for name in ("substitute_hf_flash_attn", "update_ring_flash_attn_params"):
        setattr(adapters, name, _refused(name))


def _heads_first(x: Tensor) -> Tensor:
    """Turn [B, S, H, D] into [B, H, S, D] with each head's rows adjacent in memory."""
    x = x.transpose(1, 2)
    with _watched():
        return x if x.stride(2) == x.shape[3] else x.contiguous()


def copying() -> float:
    """Return the seconds this process has spent on copies that flash_attn itself would not make."""
    return _copied[0]


@contextmanager
def _watched() -> Iterator[None]:
    start = time.perf_counter()
    yield
    _copied[0] += time.perf_counter() - start


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    sys.modules[name] = module
    return module


def _refused(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"the stand-in for flash_attn lacks {name}; install flash_attn on a machine with CUDA"
        )

    return refuse


def _check(q: Tensor, k: Tensor, causal: bool, **others: Any) -> None:
    wanted = {name: x for name, x in others.items() if isinstance(x, Tensor) or x not in (None, 0, -1, (-1, -1))}
    if wanted := sorted(wanted.keys() - {"deterministic", "rng_state", "return_softmax"}):
        raise NotImplementedError(f"the stand-in for flash_attn does not support {', '.join(wanted)}; leave them out")
    if not q.shape[1] or not k.shape[1]:
        raise ValueError("torch's CPU flash kernel ends the process on an empty q or k; use a longer sequence")
    if causal and q.shape[1] != k.shape[1]:  # flash_attn aligns the mask at the bottom right, torch at the top left
        raise NotImplementedError(
            f"the stand-in for flash_attn needs as many keys as queries if causal, not {k.shape[1]} and {q.shape[1]}"
        )
