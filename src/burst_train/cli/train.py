"""``burst train``: read flags and TOML, then start the ranks that train."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from burst_attention.cli.flags import NUMBERS
from burst_attention.launch import local as launch
from burst_attention.launch.processes import INTERRUPTED, UNSAVED

from ..config import TrainConfig, read_toml, with_settings
from ..memory import check_fits
from ..run.folder import FOLDER, NEWEST, list_checkpoints

COMMAND = "burst train"


@dataclass(frozen=True)
class TrainArguments:
    """Train a language model on long documents. Several ranks share each sequence.

    The command starts local workers. Under torchrun it uses torchrun's ranks instead:
    torchrun --nproc-per-node 2 -m burst_attention.cli train [OPTIONS].

    On Ctrl-C, SIGTERM or --deadline it finishes the current step, saves, and exits with status 75. Use --resume to
    continue.
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    config: Path | None = None
    """A TOML file of settings, such as a run's config.toml. Flags override it."""


def parse(arguments: list[str]) -> TrainConfig:
    """Parse the arguments; flags override ``--config``, which overrides the defaults. ValueError for a wrong file."""
    return _parse(arguments).train


def _parse(arguments: list[str]) -> TrainArguments:
    cli = partial(tyro.cli, TrainArguments, prog=COMMAND, args=_resume_spelled_out(arguments), registry=NUMBERS)
    parsed, settings = cli(), dict[str, Any]()
    from ..run.metrics import without_auto  # not before --help has been answered

    if parsed.config is not None:
        settings = read_toml(parsed.config)
        parsed = cli(default=TrainArguments(with_settings(settings)))
    resumed = without_auto(parsed.train)[0].run.resume
    if resumed is None:
        return parsed
    return cli(default=TrainArguments(with_settings(settings_of_checkpoint(resumed, parsed.train.run.out) | settings)))


def _resume_spelled_out(arguments: list[str]) -> list[str]:
    """Replace a ``--resume`` without a value by ``--resume=newest``."""
    following = [*arguments, "--"][1:]
    return [
        f"--resume={NEWEST}" if argument == "--resume" and after.startswith("--") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def settings_of_checkpoint(resumed: str, out: str) -> dict[str, Any]:
    """Return the settings of the run that ``--resume`` and ``--out`` name; ValueError if no checkpoint is readable."""
    from ..checkpoint.files import none_whole, not_resumed
    from ..checkpoint.manifest import read_state
    from ..checkpoint.snapshot import settings_to_go_on
    from ..run.metrics import finished_steps

    folders = list_checkpoints(Path(out)) if resumed == NEWEST else [Path(resumed)]
    if not folders and finished_steps(Path(out)) is not None:
        raise ValueError(f"--resume: {out!r} holds a finished run and no checkpoint; choose another --out")
    wrong = []
    for folder in folders:
        try:
            settings = settings_to_go_on(read_state(folder).config)
        except ValueError as error:  # the ranks fall back to the previous checkpoint and say why
            wrong.append(str(error))
            continue
        # A checkpoint inside a run's folder belongs to that run, so the run continues in that folder.
        inside = resumed != NEWEST and folder.resolve().parent.name == FOLDER
        return settings | ({"out": str(folder.resolve().parent.parent)} if inside else {})
    raise not_resumed(none_whole(Path(out), wrong)) if resumed == NEWEST else ValueError(f"--resume {wrong[0]}")


def main(arguments: list[str]) -> int:
    """Run ``burst train`` and return the exit status."""
    with ExitStack() as stack:
        try:
            parsed = _parse(arguments)
            launch.prepare("burst_train.step.loop", "burst_train.cli.screen")
            from ..run.lock import check_inputs
            from ..run.metrics import claim_run, without_auto
            from .preflight import check_run

            parsed.train.check()
            train, chosen = without_auto(parsed.train)
            running = launch.torchrun_ranks(parsed.train.parallel.ranks)
            config = resolve(train, running)
            read = {"--config": None if parsed.config is None else str(parsed.config)}
            check_inputs(config.run.out, config.inputs | read)
            if launch.is_rank_0():  # one process holds the folder for all ranks
                config = after_restart(config, os.environ)
                stack.enter_context(claim_run(config))
            begun = check_run(config, config.parallel.ranks or 1, local_ranks=running and running[1])
        except ValueError as error:
            return launch.print_error(COMMAND, error)
        if launch.is_rank_0():
            console = Console(highlight=False, soft_wrap=True)
            for line in ([f"{COMMAND}: {chosen}"] if chosen else []) + [*begun.lines]:
                console.print(line, markup=False)
        before = list_checkpoints(Path(config.run.out))
        worker = partial(_train, begun.memory)
        status = launch.start(COMMAND, worker, config, ranks=config.parallel.ranks or 1, patient=True)
        if status not in (0, UNSAVED, INTERRUPTED):
            sys.stderr.write(what_is_kept(config.run.out, before, interrupted=status > 128))
        return status


def what_is_kept(out: str, before: Sequence[Path], *, interrupted: bool) -> str:
    """Return a line on how to resume a run that ended early; empty if it failed and saved nothing after ``before``."""
    checkpoints = list_checkpoints(Path(out))
    if not interrupted and checkpoints[:1] == list(before[:1]):
        return ""
    if not checkpoints:
        return f"{COMMAND}: ended before any checkpoint was saved\n" if interrupted else ""
    command = f"burst train --out {shlex.quote(out)} --resume"
    return f"{COMMAND}: newest checkpoint: {checkpoints[0]}; to resume: {command}\n"


def after_restart(config: TrainConfig, environment: Mapping[str, str]) -> TrainConfig:
    """Resume the newest checkpoint, or start again, if torchrun has restarted this run (by the environment)."""
    from ..run.lock import was_claimed_by_sibling
    from ..run.metrics import SUMMARY

    out = Path(config.run.out)
    restarted = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if config.run.resume or not restarted or (out / SUMMARY).exists() or not was_claimed_by_sibling(out):
        return config
    if list_checkpoints(out):
        return replace(config, run=replace(config.run, resume=NEWEST))
    return replace(config, run=replace(config.run, overwrite=True))


def resolve(config: TrainConfig, running: tuple[int, int] | None) -> TrainConfig:
    """Fill in ranks, device, learning rate and dtype; ``running``: (all ranks, this machine's) if they run already."""
    from burst_attention.launch.join import default_ranks, pick_device

    parallel = config.parallel
    ranks, local_ranks = running or (parallel.ranks or default_ranks(parallel.device),) * 2
    device = pick_device(parallel.device, local_ranks)
    dtype = str(config.model.compute_dtype(device)).removeprefix("torch.")
    return replace(
        config,
        parallel=replace(parallel, ranks=ranks, device=device),
        optim=replace(config.optim, lr=config.peak_lr),
        model=replace(config.model, dtype=dtype),  # type: ignore[arg-type]  # one of its choices
    )


def _train(memory: Mapping[str, int], config: TrainConfig) -> None:
    import torch

    from ..run.interrupt import InterruptedRunError
    from ..step.loop import train
    from ..step.model import quieten_transformers
    from .screen import Screen

    quieten_transformers()
    if config.parallel.device == "cuda":
        free, _ = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))
        warned = check_fits(memory, (free, "free on its GPU"), config.memory, seq_len=config.data.seq_len, ranks=1)
        if warned and launch.is_rank_0():
            sys.stderr.write(f"{COMMAND}: {warned}\n")
    if config.parallel.device == "cuda" and config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own condition for a fixed order
        torch.use_deterministic_algorithms(True, warn_only=True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # untyped; costs a pass
    try:
        summary = train(config, [Screen()], held=True)
    except InterruptedRunError as interrupted:  # the screen has reported it
        sys.exit(interrupted.status)
    if summary.missing_checkpoints:  # the same on all ranks
        sys.exit(UNSAVED)
