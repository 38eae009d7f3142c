"""AdamW, its schedule, and clipping by the global norm."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over sharded parameters; norms and biases, which have one dim, don't decay."""
    optim = config.optim
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of step 1 to ``steps``: a linear rise over the warm-up, then half a cosine from ``lr`` to ``min_lr * lr``."""
    warmup, last = config.optim.warmup, config.optim.min_lr
    if step <= warmup:
        return config.peak_lr * step / warmup
    done = (step - warmup) / max(config.run.steps - warmup, 1)
    return config.peak_lr * (last + (1 - last) * (1 + math.cos(math.pi * done)) / 2)


def clip_by_global_norm(model: nn.Module, largest: float) -> float:
    """Scale gradients to a norm over all ranks of at most ``largest`` (0: leave them); returns the norm before."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if largest:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm.item()
