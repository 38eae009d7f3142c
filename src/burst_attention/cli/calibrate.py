"""``burst calibrate``: measure kernels and links on the available ranks; the planner uses the rates."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from ..launch import local as launch
from ..planner.rates import Rates, user_file, write_rates
from .flags import DeviceOrAuto, Name, Ranks, Seconds, check_settings

COMMAND = "burst calibrate"


@dataclass(frozen=True, kw_only=True)
class CalibrateArguments:
    """Measure kernels and links and save the rates. The planner then uses them. Takes about half a minute.

    On a GPU it also measures the block sizes of the Triton kernel, in about two more minutes.

    Without torchrun, the command launches local workers. Under torchrun it uses torchrun's ranks on all nodes:
    torchrun --nproc-per-node 2 -m burst_attention.cli calibrate [OPTIONS].
    """

    ranks: Ranks | None = None
    """Number of local workers. Default: one per GPU, or one per core without GPUs."""
    out: Name | None = None
    """File to write. Default: rates.toml in the user's configuration folder; make_plan and all commands read it."""
    device: DeviceOrAuto = "auto"
    timeout: Seconds = 120.0
    """Seconds before a pending exchange counts as failed."""

    def check(self) -> None:
        """Raise ValueError if a flag's value is invalid."""
        check_settings(self)
        folder = next(each for each in self.path.absolute().parents if each.exists())  # others will be made
        if self.path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ValueError(f"--out {self.out!r} can't be written; name a file in a folder that you can write to")

    @property
    def path(self) -> Path:
        """The file to write."""
        return user_file() if self.out is None else Path(self.out)


def main(arguments: list[str]) -> int:
    """Run ``burst calibrate``; return the exit status: 0 on success, 1 if a rank failed, 2 for invalid arguments."""
    return launch.start_checked(COMMAND, _calibrate, tyro.cli(CalibrateArguments, prog=COMMAND, args=arguments))


def _calibrate(arguments: CalibrateArguments) -> None:
    from burst_attention.attention.calibrate import calibrate
    from burst_attention.kernels import measure_block_sizes
    from burst_attention.launch.join import join

    with join(device=arguments.device, timeout=arguments.timeout) as context:
        rates = calibrate(device=context.device)
        if context.rank == 0:
            write_rates(rates, arguments.path)
            _show(rates, arguments.path)
    if context.device.type == "cuda" and os.environ["LOCAL_RANK"] == "0":  # one rank of a node; all read its file
        measure_block_sizes(context.device)


def _show(rates: Rates, path: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, link in (("inside a node", rates.inside), ("across nodes", rates.across)):
        shared = ", shared by the ranks of a node" if link.shared else ""
        busy = f" ({link.busy * 1e6:.0f} us between products)" if link.busy else ""
        rate = f"{link.bytes_per_second / 1e9:.3g} GB/s{shared}"
        console.print(f"{name}: {link.latency * 1e6:.0f} us per message{busy}, {rate}")
    for size, speed in (("2", rates.half), ("4", rates.single), ("8", rates.double)):
        figures = f"{speed.forward / 1e9:,.3g} forward, {speed.backward / 1e9:,.3g} backward"
        console.print(f"kernels, {size} bytes per element: {figures}, in 10^9 operations per second")
    if (of := rates.chosen) is not None:
        console.print(
            f"chosen keys: scores {of.score / 1e9:,.3g} and products {of.rows_forward / 1e9:,.3g} forward, "
            f"{of.rows_backward / 1e9:,.3g} backward, in 10^9 operations per second; rows are gathered at "
            f"{of.gather_forward / 1e9:,.3g} GB/s"
        )
    console.print(f"weights are read at {rates.overhead.read / 1e9:.3g} GB/s by a rank")
    console.print(f"{rates.source}\nwritten to {path}")
