"""The trainers of transformers and TRL over sequences that are spread over ranks.

    class Trainer(BurstMixin, SFTTrainer): ...
    trainer = Trainer(model=model, args=SFTConfig(..., packing=True), train_dataset=data, context_size=8)
    trainer.train()

Eight ranks then hold one sequence together and read the same batches, and the trainer counts them as one. Written for
transformers 5, accelerate 1.15 and TRL 1.16; a version in which a hook that this takes is gone is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply, set_seed
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer

from .hf_parallel import parallelize

# What this overrides, or calls with arguments of its own: (class, package, method, parameters that it must have).
_HOOKS: list[tuple[type, str, str, tuple[str, ...]]] = [
    (Trainer, "transformers", "_build_accelerator_args", ("kwargs",)),
    (Trainer, "transformers", "create_accelerator_and_postprocess", ()),
    (Trainer, "transformers", "get_tp_size", ()),
    (Trainer, "transformers", "get_cp_size", ()),
    (Trainer, "transformers", "compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch")),
    (Trainer, "transformers", "_track_num_input_tokens", ("inputs",)),
    (Accelerator, "accelerate", "_prepare_device_mesh", ()),
    (Accelerator, "accelerate", "gather", ("tensor",)),
    (Accelerator, "accelerate", "gather_for_metrics", ("input_data", "use_gather_object")),
]
# Of trainers that generate what they train on; only asked of those.
_ONLINE_HOOKS: list[tuple[str, tuple[str, ...]]] = [
    ("_generate_single_turn", ()),
    ("_generate", ("prompts",)),
    ("_calculate_rewards", ()),
]


class ContextAccelerator(Accelerator):
    """An accelerator to which the ranks of a context, which are neighbours, are one where data is read and counted.

    Attributes:
        data_mesh: ("dp_shard", "cp") over all processes; None until :meth:`make_contexts`.
    """

    data_mesh: DeviceMesh | None = None
    _once = False

    def make_contexts(self, size: int) -> None:
        """Take each ``size`` neighbours for one context."""
        ranks = torch.arange(self.num_processes).view(-1, size)
        self.data_mesh = DeviceMesh(self.device.type, ranks, mesh_dim_names=("dp_shard", "cp"))
        # A dispatcher reads on one process and cuts its batch by processes, not by contexts.
        self.dataloader_config.dispatch_batches = False

    def _prepare_device_mesh(self) -> DeviceMesh | None:
        """What a data loader asks: processes that differ in "cp" alone get the same batches."""
        return self.data_mesh

    def gather(self, tensor: Any) -> Any:
        """As :class:`Accelerator` does it: of every process. For metrics, of one process of each context."""
        gathered = super().gather(tensor)
        return recursively_apply(self._one_of_each_context, gathered) if self._once else gathered

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Of each context once: what is cut off the last batch is counted in samples, and processes share them."""
        if use_gather_object:
            raise ValueError(
                "gather_for_metrics(use_gather_object=True) is not supported over contexts; gather tensors"
            )
        self._once = True
        try:
            return super().gather_for_metrics(input_data)
        finally:
            self._once = False

    def _one_of_each_context(self, x: torch.Tensor) -> torch.Tensor:
        assert self.data_mesh is not None
        contexts, size = self.data_mesh.shape
        return x.view(contexts, size, -1, *x.shape[1:])[:, 0].flatten(0, 1)


class BurstMixin:
    """Before a Trainer, SFTTrainer, DPOTrainer or GRPOTrainer: ``class Mine(BurstMixin, SFTTrainer)``.

    Args:
        context_size: how many neighbouring processes hold one sequence together; it must divide their number. Default:
            the ``cp_size`` of the arguments' ParallelismConfig, else all processes.
        layout: as for :func:`burst_attention.integrations.hf.parallelize`.

    Raises:
        TypeError, ValueError: what needs whole logits (``compute_metrics``, ``label_smoothing_factor``, a loss function
            of one's own), or can't be spread, is refused by name.
        RuntimeError: the installed transformers, accelerate or TRL is not one that this was written for.
    """

    def __init__(self, *args: Any, context_size: int | None = None, layout: str = "auto", **kwargs: Any) -> None:
        _check_hooks(type(self))
        self._context_size = context_size
        super().__init__(*args, **kwargs)
        trainer: Any = self
        _check_settings(trainer)
        mesh = trainer.accelerator.data_mesh
        spread = functools.partial(parallelize, group=mesh["cp"], layout=layout, gradients="mean")
        spread = functools.partial(spread, temperature=getattr(trainer, "temperature", 1.0))
        spread(trainer.model)
        reference = getattr(trainer, "ref_model", None)
        if reference is not None:
            spread(trainer.accelerator.unwrap_model(reference))
            if trainer.accelerator.native_amp:  # what it was wrapped in before is gone
                trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)
        if hasattr(trainer, "num_generations"):
            _generate_by_context(trainer)

    # How the trainer is told of contexts. It knows tensor parallelism, whose ranks read one batch as ours do.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        config = built.get("parallelism_config")
        if config is not None:
            if config.tp_size > 1 or config.sp_size > 1:
                raise ValueError(
                    f"parallelism_config has tp_size={config.tp_size} and sp_size={config.sp_size}; beside a context "
                    "only dp_replicate_size and dp_shard_size are supported"
                )
            if self._context_size not in (None, config.cp_size) and config.cp_size > 1:
                raise ValueError(
                    f"context_size={self._context_size} is not the cp_size={config.cp_size} of parallelism_config; "
                    "give one of them"
                )
            if config.cp_size > 1:
                self._context_size = config.cp_size
                # To accelerate, contexts are more ranks to shard over: it has a context parallelism of its own.
                built["parallelism_config"] = type(config)(
                    dp_replicate_size=config.dp_replicate_size, dp_shard_size=config.dp_shard_size * config.cp_size
                )
        return built

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        if trainer.args.accelerator_config.dispatch_batches:
            raise ValueError("dispatch_batches=True cuts batches by process; leave it out, each context reads its own")
        if trainer.is_deepspeed_enabled:
            raise ValueError("deepspeed is not supported; use DDP, or FSDP2 (fsdp_version 2)")
        accelerator, world = trainer.accelerator, trainer.accelerator.num_processes
        size = world if self._context_size is None else self._context_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world % size:
            raise ValueError(f"context_size={size!r} must be a divisor of the {world} processes")
        self._context_size = size
        if world == 1 and not dist.is_initialized():
            raise ValueError("there is one process and no process group; start the script with torchrun or accelerate")
        accelerator.__class__ = ContextAccelerator
        accelerator.make_contexts(size)
        trainer.gather_function = accelerator.gather_for_metrics

    def get_tp_size(self) -> int:
        return super().get_tp_size() * (self._context_size or 1)  # type: ignore[misc]

    def get_cp_size(self) -> int:
        return 1

    # What counts tokens over all processes.

    def _track_num_input_tokens(self, inputs: Any) -> None:
        with self._counted_once():
            super()._track_num_input_tokens(inputs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _counted_once(self) -> Iterator[None]:
        state = self.state  # type: ignore[attr-defined]
        before = state.num_input_tokens_seen
        yield
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // self._context_size

    # Trainers that generate what they train on (GRPO, RLOO): one generation for each context.

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self._align_generators()
        return self._from_first(super()._generate_single_turn(*args, **kwargs))  # type: ignore[misc]

    def _generate(self, prompts: list) -> Any:
        trainer: Any = self
        with self._counted_once():
            generated = super()._generate(prompts)  # type: ignore[misc]
        trainer._metrics["train" if trainer.model.training else "eval"]["num_tokens"] = [
            trainer.state.num_input_tokens_seen
        ]
        return generated

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """Rewards of all processes; of a context those of its first, for functions need not give the same twice."""
        rewards = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        contexts, size = self.accelerator.data_mesh.shape  # type: ignore[attr-defined]
        by_context = rewards.view(contexts, size, -1, *rewards.shape[1:])
        return by_context[:, :1].expand_as(by_context).reshape(rewards.shape)

    def _align_generators(self) -> None:
        """Give the context's processes its first one's random state: shards of odd lengths draw differently."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        cuda = accelerator.device.type == "cuda"
        state, device_state = self._from_first((torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None))
        torch.set_rng_state(state)
        if cuda:
            torch.cuda.set_rng_state(device_state)

    def _from_first(self, value: Any) -> Any:
        """What the context's first process has."""
        group = self.accelerator.data_mesh["cp"].get_group()  # type: ignore[attr-defined]
        box = [value]
        dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]


def _check_hooks(kind: type) -> None:
    """Refuse packages in which something that the mixin overrides is no more, or takes other arguments."""
    if not issubclass(kind, Trainer):
        raise TypeError(f"{kind.__name__} is no Trainer: write class {kind.__name__}(BurstMixin, Trainer)")
    hooks, owner = list(_HOOKS), _trainer_of(kind)
    if any(hasattr(owner, name) for name, _ in _ONLINE_HOOKS):
        hooks += [(owner, "trl", name, parameters) for name, parameters in _ONLINE_HOOKS]
    for owner, package, name, parameters in hooks:
        method: Callable[..., Any] | None = getattr(owner, name, None)
        has = inspect.signature(method).parameters if callable(method) else {}
        lacking = [parameter for parameter in parameters if parameter not in has]
        if method is None or (lacking and "kwargs" not in has and "args" not in has):
            what = f"lacks {lacking[0]}" if method is not None else "is gone"
            raise RuntimeError(
                f"{owner.__name__}.{name} {what} in {package} {version(package)}, which this was not written for; "
                "install burst-attention[trainer] with the versions in its constraints"
            )


def _trainer_of(kind: type) -> type:
    """The trainer behind the mixin."""
    behind = kind.__mro__[kind.__mro__.index(BurstMixin) + 1 :]
    return next(each for each in behind if issubclass(each, Trainer))


def _check_settings(trainer: Any) -> None:
    """Refuse what would need whole logits, or changes the model's forward behind our back."""
    args = trainer.args
    refused = {
        "compute_metrics": trainer.compute_metrics,
        "preprocess_logits_for_metrics": trainer.preprocess_logits_for_metrics,
        "compute_loss_func": trainer.compute_loss_func,
        "label_smoothing_factor": args.label_smoothing_factor,
    }
    for name, value in refused.items():
        if value:
            raise ValueError(f"{name}={value!r} needs whole logits, which are never formed over ranks; leave it out")
    if getattr(args, "use_liger_kernel", False):
        raise ValueError("use_liger_kernel=True replaces the model's forward; the loss is chunked here already")
    if getattr(args, "neftune_noise_alpha", None):
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha}: its noise depends on the length of what a rank holds; "
            "leave it out"
        )


def _generate_by_context(trainer: Any) -> None:
    """Sizes and seeds of a trainer that counts processes, for contexts."""
    args = trainer.args
    contexts, size = trainer.accelerator.data_mesh.shape
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % trainer.num_generations:
        raise ValueError(
            f"per_device_train_batch_size * steps_per_generation = {rows} must be a multiple of "
            f"num_generations={trainer.num_generations}, so that a context holds whole groups"
        )
    if getattr(trainer, "use_vllm", False):
        raise ValueError("use_vllm=True is not supported over contexts; leave it out, generate with transformers")
    args.generation_batch_size = rows * contexts
    set_seed(args.seed + trainer.accelerator.process_index // size)
