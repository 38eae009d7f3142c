"""Supported dtypes, their accumulation dtypes and their wire dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALVES)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def converted(x: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Return ``x`` in ``dtype``: a dense copy, or ``x`` itself if it has that dtype and ``copy`` is not asked for.

    It starts one operator, where ``Tensor.to`` starts three.
    """
    return x if x.dtype == dtype and not copy else x.new_empty(x.shape, dtype=dtype).copy_(x)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results of ``dtype`` inputs are sent.

    Partial results of fp16 inputs are sent in fp32, because a partial sum can overflow fp16 even if the sum does not.
    """
    return torch.float32 if dtype == torch.float16 else dtype
