"""``burst train``: flags and TOML to a TrainConfig, then the ranks that train it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from burst_attention.training.claim import check_inputs
from burst_attention.training.config import TrainConfig, read_toml
from burst_attention.training.metrics import claim_run
from burst_attention.training.preflight import check_run

from ..launch import local as launch

COMMAND = "burst train"


@dataclass(frozen=True)
class Arguments:
    """Train a Llama on long documents, each sequence spread over several ranks.

    Started plainly it launches its own local workers. Under torchrun it uses the ranks that it finds:
    torchrun --nproc-per-node 2 -m burst_attention.cli train [OPTIONS].
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
    parsed = tyro.cli(Arguments, prog=COMMAND, args=arguments)
    if parsed.config is None:
        return parsed
    return tyro.cli(Arguments, prog=COMMAND, args=[*read_toml(parsed.config), *arguments])


def main(arguments: list[str]) -> int:
    """Run ``burst train``; returns the exit status."""
    with ExitStack() as stack:
        try:
            given = _parse(arguments)
            given.train.check()
            config = resolve(given.train, launch.torchrun_ranks(given.train.parallel.ranks))
            read = {"--config": None if given.config is None else str(given.config)}
            check_inputs(config.run.out, config.inputs | read)
            if launch.is_rank_0():  # one process holds the folder for all ranks
                stack.enter_context(claim_run(config))
            check_run(config, config.parallel.ranks or 1)
        except ValueError as error:
            return launch.refuse(COMMAND, error)
        return launch.start(COMMAND, _train, config, ranks=config.parallel.ranks or 1)


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


def _train(config: TrainConfig) -> None:
    from burst_attention.training.loop import train
    from burst_attention.training.model import quieten_transformers

    from .screen import Screen

    quieten_transformers()
    train(config, [Screen()], held=True)
