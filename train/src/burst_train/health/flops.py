"""What a step computes of the model that is trained, and which share of a device's peak that is (MFU).

Of a token: six operations for each parameter that multiplies it (two in the forward, four in the backward), which are
the matrices of linear layers, the head's among them, tied or not, and not the embedding, which is looked up. Of the
attention: for each pair of a query and a key that the mask lets see each other, per head and layer, 12 x head_dim
(a product for the score and one for the value: four in the forward, eight in the backward). What is computed once more,
by a kernel or because of ``--remat``, is not counted: it is the model's operations, not the hardware's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from burst_attention.plan.band import band_area
from burst_attention.plan.mask import Mask

from ..data.sequences import TokenSequence
from ..engines import Heads

# Dense products of bf16 and fp16, in operations per second, from NVIDIA's data sheets; the first name that fits.
PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


@dataclass(frozen=True)
class ModelFlops:
    """Of one model.

    Attributes:
        multiplying: parameters that multiply each token.
        heads: its sizes.
        windows: its layers' sliding windows; None: a layer without one.
    """

    multiplying: int
    heads: Heads
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model: nn.Module, heads: Heads, windows: Iterable[int | None]) -> ModelFlops:
        """Of a model of transformers, its parameters sharded or not."""
        linear = (module for module in model.modules() if isinstance(module, nn.Linear))
        return cls(sum(module.weight.numel() for module in linear), heads, tuple(windows))

    def of_step(self, sequences: Sequence[TokenSequence]) -> int:
        """Operations of a forward and a backward over the sequences."""
        tokens = sum(len(sequence.tokens) for sequence in sequences)
        pairs = sum(
            seen_pairs(len(sequence.tokens), window, sequence.cu_seqlens) * self.windows.count(window)
            for sequence in sequences
            for window in set(self.windows)
        )
        return 6 * self.multiplying * tokens + 12 * self.heads.q_heads * self.heads.head_dim * pairs


def seen_pairs(length: int, window: int | None, cu_seqlens: Sequence[int] | None) -> int:
    """How many (query, key) pairs of one sequence a causal mask lets see each other."""
    q_start, q_stop, k_start, k_stop, lo, hi = Mask(window=window, cu_seqlens=cu_seqlens).regions(length).T
    shift = q_start - k_start
    return int(band_area(q_stop - q_start, k_stop - k_start, lo - shift, hi - shift).sum())


def peak_of(device: torch.device, dtype: torch.dtype, tflops: float | None) -> float | None:
    """Operations per second that a rank's device could do; None if nobody told, and its name does not tell.

    Args:
        tflops: of ``--peak-tflops``.
    """
    if tflops is not None:
        return tflops * 1e12
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
