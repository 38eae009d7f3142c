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
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply, set_seed
from torch.distributed.device_mesh import DeviceMesh

from .hf_batch import IGNORED
from .hf_parallel import parallelize
from .trainer_checks import check_hooks, check_settings, check_trainer, context_size_of, without_context


class ContextAccelerator(Accelerator):
    """An accelerator to which the neighbouring ranks of a context are one process: one reads, counts and is counted.

    Attributes:
        contexts: mesh ("data", "context") over all ranks; set by :meth:`make_contexts`.
    """

    contexts: DeviceMesh

    def make_contexts(self, size: int) -> None:
        """Take each ``size`` neighbours for one context."""
        ranks = torch.arange(self.state.num_processes).view(-1, size)
        self.contexts = DeviceMesh(self.device.type, ranks, mesh_dim_names=("data", "context"))
        # A dispatcher reads on one process and cuts its batch by ranks, not by contexts.
        self.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """Of contexts."""
        return self.contexts.shape[0]

    @property
    def process_index(self) -> int:
        """Of the context that this rank is in."""
        return self.state.process_index // self.contexts.shape[1]

    def _prepare_device_mesh(self) -> None:
        """What a data loader asks: no axis of a mesh tells more of who reads what than the two numbers above."""

    def gather(self, tensor: Any) -> Any:
        """As :class:`Accelerator` does it, from each context once."""
        return recursively_apply(self._once, super().gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As :class:`Accelerator` does it, from each context once, and cutting the last batch by what is left then."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            raise ValueError("gather_for_metrics gathers tensors only over contexts; pass tensors")
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As :class:`Accelerator` does it, counting each context once."""
        reduced = super().reduce(tensor, reduction, scale)
        if reduction != "sum":
            return reduced
        size = self.contexts.shape[1]
        return recursively_apply(lambda x: x / size if x.is_floating_point() else x // size, reduced)

    def _once(self, gathered: torch.Tensor) -> torch.Tensor:
        """Of each context's first rank, from [ranks * n, ...]."""
        return gathered.unflatten(0, (*self.contexts.shape, -1))[:, 0].flatten(0, 1)


class BurstMixin:
    """Before a Trainer, SFTTrainer, DPOTrainer, KTOTrainer or GRPOTrainer: ``class Mine(BurstMixin, SFTTrainer)``.

    Args:
        context_size: how many neighbouring ranks hold one sequence together; it must divide their number. Default: the
            ``cp_size`` of the arguments' ParallelismConfig, else all ranks. With 1 nothing is changed.
        layout: as for :func:`burst_attention.integrations.hf.parallelize`.

    Raises:
        TypeError, ValueError: what needs whole logits (``compute_metrics``, ``label_smoothing_factor``, a loss function
            of one's own), or can't be spread, is refused by name; in one process, too, so that it is known there.
        RuntimeError: the installed transformers, accelerate or TRL is not one that this was written for.
    """

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
            _generate_by_context(trainer)
        temperature = getattr(trainer, "temperature", 1.0)
        group = trainer.accelerator.contexts["context"]
        spread = functools.partial(parallelize, group=group, layout=layout, gradients="mean", temperature=temperature)
        spread(trainer.model)
        reference = getattr(trainer, "ref_model", None)
        if reference is not None:
            spread(trainer.accelerator.unwrap_model(reference))
            if trainer.accelerator.native_amp:  # what it was wrapped in before is gone
                trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)

    # How the trainer is told of contexts.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        config = built.get("parallelism_config")
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

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        args: Any = self.args  # type: ignore[attr-defined]
        self._shares_of_all = num_items_in_batch is not None and args.average_tokens_across_devices
        return super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        if self._context_size == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        if not prediction_loss_only:
            raise ValueError(
                "predict() returns whole logits, which are never formed over ranks; set prediction_loss_only=True in "
                "the arguments, or predict in one process"
            )
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        by_tokens = accelerator.num_processes > 1 and "labels" in inputs
        if by_tokens:
            inputs = self._without_repeated(inputs)
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)  # type: ignore[misc]
        if by_tokens:
            loss = self._of_all_contexts(loss, inputs)
        return loss, None, None

    def _without_repeated(self, inputs: Any) -> Any:
        """A batch of which this context's samples that only fill it up have no labels."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        state, labels = accelerator.gradient_state, inputs["labels"]
        if not state.end_of_dataloader or state.remainder < 1:
            return inputs
        own = max(0, state.remainder - accelerator.process_index * len(labels))
        labels = labels.clone()
        labels[own:] = IGNORED
        return {**inputs, "labels": labels}

    def _of_all_contexts(self, loss: torch.Tensor, inputs: Any) -> torch.Tensor:
        """The loss of the batches of all contexts, as one process that read them together would have it."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        tokens = (inputs["labels"][:, 1:] != IGNORED).sum().to(loss)
        weight = torch.ones_like(loss) if self._shares_of_all else tokens
        share, whole = accelerator.reduce(torch.stack([loss * weight, weight]), reduction="sum")
        return share / whole.clamp(min=1)

    # Trainers that generate what they train on: one generation for each context.

    def _generate(self, prompts: list) -> Any:
        if self._context_size == 1:
            return super()._generate(prompts)  # type: ignore[misc]
        self._align_generators()
        generated = self._from_first(super()._generate(prompts))  # type: ignore[misc]
        self._align_generators()
        return generated

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """[contexts * n, functions]: of a context those of its first rank, for a function need not repeat itself."""
        rewards = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        if self._context_size == 1:
            return rewards
        self._align_generators()
        return self.accelerator._once(rewards)  # type: ignore[attr-defined]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        trainer: Any = self
        if self._context_size == 1:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        logs = [trainer._logs["prompt"], trainer._logs["completion"]]
        before = [list(log) for log in logs]
        for log in logs:
            log.clear()
        scored = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        for log, old in zip(logs, before, strict=True):
            _keep_one_of_each_context(log, old, trainer.accelerator)
        return scored

    def _align_generators(self) -> None:
        """Give the context's ranks its first one's random state: shards of odd lengths draw differently."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        cuda = accelerator.device.type == "cuda"
        state, device_state = self._from_first((torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None))
        torch.set_rng_state(state)
        if cuda:
            torch.cuda.set_rng_state(device_state)

    def _from_first(self, value: Any) -> Any:
        """What the context's first rank has."""
        group = self.accelerator.contexts["context"].get_group()  # type: ignore[attr-defined]
        box = [value]
        dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]


def _keep_one_of_each_context(log: deque, old: list, accelerator: ContextAccelerator) -> None:
    """Of what all ranks logged leave what the contexts' first ones did, behind what was logged before."""
    contexts, size = accelerator.contexts.shape
    new, rows = list(log), len(log) // (contexts * size)
    log.clear()
    log.extend(old + [new[(c * size) * rows + i] for c in range(contexts) for i in range(rows)])


def _generate_by_context(trainer: Any) -> None:
    """Sizes and seeds of a trainer that counts ranks, for contexts."""
    args, accelerator = trainer.args, trainer.accelerator
    args.generation_batch_size //= accelerator.contexts.shape[1]
    if args.generation_batch_size % trainer.num_generations:
        raise ValueError(
            f"the {args.generation_batch_size} completions that {accelerator.num_processes} contexts generate together "
            f"(per_device_train_batch_size * steps_per_generation * contexts) must be a multiple of "
            f"num_generations={trainer.num_generations}"
        )
    set_seed(args.seed + accelerator.process_index)
