"""What BurstMixin refuses, by name: packages that it was not written for, and settings that can't be spread."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig
from torch import nn
from transformers import Trainer

from .hf_batch import IGNORED
from .hf_checks import shown

# What is overridden, or called with arguments of our own: (class, package, method, parameters that it must have).
_HOOKS: list[tuple[type, str, str, tuple[str, ...]]] = [
    (Trainer, "transformers", "_build_accelerator_args", ("kwargs",)),
    (Trainer, "transformers", "create_accelerator_and_postprocess", ()),
    (Trainer, "transformers", "get_total_train_batch_size", ("args",)),
    (Trainer, "transformers", "floating_point_ops", ("inputs",)),
    (Trainer, "transformers", "compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch")),
    (Trainer, "transformers", "prediction_step", ("model", "inputs", "prediction_loss_only", "ignore_keys")),
    (Accelerator, "accelerate", "num_processes", ()),
    (Accelerator, "accelerate", "process_index", ()),
    (Accelerator, "accelerate", "_prepare_device_mesh", ()),
    (Accelerator, "accelerate", "gather", ("tensor",)),
    (Accelerator, "accelerate", "gather_for_metrics", ("input_data", "use_gather_object")),
    (Accelerator, "accelerate", "reduce", ("tensor", "reduction", "scale")),
]
# Of trainers that generate what they train on; only asked of those.
_ONLINE_HOOKS: list[tuple[str, tuple[str, ...]]] = [
    ("_generate", ("prompts",)),
    ("_calculate_rewards", ()),
    ("_generate_and_score_completions", ("inputs",)),
]
# What TRL's trainers were each held against the stock one; others do things of their own with ranks or with logits.
_TRL = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RewardTrainer")
_NEEDS_LOGITS = "needs whole logits, which are never formed over ranks; leave it out"


def check_trainer(kind: type) -> None:
    """Refuse what is no trainer, or one of TRL that is not known to come out right."""
    if not issubclass(kind, Trainer):
        raise TypeError(f"{kind.__name__} is no Trainer: write class {kind.__name__}(BurstMixin, Trainer)")
    own = [each for each in kind.__mro__ if each.__module__.startswith("trl.") and issubclass(each, Trainer)]
    for each in own:
        if not each.__name__.startswith("_") and each.__name__ not in _TRL:
            raise TypeError(f"{each.__name__} is not supported over contexts; choose Trainer, {', '.join(_TRL)}")


def check_order(kind: type, mixin: type) -> None:
    """Refuse a class in which a Trainer comes before the mixin, which then overrides nothing."""
    order = kind.__mro__
    first = next((each for each in order[1 : order.index(mixin)] if issubclass(each, Trainer)), None)
    if first is not None and not issubclass(first, mixin):
        raise TypeError(
            f"{kind.__name__} has {first.__name__} before {mixin.__name__}, so it would train without contexts; "
            f"write class {kind.__name__}({mixin.__name__}, {first.__name__})"
        )


def check_hooks(kind: type, mixin: type) -> None:
    """Refuse packages in which something that the mixin overrides is no more, or takes other arguments."""
    behind = kind.__mro__[kind.__mro__.index(mixin) + 1 :]
    owner = next(each for each in behind if issubclass(each, Trainer))
    hooks = list(_HOOKS)
    if any(hasattr(owner, name) for name, _ in _ONLINE_HOOKS):
        hooks += [(owner, "trl", name, parameters) for name, parameters in _ONLINE_HOOKS]
    for holder, package, name, parameters in hooks:
        method: Callable[..., Any] | property | None = getattr(holder, name, None)
        has = inspect.signature(method).parameters if callable(method) else {}
        lacking = [parameter for parameter in parameters if parameter not in has]
        if method is None or (lacking and "kwargs" not in has and "args" not in has):
            what = f"lacks {lacking[0]}" if method is not None else "is gone"
            raise RuntimeError(
                f"{holder.__name__}.{name} {what} in {package} {version(package)}, which this was not written for; "
                "install burst-attention[trainer] with the versions in its constraints"
            )


def check_settings(trainer: Any) -> None:
    """Refuse what would need whole logits, or does things of its own with ranks or with the model's forward."""
    args = trainer.args
    refused = {
        "compute_metrics": (trainer.compute_metrics, _NEEDS_LOGITS),
        "preprocess_logits_for_metrics": (trainer.preprocess_logits_for_metrics, _NEEDS_LOGITS),
        "compute_loss_func": (trainer.compute_loss_func, _NEEDS_LOGITS),
        "model_init": (trainer.model_init, "makes another model when training begins; pass the model"),
        "label_smoothing_factor": (args.label_smoothing_factor, _NEEDS_LOGITS),
        "use_liger_kernel": (args.use_liger_kernel, "replaces the model's forward; the loss is chunked here already"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "adds noise by the length of a rank's shard; leave it out"),
        "torch_compile": (args.torch_compile, "compiles the exchange of ranks with the model; leave it out"),
        "dispatch_batches": (args.accelerator_config.dispatch_batches, "cuts batches by rank; leave it out"),
        "split_batches": (args.accelerator_config.split_batches, "cuts batches by rank; leave it out"),
        "eval_use_gather_object": (args.eval_use_gather_object, "gathers of each rank; leave it out"),
        "use_vllm": (getattr(args, "use_vllm", False), "generates by rank; leave it out: transformers generates"),
        "cast_lm_head_to_fp32": (getattr(args, "cast_lm_head_to_fp32", False), "is not supported; leave it out"),
        "deepspeed": (trainer.is_deepspeed_enabled, "is not supported; use DDP, or FSDP2 (fsdp=True)"),
    }
    for name, (value, why) in refused.items():
        if value:
            raise ValueError(f"{name}={shown(value)} {why}")
    _check_dropout(trainer.model)
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError("train_sampling_strategy='batch_rebalance' deals batches to ranks; choose 'group_by_length'")
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        raise ValueError("fsdp_config['version']=1 is not supported; choose 2")


def _check_dropout(model: nn.Module) -> None:
    """Ranks of a context would draw the same for different tokens."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Dropout) and part.p > 0:
            raise ValueError(f"{name} drops out with p={part.p}, which is not supported over ranks; set it to 0")


def counted(model: Any, labels: torch.Tensor) -> int:
    """Return over how many labels the loss of a parallelized model is a mean."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base._burst.form is not None:  # the next tokens'
        return int((labels[:, 1:] != IGNORED).sum())
    if base.config.problem_type == "single_label_classification":
        return int((labels != IGNORED).sum())
    return len(labels)


def launched_config() -> ParallelismConfig | None:
    """What ``accelerate launch --use_parallelism_config`` asks for, which an accelerator would read by itself."""
    asked = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    return ParallelismConfig() if asked else None


def context_size_of(config: ParallelismConfig, size: int | None) -> int | None:
    """The size of contexts, of which a ParallelismConfig may tell.

    Raises:
        ValueError: it has axes that don't go with contexts, or another size than the argument.
    """
    if config.tp_size > 1 or config.sp_size > 1:
        raise ValueError(
            f"parallelism_config has tp_size={config.tp_size} and sp_size={config.sp_size}; beside a context only "
            "dp_replicate_size and dp_shard_size are supported"
        )
    if config.cp_size > 1 and size not in (None, config.cp_size):
        raise ValueError(
            f"context_size={size} is not the cp_size={config.cp_size} of parallelism_config; give one of them"
        )
    return config.cp_size if config.cp_size > 1 else size


def without_context(config: ParallelismConfig) -> ParallelismConfig:
    """A ParallelismConfig in which a context's ranks are more to shard over: accelerate spreads contexts by itself."""
    if config.cp_size == 1:
        return config
    return type(config)(
        dp_replicate_size=config.dp_replicate_size,
        dp_shard_size=config.dp_shard_size * config.cp_size,
        **dict.fromkeys(("cp_size", "tp_size", "sp_size"), 1),  # what is left out, the launcher's environment says
    )
