"""Floating-point operations of a training step, and their share of the device's peak (MFU).

Per token: six for each parameter of linear layers with the head, four if it is frozen. The embedding and routers do not
count, nor experts that don't compute the token. Attention, per head, layer and unmasked (query, key) pair:
6 x (head_dim + v_head_dim). Recomputation does not count: these are the model's operations, not the hardware's.

Where an indexer chooses keys, only chosen pairs count, and of a chosen block all keys. The indexer has no backward: two
per parameter of its linear layers, and 2 x index_head_dim per head and pair that it scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from burst_attention.attention import Reach, mask_of
from burst_attention.plan.band import band_area
from burst_attention.plan.indexed import Indexed

from ..data.sequences import TokenSequence
from ..strategies import Heads

# Dense bf16 and fp16 operations per second, from NVIDIA's data sheets. The first name that matches is used.
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
# Names that configurations of transformers have for the number of experts that compute a token.
USED_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", "top_k_experts")


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one model."""

    per_token: int | None  # None if the model does not say how many experts compute a token
    heads: Heads
    windows: tuple[Reach, ...]  # what each attention sees
    indexed: Sequence[Indexed | None] = ()  # how each attention gets its keys; None, or empty: it attends to all

    @classmethod
    def of(
        cls,
        model: nn.Module,
        heads: Heads,
        windows: Iterable[Reach],
        config: Any = None,
        indexed: Sequence[Indexed | None] = (),
    ) -> ModelFlops:
        """Build it from a transformers model, with or without sharded parameters, and its configuration."""
        windows = tuple(windows)
        indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
        scoring = {id(part.weight) for each in indexers for part in each.modules() if isinstance(part, nn.Linear)}
        linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        per_token = sum(2 * weight.numel() if id(weight) in scoring else _operations(weight) for weight in linear)
        experts = [weight for module in model.modules() for weight in _experts_of(module)]
        text = config and config.get_text_config(decoder=True)
        used = next((n for name in USED_EXPERTS if isinstance(n := getattr(text, name, None), int)), None)
        if experts and used is None:
            return cls(None, heads, windows, indexed)
        per_token += sum(_operations(weight) * used // weight.shape[0] for weight in experts if used is not None)
        return cls(per_token, heads, windows, indexed)

    def of_step(self, sequences: Sequence[TokenSequence]) -> int | None:
        """Return the operations of a forward and a backward over the sequences; None if they are not known."""
        if self.per_token is None:
            return None
        tokens = sum(len(sequence.tokens) for sequence in sequences)
        layers, heads = Counter(zip(self.windows, self.indexed or [None] * len(self.windows), strict=True)), self.heads
        per_pair = 6 * heads.q_heads * (heads.head_dim + (heads.v_head_dim or heads.head_dim))
        attention = 0
        for sequence in sequences:
            size, borders = len(sequence.tokens), sequence.cu_seqlens
            for (window, indexed), count in layers.items():
                scored, pairs = indexed_pairs(size, window, borders, indexed)
                attention += count * (per_pair * pairs + scored)
        return self.per_token * tokens + attention


def indexed_pairs(
    length: int, window: Reach, borders: Sequence[int] | None, indexed: Indexed | None
) -> tuple[int, int]:
    """Return the operations of an indexer's scores, and the (query, key) pairs of the attention."""
    seen = seen_pairs(length, window, borders)
    if indexed is None:
        return 0, seen
    # A query that sees n keys attends to min(n, count) of them: as many as in a window.
    return 2 * indexed.index_heads * indexed.index_dim * seen, seen_pairs(length, indexed.count, borders)


def _operations(weight: Tensor) -> int:
    return weight.numel() * (6 if weight.requires_grad else 4)


def _experts_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of a module of experts, [experts, rows, columns]. Convolutions have three dimensions too."""
    convolution = isinstance(module, nn.modules.conv._ConvNd)
    return [] if convolution else [weight for weight in module.parameters(recurse=False) if weight.ndim == 3]


def seen_pairs(length: int, window: Reach, cu_seqlens: Sequence[int] | None) -> int:
    """Return the number of (query, key) pairs that a causal mask keeps."""
    q_start, q_stop, k_start, k_stop, lo, hi = mask_of(window, length, cu_seqlens).regions(length).T
    shift = q_start - k_start
    return int(band_area(q_stop - q_start, k_stop - k_start, lo - shift, hi - shift).sum())


def peak_of(device: torch.device, dtype: torch.dtype, tflops: float | None) -> float | None:
    """Return the peak operations per second of one rank's device: ``tflops``, else by its name; None if unknown."""
    if tflops is not None:
        return tflops * 1e12
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
