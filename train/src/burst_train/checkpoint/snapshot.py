"""The state of a run at a step: tensors, and everything else that is needed to resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig

from burst_attention.cli.flags import flag
from burst_attention.launch.join import RankContext

from ..checked import Checked
from ..config import TrainConfig
from ..data.ahead import ReadAhead
from ..data.cursor import Cursor
from ..data.sequences import SequenceReader, TrainingStream
from .generators import set_generators
from .manifest import FORMAT

MOMENTS = ("exp_avg", "exp_avg_sq")
WAITING = "data.waiting"
WEIGHTS = "weights."
# Settings that a resumed run must keep. Settings not listed here may change.
LASTING = {
    "model": ("model", "dtype"),
    "data": ("data", "tokenizer", "seq_len", "pack", "held_out"),
    "run": ("seed",),
    "optim": ("lr", "min_lr", "warmup", "decay_steps", "weight_decay", "beta1", "beta2", "eps", "clip"),
}
# Settings of one start of the run; the next start sets them again.
PASSING = {"run": ("out", "overwrite", "resume", "profile"), "parallel": ("ranks", "device"), "optim": ("accumulate",)}

RENAMED = {"parallel": {"heads": "ulysses_degree"}}  # settings of 0.2, in its checkpoints


class Run(Protocol):
    """The state of one rank of a run that is saved and restored.

    ``step`` is the last finished step. ``held_out`` is the held-out loss after it, if measured.
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
    """Return the sharded weights and AdamW moments by name, without copying.

    If the optimizer has taken no step yet, its moments are created as zeros.
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
    """Return the state of a run after its latest step that JSON holds.

    Args:
        generators: every rank's :func:`~burst_train.checkpoint.generators.read_generators`, by rank.
    """
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"parameters": [names[parameter] for parameter in group["params"]]}
        for group in run.optimizer.param_groups
    ]
    counts = {float(run.optimizer.state[parameter]["step"]) for parameter in _parameters(run.optimizer)}
    if len(counts) != 1:
        raise ValueError(f"the optimizer's parameters took {sorted(counts)} steps; they must all take the same number")
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
    """Return the generation settings that a loaded model came with; None without any."""
    held = getattr(getattr(model, "model", None), "generation_config", None)
    return None if held is None else json.loads(held.to_json_string())


def settings_of(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the settings by section.

    ``global_batch`` is resolved so that it holds for any number of ranks, and ``decay_steps`` so that it holds for any
    number of steps.
    """
    optim = replace(config.optim, global_batch=config.sequences_per_step, decay_steps=config.decay_steps)
    return asdict(replace(config, optim=optim))


def _saved_settings(state: Checked) -> dict[str, dict[str, Any]]:
    """Return a checkpoint's settings by section; those of 0.2 under their names of today."""
    config = state.part("config")
    sections = {name: dict(config.value(name, dict)) for name in config.content}
    for section, renamed in RENAMED.items():
        held = sections.get(section, {})
        for old, new in renamed.items():
            if old in held:
                held[new] = held.pop(old)
    if "steps" in sections.get("run", {}):  # in 0.2 the schedule was as long as the run
        sections.get("optim", {}).setdefault("decay_steps", sections["run"]["steps"])
    return sections


def settings_to_go_on(state: Checked) -> dict[str, dict[str, Any]]:
    """Return the settings that a resumed run takes over, by section."""
    sections = _saved_settings(state)
    for section, names in PASSING.items():
        for name in names:
            sections.get(section, {}).pop(name, None)
    return sections


def check_same_run(config: TrainConfig, state: Checked) -> None:
    """Raise ValueError naming the first setting that differs from the checkpoint's but must not."""
    ours, theirs = settings_of(config), _saved_settings(state)
    lasting = LASTING | {"optim": (*LASTING["optim"], "global_batch")}
    for section, names in lasting.items():
        held = theirs.get(section, {})
        for name in names:
            if ours[section][name] != held.get(name):
                raise ValueError(_difference(config, name, ours[section][name], held.get(name), state.where))


def _difference(config: TrainConfig, name: str, value: object, held: object, where: str) -> str:
    """Return the error text: the setting ``name`` is ``value`` here and ``held`` in the checkpoint."""
    if name == "decay_steps" and config.optim.decay_steps is None:
        return (
            f"--steps {config.run.steps} would change the learning rates of the checkpoint {where}, whose schedule has "
            f"{held} steps; add --decay-steps {held} to keep them"
        )
    return (
        f"{flag(name)} {value} differs from the checkpoint {where}, which has {held}; "
        "omit the flag to resume, or start a new run in another --out"
    )


def restore(run: Run, state: Checked, cursor: Cursor) -> None:
    """Restore the result of :func:`state_of`, after the tensors have been loaded.

    Raises:
        ValueError: an entry is invalid, or belongs to another model or optimizer.
    """
    _restore_optimizer(run, state.part("optimizer"))
    run.step = state.non_negative_int("step")
    losses = state.part("losses")
    run.first_loss, run.last_loss = losses.number("first"), losses.number("last")
    restore_schedule(run.schedule, state.part("schedule").non_negative_int("last_epoch"))
    run.sequences = run.reader.training(cursor)
    generators = state.parts("generators")
    if run.context.rank < len(generators):  # additional ranks have no saved state
        set_generators(generators[run.context.rank])


def restore_schedule(schedule: LRScheduler, last_epoch: int) -> None:
    """Restore the schedule's position; its rate is recomputed."""
    schedule.last_epoch = last_epoch - 1
    schedule._step_count = last_epoch  # or torch warns that the schedule steps before the optimizer
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
