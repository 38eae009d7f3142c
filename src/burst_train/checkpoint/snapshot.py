"""The state of a run at a step: tensors, and everything else that is needed to resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig, PreTrainedModel

from burst_attention import Plan
from burst_attention.cli.flags import flag
from burst_attention.launch.join import RankContext

from ..checked import FORMAT
from ..config import TrainConfig, checked_settings
from ..data.sequences import Cursor, ReadAhead, SequenceReader, TrainingStream
from .manifest import STATE
from .state import Optimizer, State, set_generators

WAITING = "data.waiting"
WEIGHTS = "weights."
OURS = "model."  # prefix of transformers' names of parameters
MOMENTS = ("exp_avg", "exp_avg_sq")
# Settings that a resumed run must keep. Settings not listed here may change.
LASTING = (
    *("model", "lora", "rope_scaling", "dtype", "data", "tokenizer", "seq_len", "pack", "chat_loss"),
    *("held_out", "seed", "global_batch", "decay_steps", "schedule"),
    *("lr", "min_lr", "warmup", "weight_decay", "beta1", "beta2", "eps", "clip", "optimizer"),
)
# Settings of one start of the run; the next start sets them again.
PASSING = ("out", "overwrite", "resume", "profile", "ranks", "device", "accumulate")


class TrainingState(Protocol):
    """The state of a run's rank that is saved and restored; ``held_out`` is the loss after ``step``, if measured."""

    config: TrainConfig
    context: RankContext
    model: nn.Module
    model_config: PreTrainedConfig
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    reader: SequenceReader
    plan: Plan
    sequences: TrainingStream | ReadAhead
    step: int
    first_loss: float
    last_loss: float
    held_out: float | None


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the names of parameters in checkpoints."""
    return {parameter: f"{OURS}{name}" for name, parameter in _inner(model).named_parameters()}


def _inner(model: nn.Module) -> Any:
    """Return the transformers model of the module that is trained, which may be inside of one to compare with."""
    return model if isinstance(model, PreTrainedModel) else model.get_submodule("model")


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter's weight (LoRA)."""
    return ".lora_" in name


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the trained weights and AdamW's moments by name, sharded and not copied unless moments have 8 bits."""
    names = names_of(model)
    adapted = any(map(is_adapter, names.values()))
    tensors = {f"{WEIGHTS}{name}": p.detach() for p, name in names.items() if is_adapter(name) or not adapted}
    if not adapted:
        inner = _inner(model)
        kept = inner.state_dict().keys()
        tensors |= {f"{WEIGHTS}{OURS}{name}": buffer for name, buffer in inner.named_buffers() if name in kept}
    for parameter in _parameters(optimizer):
        held = optimizer.state[parameter]
        if not held:
            held |= _blank_state(optimizer, parameter)
        tensors |= {f"{moment}.{names[parameter]}": plain(held[moment]) for moment in MOMENTS}
    return tensors


def put_moments(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Store the loaded moments in the optimizer; ``tensors`` comes from :func:`tensors_of`."""
    names = names_of(model)
    for parameter in _parameters(optimizer):
        for moment in MOMENTS:
            put_back(optimizer.state[parameter][moment], tensors[f"{moment}.{names[parameter]}"])


# Moments are saved in the dtype of their weights. Those in 8 bits (torchao's AdamW8bit) are rounded again when loaded,
# so such a run resumes to within that rounding, not bit for bit.


def _blank_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's state before the optimizer's first step: zeros, as the optimizer itself would make them."""
    own: Any = getattr(optimizer, "_new_buffer", None)  # torchao's; it has no public name
    # Only the first moment has a sign, which takes one of the 8 bits.
    made = {name: own(parameter, name == MOMENTS[0]) if own else torch.zeros_like(parameter) for name in MOMENTS}
    return {"step": torch.tensor(0.0), **made}


def plain(moment: Tensor) -> Tensor:
    """Return a moment in its weight's dtype: the tensor itself, or a copy of one that is held in 8 bits."""
    local = _local(moment)
    if not _in_8_bits(local):
        return moment.detach()
    values = local.dequantize()
    if not isinstance(moment, DTensor):
        return values
    mesh, placements = moment.device_mesh, moment.placements
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=moment.shape, stride=moment.stride())


@torch.no_grad()
def put_back(moment: Tensor, values: Tensor) -> None:
    """Store the values of :func:`plain` in a moment that is held in 8 bits; another one holds them already."""
    if _in_8_bits(local := _local(moment)):
        local.copy_(_local(values))


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _in_8_bits(x: Tensor) -> bool:
    return hasattr(x, "codes")


def state_of(run: TrainingState, generators: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a run after its latest step that JSON holds; ``generators``: the ranks' states, by rank."""
    names = names_of(run.model)
    groups = [
        {key: _number(value) for key, value in group.items() if key != "params"}
        | {"parameters": [names[parameter] for parameter in group["params"]]}
        for group in run.optimizer.param_groups
    ]
    counts = {names[each]: float(run.optimizer.state[each]["step"]) for each in _parameters(run.optimizer)}
    most = max(counts.values())
    fewer = {name: count for name, count in counts.items() if count < most}  # they had no gradient in some steps
    generation = getattr(_inner(run.model), "generation_config", None)  # that a loaded model came with
    return {
        "format": FORMAT,
        "step": run.step,
        "config": settings_of(run.config),
        "model": run.model_config.to_dict(),
        "generation": None if generation is None else json.loads(generation.to_json_string()),
        "optimizer": {"name": type(run.optimizer).__name__, "steps": most, "fewer": fewer, "groups": groups},
        "schedule": {"last_epoch": run.schedule.last_epoch, "last_lr": [*map(_number, run.schedule.get_last_lr())]},
        "generators": generators,
        "cursor": run.sequences.cursor().model_dump(),
        "losses": {"first": run.first_loss, "last": run.last_loss, "held_out": run.held_out},
        "rates": None if run.plan.planner.guessed else run.plan.planner.rates.as_dict(),
    }


def _number(value: Any) -> Any:
    """Return a tensor of one element, as torchao keeps the learning rate, as a number."""
    return value.item() if isinstance(value, Tensor) else value


def settings_of(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the settings by section, those that follow from ranks and steps resolved."""
    optim = replace(config.optim, global_batch=config.sequences_per_step, decay_steps=config.decay_steps)
    return asdict(replace(config, optim=optim))


def settings_to_go_on(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that a resumed run takes over, by name, from those that a checkpoint has by section."""
    return {name: value for name, value in checked_settings(saved, STATE).items() if name not in PASSING}


def check_same_run(config: TrainConfig, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError naming the first setting that differs from the checkpoint's but must not."""
    # A setting that came after the checkpoint had its default then.
    defaults = asdict(TrainConfig())
    saved = {**saved, **{section: values | saved.get(section, {}) for section, values in defaults.items()}}
    ours, theirs = checked_settings(settings_of(config), "the run"), checked_settings(saved, STATE)
    for name in LASTING:
        if ours[name] != theirs[name]:
            raise ValueError(_difference(config, name, ours[name], theirs[name]))


def _difference(config: TrainConfig, name: str, value: object, held: object) -> str:
    """Return the error text: the setting ``name`` is ``value`` here and ``held`` in the checkpoint."""
    if name == "decay_steps" and config.optim.decay_steps is None:
        return (
            f"--steps {config.run.steps} would change the learning rates of the checkpoint {STATE}, whose schedule has "
            f"{held} steps; add --decay-steps {held} to keep them"
        )
    return (
        f"{flag(name)} {value} differs from the checkpoint {STATE}, which has {held}; "
        f"omit the flag to resume, or start a new run: in another --out, or here after you remove {config.run.out}"
    )


def restore(run: TrainingState, state: State, cursor: Cursor) -> None:
    """Restore the result of :func:`state_of` on every rank, after the tensors; ValueError for another optimizer's."""
    _restore_optimizer(run, state.optimizer)
    run.step, run.first_loss, run.last_loss = state.step, state.losses.first, state.losses.last
    schedule = run.schedule  # at its saved position, where it recomputes the rate
    schedule.last_epoch = state.schedule.last_epoch - 1
    schedule._step_count = state.schedule.last_epoch  # or torch warns that it steps before the optimizer
    schedule.step()
    run.sequences = run.reader.training(cursor)
    if run.context.rank < len(state.generators):  # additional ranks have no saved state
        set_generators(state.generators[run.context.rank])


def _restore_optimizer(run: TrainingState, saved: Optimizer) -> None:
    names = names_of(run.model)
    ours, name = run.optimizer.param_groups, type(run.optimizer).__name__
    if saved.name != name or len(saved.groups) != len(ours):
        raise ValueError(f"{STATE}, optimizer: 'groups' are not those of {name}")
    for held, group in zip(saved.groups, ours, strict=True):
        if held.parameters != [names[parameter] for parameter in group["params"]]:
            raise ValueError(f"{STATE}, optimizer: 'groups' have the parameters of another model")
        group |= held.model_dump(exclude={"parameters"})
    for parameter in _parameters(run.optimizer):
        run.optimizer.state[parameter]["step"].fill_(saved.fewer.get(names[parameter], saved.steps))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
