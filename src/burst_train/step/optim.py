"""AdamW, its schedule, and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from burst_attention.integrations import hf

from ..config import ScheduleName, TrainConfig

# What is left of the way from lr to its minimum, by the share of the decay that is over.
_LEFT: dict[ScheduleName, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
    "warmup-stable-decay": lambda progress: 1.0 - progress,
}


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW for sharded parameters; norms and biases (one dim) have no weight decay."""
    optim = config.optim
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    kind: Any = torch.optim.AdamW
    if config.memory.optimizer == "adamw-8bit":
        from torchao.optim import AdamW8bit  # supports FSDP2's shards (arXiv 2110.02861)

        kind = AdamW8bit
    return kind(groups, lr=config.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LRScheduler:
    """Return linear warm-up to ``lr``, then ``--schedule`` down to ``min_lr * lr`` at ``decay_steps``."""
    optim, last = config.optim, config.decay_steps
    begin = optim.warmup
    if optim.schedule == "warmup-stable-decay":
        begin = max(begin, last - -(-last // 10))
    for group in optimizer.param_groups:
        group["initial_lr"] = config.peak_lr
    # The schedule's step 0 has rate 0, where nothing is learnt, so the first training step is its step 1.

    def share(step: int) -> float:
        if step < optim.warmup:
            return step / optim.warmup
        progress = min(1.0, max(0, step - begin) / max(1, last - begin))
        return _LEFT[optim.schedule](progress) * (1.0 - optim.min_lr) + optim.min_lr

    return LambdaLR(optimizer, share, last_epoch=0)


def clip_by_global_norm(model: nn.Module, largest: float) -> float:
    """Clip gradients to a global norm of ``largest`` (0: don't); return the norm before, if not finite unclipped."""
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if len(meshes) > 1:  # as where layers are cut over a tensor-parallel axis
        return hf.clip_grad_norm_(model.parameters(), largest or math.inf).item()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not math.isfinite(norm.item()):
        return norm.item()
    if largest:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm.item()
