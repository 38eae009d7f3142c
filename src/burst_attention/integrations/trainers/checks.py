"""Checks of BurstMixin: installed packages, and settings that don't work over ranks."""

from __future__ import annotations

import inspect
import os
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import has_length

from burst_attention.integrations.hf.call.heads import base_of
from burst_attention.integrations.hf.call.rows import IGNORED
from burst_attention.integrations.hf.layers.checks import shown

from .contexts import ContextAccelerator

# Methods of stock classes that ours override, by class and package. Each must have the parameters of ours.
_OF_TRAINER = (
    *("_build_accelerator_args", "create_accelerator_and_postprocess", "get_total_train_batch_size"),
    *("floating_point_ops", "compute_loss", "prediction_step", "_get_dataloader"),
)
_OF_ACCELERATOR = ("num_processes", "process_index", "_prepare_device_mesh", "gather", "gather_for_metrics", "reduce")
_OF_ONLINE = ("_generate", "_calculate_rewards", "_generate_and_score_completions")  # only of trainers such as GRPO's
# Tests compare each of these trainers with the stock one. Others handle ranks or logits in their own code.
_TRL = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RewardTrainer")
_CUT = ("SFTTrainer",)  # compared under tensor parallelism too
_NEEDS_LOGITS = "needs whole logits, which are never computed over ranks; leave it out"


def check_trainer(kind: type) -> None:
    """Refuse a class that is not a Trainer, or a TRL trainer that we have not tested."""
    if not issubclass(kind, Trainer):
        raise TypeError(f"{kind.__name__} is not a Trainer; write class {kind.__name__}(BurstMixin, Trainer)")
    own = [base for base in kind.__mro__ if base.__module__.startswith("trl.") and issubclass(base, Trainer)]
    for base in own:
        if not base.__name__.startswith("_") and base.__name__ not in _TRL:
            raise TypeError(
                f"{base.__name__} is not supported with BurstMixin; choose one of Trainer, {', '.join(_TRL)}"
            )


def check_order(kind: type, mixin: type) -> None:
    """Refuse a class with a Trainer before the mixin, because the mixin then overrides nothing."""
    order = kind.__mro__
    first = next((each for each in order[1 : order.index(mixin)] if issubclass(each, Trainer)), None)
    if first is not None and not issubclass(first, mixin):
        raise TypeError(
            f"{kind.__name__} has {first.__name__} before {mixin.__name__}, so it would not shard sequences; "
            f"write class {kind.__name__}({mixin.__name__}, {first.__name__})"
        )


def check_hooks(kind: type, mixin: type) -> None:
    """Refuse package versions that lack a method or a parameter that the mixin needs."""
    behind = kind.__mro__[kind.__mro__.index(mixin) + 1 :]
    owner = next(each for each in behind if issubclass(each, Trainer))
    _check_methods(Trainer, "transformers", mixin, _OF_TRAINER)
    _check_methods(Accelerator, "accelerate", ContextAccelerator, _OF_ACCELERATOR)
    if any(hasattr(owner, name) for name in _OF_ONLINE):
        _check_methods(owner, "trl", mixin, _OF_ONLINE)


def _check_methods(stock: type, package: str, ours: type, names: tuple[str, ...]) -> None:
    for name in names:
        method, own = getattr(stock, name, None), getattr(ours, name)
        has = inspect.signature(method).parameters if callable(method) else {}
        passed = inspect.signature(own).parameters.values() if callable(own) else ()
        lacking = [x.name for x in passed if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD) and x.name not in has]
        if method is None or (lacking and "kwargs" not in has and "args" not in has):
            what = f"lacks {lacking[0]}" if method is not None else "is gone"
            raise RuntimeError(
                f"{stock.__name__}.{name} {what} in {package} {version(package)}, a version that is not supported; "
                "in the checkout, run pip install -c constraints.txt -e '.[trainer]'"
            )


def check_countable(args: Any, dataset: Any) -> None:
    """Refuse an evaluation ``dataset`` without a length if workers, whose samples can't be counted here, read it."""
    if args.dataloader_num_workers:
        raise ValueError(
            f"dataloader_num_workers={args.dataloader_num_workers}: samples of an evaluation dataset without a length "
            f"({type(dataset).__name__}) can't be counted in workers; set 0, or pass a dataset with a length"
        )


def check_settings(trainer: Any) -> None:
    """Refuse settings that need whole logits, handle ranks themselves or replace the model's forward."""
    args = trainer.args
    refused = {
        "compute_metrics": (trainer.compute_metrics, _NEEDS_LOGITS),
        "preprocess_logits_for_metrics": (trainer.preprocess_logits_for_metrics, _NEEDS_LOGITS),
        "compute_loss_func": (trainer.compute_loss_func, _NEEDS_LOGITS),
        "model_init": (trainer.model_init, "builds another model when training begins; pass model instead"),
        "label_smoothing_factor": (args.label_smoothing_factor, _NEEDS_LOGITS),
        "use_liger_kernel": (args.use_liger_kernel, "replaces the model's forward; leave it out"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "scales noise by the length of a shard; leave it out"),
        "torch_compile": (args.torch_compile, "would compile the communication between ranks; leave it out"),
        "dispatch_batches": (args.accelerator_config.dispatch_batches, "splits batches by rank; leave it out"),
        "split_batches": (args.accelerator_config.split_batches, "splits batches by rank; leave it out"),
        "eval_use_gather_object": (args.eval_use_gather_object, "gathers from each rank; leave it out"),
        "use_vllm": (getattr(args, "use_vllm", False), "generates by rank; leave it out to let transformers generate"),
        "use_transformers_continuous_batching": (
            getattr(args, "use_transformers_continuous_batching", False),
            "runs the model in a thread, with another attention; leave it out",
        ),
        "cast_lm_head_to_fp32": (getattr(args, "cast_lm_head_to_fp32", False), "is not supported; leave it out"),
        "deepspeed": (trainer.is_deepspeed_enabled, "is not supported; use DDP, or FSDP2 (fsdp=True)"),
    }
    for name, (value, why) in refused.items():
        if value:
            raise ValueError(f"{name}={shown(value)} {why}")
    _check_dropout(trainer.model)
    evaluated = trainer.eval_dataset
    for dataset in evaluated.values() if isinstance(evaluated, dict) else [evaluated]:
        if dataset is not None and not has_length(dataset):
            check_countable(args, dataset)
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' distributes batches by rank; choose 'group_by_length'"
        )
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin is not None and plugin.fsdp_version == 1:
        raise ValueError("fsdp_config['version']=1 is not supported; choose 2")
    if plugin is not None and plugin.cpu_ram_efficient_loading and trainer._tensor_size > 1:
        raise ValueError(
            f"fsdp_config['cpu_ram_efficient_loading']=True loads weights on one rank, but "
            f"tp_size={trainer._tensor_size} cuts whole weights on every rank; set it to False"
        )


def _check_dropout(model: nn.Module) -> None:
    """Refuse active dropout, because all ranks of a context would draw the same values for different tokens."""
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise ValueError(f"{name} has dropout p={part.p}, which is not supported over ranks; set it to 0")


def counted(model: Any, labels: torch.Tensor) -> int:
    """Return the number of labels over which a parallelized model averages its loss."""
    base = base_of(model)
    if base._burst.form is not None:  # the next tokens'
        return int((labels[:, 1:] != IGNORED).sum())
    of_tokens = labels.dim() == 2 and not labels.is_floating_point()
    if of_tokens or base.config.problem_type == "single_label_classification":
        return int((labels != IGNORED).sum())
    return len(labels)


def launched_config() -> ParallelismConfig | None:
    """Return the settings of ``accelerate launch --use_parallelism_config``, which an Accelerator reads; or None."""
    wants_config = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    return ParallelismConfig() if wants_config else None


def context_size_of(config: ParallelismConfig, size: int | None) -> int | None:
    """Return the context size from the argument or a ParallelismConfig; refuse other axes, and two sizes."""
    if config.sp_size > 1:
        raise ValueError(
            f"parallelism_config has sp_size={config.sp_size}, which is not supported; set cp_size in its place"
        )
    if config.cp_size > 1 and size not in (None, config.cp_size):
        raise ValueError(
            f"context_size={size} is not the cp_size={config.cp_size} of parallelism_config; set only one of them"
        )
    return config.cp_size if config.cp_size > 1 else size


def without_context(config: ParallelismConfig) -> ParallelismConfig:
    """Return a ParallelismConfig without a context axis, which accelerate would shard; its ranks join the FSDP axis."""
    if config.cp_size == 1:
        return config
    return type(config)(
        dp_replicate_size=config.dp_replicate_size,
        dp_shard_size=config.dp_shard_size * config.cp_size,
        tp_size=config.tp_size,
        **dict.fromkeys(("cp_size", "sp_size"), 1),  # omitted sizes come from environment variables
    )


def check_tensor_axis(kind: type, plugin: Any, size: int) -> None:
    """Refuse trainers and settings under which tensor parallelism was not compared with a whole model."""
    owner = next(each for each in kind.__mro__ if each.__module__.startswith(("transformers.", "trl.")))
    if owner is not Trainer and owner.__name__ not in _CUT:
        raise ValueError(
            f"tp_size={size} is not supported by {owner.__name__}; leave it out, or use Trainer or {', '.join(_CUT)}"
        )
    if plugin is None and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        raise ValueError(f"tp_size={size} needs FSDP2 over the other ranks; set fsdp=True in the training arguments")
    _check_methods(Trainer, "transformers", kind, ("get_tp_size",))
    _check_methods(Accelerator, "accelerate", ContextAccelerator, ("_prepare_tp",))


def check_memory(memory: Any, trainer: Any, context_size: int | None) -> None:
    """Raise ValueError if ``BurstMixin(memory=...)`` would have no effect, or the trainer changes recomputation too."""
    if context_size == 1:
        raise ValueError("memory=... needs contexts of more than one rank; raise context_size, or leave memory out")
    if getattr(memory, "recompute", "none") == "none":
        return
    if trainer.args.gradient_checkpointing:
        raise ValueError(
            f"gradient_checkpointing=True would replace memory={memory!r}; set gradient_checkpointing=False in the "
            "training arguments"
        )
    if hasattr(trainer, "ref_model"):  # TRL's trainers with a reference switch checkpointing off and on
        raise ValueError(
            f"memory={memory!r} recomputes layers, which {type(trainer).__name__} would switch off for its reference "
            "model; leave recompute out, and set gradient_checkpointing=True in the training arguments"
        )
