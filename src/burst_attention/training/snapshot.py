"""What a run is at a step: tensors, and everything else that says how it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig

from ..launch.join import RankContext
from .ahead import ReadAhead
from .checked import Checked
from .config import TrainConfig
from .cursor import Cursor
from .data import SequenceReader, TrainingStream
from .flags import flag
from .generators import set_generators
from .manifest import FORMAT

MOMENTS = ("exp_avg", "exp_avg_sq")
WAITING = "data.waiting"
WEIGHTS = "weights."
# Settings that make a run another one; those that are not named may be others when it goes on.
LASTING = {
    "model": ("model", "dtype"),
    "data": ("data", "tokenizer", "seq_len", "pack", "held_out"),
    "run": ("seed",),
    "optim": ("lr", "min_lr", "warmup", "decay_steps", "weight_decay", "beta1", "beta2", "eps", "clip"),
}
# Settings of the place where a run went on, which the next place decides anew.
PASSING = {"run": ("out", "overwrite", "resume", "profile"), "parallel": ("ranks", "device"), "optim": ("accumulate",)}


class Run(Protocol):
    """What is saved of one rank of a run, and set when it goes on.

    ``step`` is the last one that was finished, ``held_out`` the loss of the held-out documents after it, if it was
    measured there.
    """

    sequences: TrainingStream | ReadAhead
    step: int
    first_loss: float
    last_loss: float
    held_out: float | None

    @property
    def config(self) -> TrainConfig: ...

    @property
    def context(self) -> RankContext: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def model_config(self) -> PreTrainedConfig: ...

    @property
    def optimizer(self) -> torch.optim.AdamW: ...

    @property
    def schedule(self) -> LRScheduler: ...

    @property
    def reader(self) -> SequenceReader: ...


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and AdamW's moments by name, as they are spread over the ranks; not copies.

    Moments of an optimizer that took no step yet are made, of zeros.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"{WEIGHTS}{name}": parameter.detach() for parameter, name in names.items()}
    for parameter in _parameters(optimizer):
        held = optimizer.state[parameter]
        if not held:
            held |= {"step": torch.tensor(0.0)} | {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        tensors |= {f"{moment}.{names[parameter]}": held[moment].detach() for moment in MOMENTS}
    return tensors


def state_of(run: Run, generators: list[dict[str, Any]]) -> dict[str, Any]:
    """What JSON holds of a run after its latest step.

    Args:
        generators: every rank's :func:`~burst_attention.training.generators.read_generators`, by rank.
    """
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"parameters": [names[parameter] for parameter in group["params"]]}
        for group in run.optimizer.param_groups
    ]
    counts = {float(run.optimizer.state[parameter]["step"]) for parameter in _parameters(run.optimizer)}
    if len(counts) != 1:
        raise ValueError(f"the optimizer's parameters took {sorted(counts)} steps; they must have taken the same")
    return {
        "format": FORMAT,
        "step": run.step,
        "config": settings_of(run.config),
        "model": run.model_config.to_dict(),
        "generation": _generation_of(run.model),
        "optimizer": {"name": type(run.optimizer).__name__, "steps": counts.pop(), "groups": groups},
        "schedule": {"last_epoch": run.schedule.last_epoch, "last_lr": run.schedule.get_last_lr()},
        "generators": generators,
        "cursor": run.sequences.cursor().as_json(),
        "losses": {"first": run.first_loss, "last": run.last_loss, "held_out": run.held_out},
    }


def _generation_of(model: nn.Module) -> dict[str, Any] | None:
    """How the model that is trained is to generate, where it was loaded with something about it."""
    held = getattr(getattr(model, "model", None), "generation_config", None)
    return None if held is None else json.loads(held.to_json_string())


def settings_of(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The settings by section.

    The sequences of a step are one number, which holds for any number of ranks; the schedule's length is named, which
    holds for any number of steps.
    """
    optim = replace(config.optim, global_batch=config.sequences_per_step, decay_steps=config.decay_steps)
    return asdict(replace(config, optim=optim))


def settings_to_go_on(state: Checked) -> dict[str, dict[str, Any]]:
    """The settings of a checkpoint that another start of the run takes over, by section."""
    config = state.part("config")
    sections = {name: dict(config.value(name, dict)) for name in config.content}
    for section, names in PASSING.items():
        for name in names:
            sections.get(section, {}).pop(name, None)
    return sections


def check_same_run(config: TrainConfig, state: Checked) -> None:
    """Raise ValueError naming the first setting by which ``config`` is another run than a checkpoint's."""
    ours, theirs = settings_of(config), state.part("config")
    lasting = LASTING | {"optim": (*LASTING["optim"], "global_batch")}
    for section, names in lasting.items():
        held = theirs.value(section, dict)
        for name in names:
            if ours[section][name] != held.get(name):
                raise ValueError(_difference(config, name, ours[section][name], held.get(name), state.where))


def _difference(config: TrainConfig, name: str, value: object, held: object, where: str) -> str:
    """The text of a refusal: the setting ``name`` has a ``value`` here, and ``held`` in the checkpoint."""
    if name == "decay_steps" and config.optim.decay_steps is None:
        return (
            f"--steps {config.run.steps} would change the learning rates of the checkpoint {where}, whose schedule has "
            f"{held} steps; give --decay-steps {held} too, which keeps them"
        )
    return (
        f"{flag(name)} {value} is not what the checkpoint {where} was made with, {held}; "
        "leave the flag out to go on, or start a new run in another --out"
    )


def restore(run: Run, state: Checked, cursor: Cursor) -> None:
    """Go on from what :func:`state_of` gave, the tensors being loaded already.

    Raises:
        ValueError: it is not of that form, or of another model or optimizer.
    """
    _restore_optimizer(run, state.part("optimizer"))
    run.step = state.natural("step")
    losses = state.part("losses")
    run.first_loss, run.last_loss = losses.number("first"), losses.number("last")
    restore_schedule(run.schedule, state.part("schedule").natural("last_epoch"))
    run.sequences = run.reader.training(cursor)
    generators = state.parts("generators")
    if run.context.rank < len(generators):  # a rank that was not there has none to go on from
        set_generators(generators[run.context.rank])


def restore_schedule(schedule: LRScheduler, last_epoch: int) -> None:
    """Go on from a place of the schedule: the rate there is computed again, as it was."""
    schedule.last_epoch = last_epoch - 1
    schedule._step_count = last_epoch  # or it takes this for a step before the optimizer's first
    schedule.step()


def _restore_optimizer(run: Run, content: Checked) -> None:
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    groups = content.parts("groups")
    if content.value("name", str) != type(run.optimizer).__name__ or len(groups) != len(run.optimizer.param_groups):
        raise content.wrong("groups", f"are not those of {type(run.optimizer).__name__}")
    for saved, group in zip(groups, run.optimizer.param_groups, strict=True):
        if saved.value("parameters", list) != [names[parameter] for parameter in group["params"]]:
            raise saved.wrong("parameters", "are those of another model")
        for name in ("eps", "weight_decay", "initial_lr"):
            group[name] = saved.number(name)
        betas = saved.value("betas", list)
        if len(betas) != 2 or not all(type(beta) is float for beta in betas):
            raise saved.wrong("betas", "must be two numbers")
        group["betas"] = tuple(betas)
    for parameter in _parameters(run.optimizer):
        run.optimizer.state[parameter]["step"].fill_(content.number("steps"))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
