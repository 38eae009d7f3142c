"""Supported dtypes, their accumulation dtypes and their wire dtypes."""

from __future__ import annotations

import torch

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALVES)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results of ``dtype`` inputs are sent.

    Partial results of fp16 inputs are sent in fp32, because a partial sum can overflow fp16 even if the sum does not.
    """
    return torch.float32 if dtype == torch.float16 else dtype
