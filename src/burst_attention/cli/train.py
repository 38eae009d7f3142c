"""``burst train``: flags and TOML to a TrainConfig, then the ranks that train it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import tyro
from rich.console import Console

from burst_attention.training.claim import check_inputs, was_claimed_by_sibling
from burst_attention.training.config import TrainConfig, as_flags, read_toml
from burst_attention.training.manifest import FOLDER, STATE, list_checkpoints, read_state
from burst_attention.training.memory import check_fits
from burst_attention.training.metrics import NEWEST, SUMMARY, claim_run, finished_steps, without_auto
from burst_attention.training.preflight import check_run

from ..launch import local as launch
from ..launch.processes import INTERRUPTED, UNSAVED
from .numbers import numbers

COMMAND = "burst train"


@dataclass(frozen=True)
class Arguments:
    """Train a Llama on long documents, each sequence spread over several ranks.

    Started plainly it launches its own local workers. Under torchrun it uses the ranks that it finds:
    torchrun --nproc-per-node 2 -m burst_attention.cli train [OPTIONS].

    Ctrl-C, SIGTERM and --deadline have it finish its step and save: it ends with status 75, and --resume goes on.
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    config: Path | None = None
    """A TOML file of settings; flags beat it. The config.toml of a run is one."""


def parse(arguments: list[str]) -> TrainConfig:
    """Flags beat the file that ``--config`` names, which beats the defaults; a wrong flag exits with status 2.

    Raises:
        ValueError: the file can't be read or has an unknown setting.
    """
    return _parse(arguments).train


def _parse(arguments: list[str]) -> Arguments:
    arguments = _resume_spelled_out(arguments)
    parsed = tyro.cli(Arguments, prog=COMMAND, args=arguments, registry=numbers())
    if parsed.config is not None:
        arguments = [*read_toml(parsed.config), *arguments]
        parsed = tyro.cli(Arguments, prog=COMMAND, args=arguments, registry=numbers())
    resumed = without_auto(parsed.train)[0].run.resume
    if resumed is None:
        return parsed
    saved = settings_of_checkpoint(resumed, parsed.train.run.out)
    return tyro.cli(Arguments, prog=COMMAND, args=[*saved, *arguments], registry=numbers())


def _resume_spelled_out(arguments: list[str]) -> list[str]:
    """``--resume newest`` where ``--resume`` stands alone."""
    following = [*arguments, "--"][1:]
    return [
        f"--resume={NEWEST}" if argument == "--resume" and after.startswith("--") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def settings_of_checkpoint(resumed: str, out: str) -> list[str]:
    """The flags of the run that is gone on with; those that are given beat them.

    Args:
        resumed, out: the values of ``--resume`` and ``--out``.

    Raises:
        ValueError: there is no checkpoint that can be read.
    """
    from burst_attention.training.checkpoint import none_whole, not_resumed
    from burst_attention.training.snapshot import settings_to_go_on

    folders = list_checkpoints(Path(out)) if resumed == NEWEST else [Path(resumed)]
    if not folders and finished_steps(Path(out)) is not None:
        raise ValueError(f"--resume: {out!r} holds a finished run, and no checkpoint to train it further from")
    wrong = []
    for folder in folders:
        try:
            flags = as_flags(settings_to_go_on(read_state(folder)), folder / STATE)
        except ValueError as error:  # the ranks go back to the one before it, and say why
            wrong.append(str(error))
            continue
        # A checkpoint in a run's folder is that run's, which goes on there.
        inside = resumed != NEWEST and folder.resolve().parent.name == FOLDER
        return [f"--out={folder.resolve().parent.parent}", *flags] if inside else flags
    raise not_resumed(none_whole(Path(out), wrong)) if resumed == NEWEST else ValueError(f"--resume {wrong[0]}")


def main(arguments: list[str]) -> int:
    """Run ``burst train``; returns the exit status."""
    with ExitStack() as stack:
        try:
            given = _parse(arguments)
            given.train.check()
            train, chosen = without_auto(given.train)
            running = launch.torchrun_ranks(given.train.parallel.ranks)
            config = resolve(train, running)
            read = {"--config": None if given.config is None else str(given.config)}
            check_inputs(config.run.out, config.inputs | read)
            if launch.is_rank_0():  # one process holds the folder for all ranks
                config = after_restart(config, os.environ)
                stack.enter_context(claim_run(config))
            begun = check_run(config, config.parallel.ranks or 1, local_ranks=running and running[1])
        except ValueError as error:
            return launch.refuse(COMMAND, error)
        if launch.is_rank_0():
            told = Console(highlight=False, soft_wrap=True)
            for line in ([f"{COMMAND}: {chosen}"] if chosen else []) + [*begun.lines]:
                told.print(line, markup=False)
        before = list_checkpoints(Path(config.run.out))
        worker = partial(_train, begun.memory)
        status = launch.start(COMMAND, worker, config, ranks=config.parallel.ranks or 1, patient=True)
        if status not in (0, UNSAVED, INTERRUPTED):
            sys.stderr.write(what_is_kept(config.run.out, before, asked=status > 128))
        return status


def what_is_kept(out: str, before: Sequence[Path], *, asked: bool) -> str:
    """A line for a run that ended early; empty if it failed and saved nothing.

    A failed run's checkpoints of an earlier start are not named: they may be why it failed.

    Args:
        before: the checkpoints that there were when it started.
        asked: whether it was ended by a signal to its launcher.
    """
    found = list_checkpoints(Path(out))
    if not asked and found[:1] == list(before[:1]):
        return ""
    if not found:
        return f"{COMMAND}: ended at once, before anything was saved\n" if asked else ""
    command = f"burst train --out {shlex.quote(out)} --resume"
    return f"{COMMAND}: kept: {found[0]}; to go on: {command}\n"


def after_restart(config: TrainConfig, environment: Mapping[str, str]) -> TrainConfig:
    """What torchrun's restart of this run does: go on from its newest checkpoint, or begin again if there is none.

    Args:
        environment: of this process; ``TORCHELASTIC_RESTART_COUNT`` tells a restart.
    """
    out = Path(config.run.out)
    restarted = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if config.run.resume or not restarted or (out / SUMMARY).exists() or not was_claimed_by_sibling(out):
        return config
    if list_checkpoints(out):
        return replace(config, run=replace(config.run, resume=NEWEST))
    return replace(config, run=replace(config.run, overwrite=True))


def resolve(config: TrainConfig, running: tuple[int, int] | None) -> TrainConfig:
    """The configuration with what the machine decides filled in.

    Args:
        running: (all ranks, those on this machine), if they run already.

    Raises:
        ValueError: there is not a GPU for every rank of ``--device cuda``.
    """
    from burst_attention.launch.join import default_ranks, pick_device

    parallel = config.parallel
    ranks, local_ranks = running or (parallel.ranks or default_ranks(parallel.device),) * 2
    device = pick_device(parallel.device, local_ranks)
    dtype = str(config.model.compute_dtype(device)).removeprefix("torch.")
    return replace(
        config,
        parallel=replace(parallel, ranks=ranks, device=device),
        optim=replace(config.optim, lr=config.peak_lr),
        model=replace(config.model, dtype=dtype),  # type: ignore[arg-type]  # a name of its choices
    )


def _train(memory: dict[str, int] | None, config: TrainConfig) -> None:
    import torch

    from burst_attention.training.interrupt import InterruptedRunError
    from burst_attention.training.loop import train
    from burst_attention.training.model import quieten_transformers

    from .screen import Screen

    quieten_transformers()
    if config.parallel.device == "cuda" and memory is not None:
        free, _ = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))
        check_fits(memory, (free, "free on its GPU"), config.memory, seq_len=config.data.seq_len, ranks=1)
    try:
        summary = train(config, [Screen()], held=True)
    except InterruptedRunError as interrupted:  # told by the screen
        sys.exit(interrupted.status)
    if summary.missing_checkpoints:  # the same on all ranks
        sys.exit(UNSAVED)
