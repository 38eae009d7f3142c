"""Time a training step with each memory option against a step with --remat layer alone.

A small Llama with random weights takes steps on the same tokens under each option, in turn. A round's ratio divides a
step's seconds by those of --remat layer in the same round; each counts the slowest rank. The first step is not timed.
All losses must agree to 2e-6, or no figure is printed.

    burst bench step-options [--rounds 9] [--ranks 2] [--seq-len 4096] [--layers 4] [--folder /tmp]"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console

from burst_attention.testing import WorkerPool

from ..harness.turns import ratios, seconds_of, take_turns
from ..tables import terminal
from ..texts import spread
from .longest import Sizes, make_step

TOLERANCE = 2e-6  # relative, of fp32 losses


@dataclass(frozen=True, kw_only=True)
class StepOptionsArguments:
    """Sizes of the model and of the sequence."""

    rounds: int = 9
    ranks: int = 2
    seq_len: int = 4096
    layers: int = 4
    heads: int = 8
    head_dim: int = 64
    intermediate: int = 1408
    folder: Path = Path(tempfile.gettempdir())
    """Where layer inputs are stored."""

    @property
    def sizes(self) -> Sizes:
        shape = {"heads": self.heads, "head_dim": self.head_dim, "intermediate": self.intermediate}
        return Sizes(ranks=self.ranks, layers=self.layers, document=0, **shape)  # type: ignore[arg-type]

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        chunks, offload = {"attention_chunks": 4}, {"offload": f"disk:{self.folder}"}
        every = {"--remat layer": {}, "+ --attention-chunks 4": chunks, "+ --offload disk": offload}
        every |= {"+ --mlp-chunks 8": {"mlp_chunks": 8}, "+ all three": chunks | offload | {"mlp_chunks": 8}}
        return {name: {"remat": "layer", **more} for name, more in every.items()}


def measure(a: StepOptionsArguments) -> list[list[float]]:
    """Run on each rank: return each option's seconds by round, of the slowest rank.

    Raises:
        AssertionError: the losses of two options differ.
    """
    steps = [make_step(a.sizes, "burst", flags, a.seq_len) for flags in a.options.values()]
    losses = [step() for step in steps]
    if not all(math.isclose(loss, losses[0], rel_tol=TOLERANCE) for loss in losses):
        raise AssertionError(f"losses differ: {dict(zip(a.options, losses, strict=True))}")
    taken = torch.tensor(take_turns([_timed(step) for step in steps], a.rounds), dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.tolist()


def _timed(step: Callable[[], float]) -> Callable[[], float]:
    return lambda: seconds_of(step)


def main(arguments: list[str]) -> None:
    a = tyro.cli(StepOptionsArguments, prog="burst bench step-options", description=__doc__, args=arguments)
    with WorkerPool(a.ranks, timeout=600) as pool:
        taken = pool.run(measure, a, timeout=3600)[0]
    rows = [
        {
            "options": name,
            "seconds": spread(seconds),
            "by --remat layer, round by round": spread(ratios(taken[0], seconds)),
        }
        for name, seconds in zip(a.options, taken, strict=True)
    ]
    title = f"{a.layers} layers, width {a.heads * a.head_dim}, {a.seq_len:,} tokens, {a.ranks} ranks, {a.rounds} rounds"
    Console().print(terminal(rows, title=title))
