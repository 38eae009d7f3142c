"""AdamW, its schedule, and clipping by the global norm."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from ..config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW for sharded parameters; norms and biases (one dim) have no weight decay."""
    optim = config.optim
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LRScheduler:
    """Return a schedule: linear warm-up, then half a cosine from ``lr`` to ``min_lr * lr``.

    The rate reaches its minimum at ``decay_steps`` and stays there, also if ``--steps`` is raised later.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = config.peak_lr
    # The schedule's step 0 has rate 0, where nothing is learnt, so the first training step is its step 1.
    last = config.decay_steps
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, config.optim.warmup, last, min_lr_rate=config.optim.min_lr, last_epoch=0
    )
    # Beyond its last step, transformers' cosine would rise again.
    schedule.lr_lambdas = [lambda step, rate=rate: rate(min(step, last)) for rate in schedule.lr_lambdas]
    return schedule


def clip_by_global_norm(model: nn.Module, largest: float) -> float:
    """Clip gradients to a global norm of at most ``largest`` (0: don't clip); return the norm before clipping.

    A non-finite norm scales nothing: scaling would hide which gradient caused it.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not math.isfinite(norm.item()):
        return norm.item()
    if largest:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm.item()
