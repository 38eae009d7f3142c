"""Trainers of transformers and TRL that shard each sequence over several ranks.

    class Trainer(BurstMixin, SFTTrainer): ...
    trainer = Trainer(model=model, args=SFTConfig(..., packing=True), train_dataset=data, context_size=8)
    trainer.train()

Here groups of eight ranks, called contexts, share each sequence. The ranks of a context read the same batches, and the
trainer counts them as one process. In a single process the trainer works as without the mixin. Written for
transformers 5, accelerate 1.15 and TRL 1.16. If another version lacks a method that the mixin overrides, an error
names the method.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    text = f"{error.name} is not installed: in the checkout, run pip install -e '.[trainer]'"
    raise ModuleNotFoundError(text, name=error.name) from error

from transformers.trainer_utils import has_length

from burst_attention.integrations.hf.call.heads import base_of
from burst_attention.integrations.hf.call.rows import IGNORED
from burst_attention.integrations.hf.call.vision import whole_arguments
from burst_attention.integrations.hf.layers.memory import Memory
from burst_attention.integrations.hf.tensor.axis import tensor_parallel
from burst_attention.plan.strategy import Strategy

from ..hf.parallel import parallelize
from .checks import (
    check_countable,
    check_hooks,
    check_memory,
    check_order,
    check_settings,
    check_tensor_axis,
    check_trainer,
    context_size_of,
    counted,
    launched_config,
    without_context,
)
from .contexts import ContextAccelerator, Counted, samples_of
from .online import OneGeneration


class BurstMixin(OneGeneration):
    """A mixin that shards sequences over contexts of ranks: ``class Mine(BurstMixin, SFTTrainer)``.

    Put it before Trainer, SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer or RewardTrainer. Training arguments per
    device count per context. (GRPO computes ``generation_batch_size`` from the number of ranks; set
    ``steps_per_generation`` instead.)

    With ``tp_size`` in the arguments' ParallelismConfig, each context also cuts the model over that number of
    neighbouring ranks (:func:`burst_attention.integrations.hf.tensor_parallel`). This needs Trainer or SFTTrainer, and
    FSDP2 (``fsdp=True``) over the other ranks.

    Args:
        context_size: the number of ranks that share one sequence, neighbours but for ``tp_size``; it must divide the
            number of ranks. Default: the ``cp_size`` of the arguments' ParallelismConfig, else all. 1 changes nothing.
        strategy, memory: as for :func:`burst_attention.integrations.hf.parallelize`. ``memory`` needs contexts of more
            than one rank.

    Raises:
        TypeError, ValueError: a setting needs whole logits (``compute_metrics``, ``label_smoothing_factor``, a custom
            loss function) or is not supported over ranks. This is checked in a single process too, so that you find
            out early. The message names the setting.
        RuntimeError: the installed version of transformers, accelerate or TRL is not supported.
    """

    _own_mean = False
    _tensor_size = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls, BurstMixin)

    def __init__(
        self,
        *args: Any,
        context_size: int | None = None,
        strategy: Strategy | str | None = None,
        memory: Memory | None = None,
        **kwargs: Any,
    ) -> None:
        check_trainer(type(self))
        check_hooks(type(self), BurstMixin)
        self._context_size = context_size
        super().__init__(*args, **kwargs)
        trainer: Any = self
        check_settings(trainer)
        if memory is not None:
            check_memory(memory, trainer, self._shared)
        if self._shared == 1:
            return
        if self._tensor_size > 1:
            tensor_parallel(trainer.model, trainer.accelerator.torch_device_mesh["tp"])
            if hasattr(trainer, "_tp_size"):  # TRL divides its count of tokens by it
                trainer._tp_size = self.get_tp_size()
        if hasattr(trainer, "num_generations"):
            self._generate_by_context()
        temperature = getattr(trainer, "temperature", 1.0)
        group = trainer.accelerator.contexts["context"]
        spread = functools.partial(
            parallelize, group=group, strategy=strategy, gradients="mean", temperature=temperature, memory=memory
        )
        spread(trainer.model)
        reference = getattr(trainer, "ref_model", None)
        if reference is not None:
            spread(trainer.accelerator.unwrap_model(reference, keep_fp32_wrapper=False))
            if trainer.accelerator.native_amp:  # unwrap_model removed the autocast wrapper, so wrap it again
                trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)

    @property
    def _shared(self) -> int:
        """How many ranks read the same batches."""
        return (self._context_size or 1) * self._tensor_size

    # Methods that make the trainer count contexts instead of ranks.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        config = built.get("parallelism_config") or launched_config()
        if config is not None:
            self._context_size = context_size_of(config, self._context_size)
            self._tensor_size = config.tp_size
            if config.tp_size > 1:
                check_tensor_axis(type(self), built.get("fsdp_plugin"), config.tp_size)
            built["parallelism_config"] = without_context(config)
        return built

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator and group its ranks into contexts."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        accelerator = trainer.accelerator
        world = accelerator.num_processes // self._tensor_size
        size = world if self._context_size is None else self._context_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world % size:
            over = f" over tp_size={self._tensor_size}" if self._tensor_size > 1 else ""
            raise ValueError(
                f"context_size={size!r} is not a divisor of the number of processes{over}, {world}; change "
                "context_size, or start more processes with torchrun or accelerate launch"
            )
        self._context_size = size
        if self._shared == 1:
            return
        accelerator.__class__ = ContextAccelerator
        accelerator.make_contexts(size, self._tensor_size)
        trainer.gather_function = accelerator.gather_for_metrics
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.mixed_precision_policy is not None:
            # By default FSDP rounds the model's output (loss, log-probabilities) to the dtype of its layers.
            policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=torch.float32)
            plugin.mixed_precision_policy = policy

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples per step; ranks of a context share theirs."""
        total = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return total // self._shared

    def get_tp_size(self) -> int:
        """Return 1: the accelerator counts the ranks of the tensor axis, like those of a context, as one."""
        return 1 if self._tensor_size > 1 else super().get_tp_size()  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> float:
        """Return this rank's share of the floating-point operations of the whole batch."""
        return super().floating_point_ops(inputs) / self._shared  # type: ignore[misc]

    # In an evaluation over several contexts, accelerate fills up the last batch with samples of the first one. The
    # methods below leave out these repeated samples.

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        """Return a data loader; count the samples that an evaluation reads from a dataset without a length."""
        trainer: Any = self
        if self._shared != 1 and not is_training and not has_length(dataset):
            check_countable(trainer.args, dataset)
            dataset = Counted(dataset)
        return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Check the settings again, then train."""
        check_settings(self)  # a setting may have been assigned since
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of this context's samples."""
        # In an evaluation each context returns the mean over its samples. _mean_of_contexts weights these means.
        items = None if self._own_mean else num_items_in_batch
        return super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=items
        )

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Compute one evaluation batch's loss over the ranks of this context."""
        if self._shared == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        if not prediction_loss_only:
            raise ValueError(
                "predict() returns whole logits, which are never computed over ranks; set prediction_loss_only=True "
                "in the arguments, or predict in one process"
            )
        trainer: Any = self
        state, contexts = trainer.accelerator.gradient_state, trainer.accelerator.num_processes
        if state.end_of_dataloader and state.remainder < 0:  # accelerate does not know the number of samples
            loader = state.active_dataloader
            read = samples_of(loader)
            if read is not None:
                loader.remainder = read % (trainer.args.eval_batch_size * contexts)
            elif not has_length(loader.dataset):
                raise ValueError(
                    "the evaluation's data loader reads a dataset without a length, whose samples are not counted; "
                    "let get_eval_dataloader return that of BurstMixin, or use a dataset with a length"
                )
        shared = contexts > 1 and "labels" in inputs
        own = self._own_samples(inputs["labels"]) if shared else 0
        if own:
            inputs = _without_repeated(trainer.model, inputs, own, trainer.args.eval_batch_size)
        self._own_mean = shared
        try:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)  # type: ignore[misc]
        finally:
            self._own_mean = False
        if shared:
            loss = self._mean_of_contexts(loss, counted(trainer.model, inputs["labels"]) if own else 0)
        return loss, None, None

    def _own_samples(self, labels: torch.Tensor) -> int:
        """Return how many rows of this context's batch are not repeated samples; all, where one row has several."""
        trainer: Any = self
        state, samples = trainer.accelerator.gradient_state, trainer.args.eval_batch_size
        if not state.end_of_dataloader or state.remainder < 1:
            return len(labels)
        own = state.remainder - trainer.accelerator.process_index * samples
        return min(max(0, own), len(labels)) if len(labels) == samples or own <= 0 else len(labels)

    def _mean_of_contexts(self, loss: torch.Tensor, weight: int) -> torch.Tensor:
        """Return the weighted mean of the contexts' losses. It also averages router losses of a mixture of experts."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        share = loss * weight if weight else torch.zeros_like(loss)  # a classifier's loss without labels is NaN
        share, whole = accelerator.reduce(torch.stack([share, loss.new_tensor(weight)]), reduction="sum")
        return share / whole


def _without_repeated(model: Any, inputs: Any, own: int, rows: int) -> dict[str, Any]:
    """Return a batch without the samples behind its first ``own`` ones, or without their labels if it has images."""
    if whole_arguments(base_of(model)) & inputs.keys():  # images are not in rows, so a sample's can't be cut out
        labels = inputs["labels"].clone()
        labels[own:] = IGNORED
        return {**inputs, "labels": labels}
    return {name: x[:own] if _has_rows(x, rows) else x for name, x in inputs.items()}


def _has_rows(x: Any, rows: int) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and len(x) == rows
