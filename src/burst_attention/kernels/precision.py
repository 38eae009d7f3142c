"""The dtypes that there are, what sums of them are kept in, and what of them goes over the wire."""

from __future__ import annotations

import torch

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALVES)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a partial result of ``dtype`` inputs is rounded to before it is sent.

    fp16 stays in fp32: a part of a sum may overflow where the sum does not.
    """
    return torch.float32 if dtype == torch.float16 else dtype
