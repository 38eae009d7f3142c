"""The trainers of transformers and TRL over sequences that are spread over ranks.

    class Trainer(BurstMixin, SFTTrainer): ...
    trainer = Trainer(model=model, args=SFTConfig(..., packing=True), train_dataset=data, context_size=8)
    trainer.train()

Eight ranks, a context, then hold one sequence together and read the same batches, and the trainer counts them as one
process. In one process it is the trainer that it was. Written for transformers 5, accelerate 1.15 and TRL 1.16; a
version in which a hook that this takes is gone is refused by name.
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
    raise ImportError(f"{error.name} is not installed: pip install 'burst-attention[trainer]'") from error

from .hf_parallel import parallelize
from .trainer_checks import (
    check_hooks,
    check_order,
    check_settings,
    check_trainer,
    context_size_of,
    counted,
    launched_config,
    without_context,
)
from .trainer_contexts import ContextAccelerator
from .trainer_online import OneGeneration


class BurstMixin(OneGeneration):
    """Before a Trainer, or an SFT, DPO, KTO, GRPO or RewardTrainer: ``class Mine(BurstMixin, SFTTrainer)``.

    What the arguments count for each device is for each context. (GRPO's ``generation_batch_size`` is made of it where
    all ranks are counted; set ``steps_per_generation`` instead.)

    Args:
        context_size: how many neighbouring ranks hold one sequence together; it must divide their number. Default: the
            ``cp_size`` of the arguments' ParallelismConfig, else all ranks. With 1 nothing is changed.
        layout: as for :func:`burst_attention.integrations.hf.parallelize`.

    Raises:
        TypeError, ValueError: what needs whole logits (``compute_metrics``, ``label_smoothing_factor``, a loss function
            of one's own), or can't be spread, is refused by name; in one process, too, so that it is known there.
        RuntimeError: the installed transformers, accelerate or TRL is not one that this was written for.
    """

    _own_mean = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls, BurstMixin)

    def __init__(self, *args: Any, context_size: int | None = None, layout: str = "auto", **kwargs: Any) -> None:
        check_trainer(type(self))
        check_hooks(type(self), BurstMixin)
        self._context_size = context_size
        super().__init__(*args, **kwargs)
        trainer: Any = self
        check_settings(trainer)
        if self._context_size == 1:
            return
        if hasattr(trainer, "num_generations"):
            self._generate_by_context()
        temperature = getattr(trainer, "temperature", 1.0)
        group = trainer.accelerator.contexts["context"]
        spread = functools.partial(parallelize, group=group, layout=layout, gradients="mean", temperature=temperature)
        spread(trainer.model)
        reference = getattr(trainer, "ref_model", None)
        if reference is not None:
            spread(trainer.accelerator.unwrap_model(reference, keep_fp32_wrapper=False))
            if trainer.accelerator.native_amp:  # what it was wrapped in before is gone
                trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)

    # How the trainer is told of contexts.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        config = built.get("parallelism_config") or launched_config()
        if config is not None:
            self._context_size = context_size_of(config, self._context_size)
            built["parallelism_config"] = without_context(config)
        return built

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        accelerator = trainer.accelerator
        world = accelerator.num_processes
        size = world if self._context_size is None else self._context_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world % size:
            raise ValueError(
                f"context_size={size!r} must be a divisor of the {world} processes; start the script with torchrun or "
                "accelerate on as many, or change it"
            )
        self._context_size = size
        if size == 1:
            return
        accelerator.__class__ = ContextAccelerator
        accelerator.make_contexts(size)
        trainer.gather_function = accelerator.gather_for_metrics
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.mixed_precision_policy is not None:
            # Else FSDP rounds what the model returns, the loss and log-probabilities, to the dtype of its layers.
            policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=torch.float32)
            plugin.mixed_precision_policy = policy

    def get_total_train_batch_size(self, args: Any) -> int:
        total = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return total // (self._context_size or 1)

    def floating_point_ops(self, inputs: Any) -> float:
        """This rank's part of those of the whole batch."""
        return super().floating_point_ops(inputs) / (self._context_size or 1)  # type: ignore[misc]

    # Evaluation: over several contexts the last batch is filled up with samples of the first.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        check_settings(self)  # a setting may have been assigned since
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # In an evaluation each context gives the mean over its own samples, which its weight belongs to.
        items = None if self._own_mean else num_items_in_batch
        return super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=items
        )

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        if self._context_size == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        if not prediction_loss_only:
            raise ValueError(
                "predict() returns whole logits, which are never formed over ranks; set prediction_loss_only=True in "
                "the arguments, or predict in one process"
            )
        trainer: Any = self
        shared = trainer.accelerator.num_processes > 1 and "labels" in inputs
        own = self._own_samples(inputs["labels"]) if shared else 0
        if own:
            whole = trainer.args.eval_batch_size
            inputs = {name: x[:own] if _has_rows(x, whole) else x for name, x in inputs.items()}
        self._own_mean = shared
        try:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)  # type: ignore[misc]
        finally:
            self._own_mean = False
        if shared:
            loss = self._mean_of_contexts(loss, counted(trainer.model, inputs["labels"]) if own else 0)
        return loss, None, None

    def _own_samples(self, labels: torch.Tensor) -> int:
        """Return how many rows of this context's batch do not only fill it up.

        Samples laid end to end in one row can't be separated: some of them count twice, as under DDP.
        """
        trainer: Any = self
        state, samples = trainer.accelerator.gradient_state, trainer.args.eval_batch_size
        if not state.end_of_dataloader or state.remainder < 1:
            return len(labels)
        own = state.remainder - trainer.accelerator.process_index * samples
        return min(max(0, own), len(labels)) if len(labels) == samples or own <= 0 else len(labels)

    def _mean_of_contexts(self, loss: torch.Tensor, weight: int) -> torch.Tensor:
        """Return the contexts' mean loss by weight: a mixture's router adds the mean of its loss over contexts."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        share = loss * weight if weight else torch.zeros_like(loss)  # a classifier's loss without labels is NaN
        share, whole = accelerator.reduce(torch.stack([share, loss.new_tensor(weight)]), reduction="sum")
        return share / whole


def _has_rows(x: Any, rows: int) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and len(x) == rows
