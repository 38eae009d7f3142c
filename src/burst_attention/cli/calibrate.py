"""``burst calibrate``: measures the ranks at hand, for plans to be chosen by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from burst_attention.cli.flags import Name, Ranks, Seconds, check_settings
from burst_attention.planner.rates import Rates, user_file, write_rates

from ..launch import local as launch
from .flags import DeviceOrAuto

COMMAND = "burst calibrate"


@dataclass(frozen=True, kw_only=True)
class CalibrateArguments:
    """Measure kernels and links, in about half a minute, and write down what plans are chosen by from then on.

    Started plainly it launches its own local workers. Under torchrun it uses the ranks that it finds, on all nodes:
    torchrun --nproc-per-node 2 -m burst_attention.cli calibrate [OPTIONS].
    """

    ranks: Ranks | None = None
    """Local workers; one per GPU, else one per core, if not given."""
    out: Name | None = None
    """A file to write. Default: rates.toml in the user's configuration folder, which make_plan and commands read."""
    device: DeviceOrAuto = "auto"
    timeout: Seconds = 120.0
    """Seconds that an exchange may take before it is an error."""

    def check(self) -> None:
        """Raise ValueError for what can't be."""
        check_settings(self)
        if self.path.is_dir() or not _writable(self.path):
            raise ValueError(f"--out {self.out!r} can't be written; name a file in a folder of yours")

    @property
    def path(self) -> Path:
        """What is written."""
        return user_file() if self.out is None else Path(self.out)


def _writable(path: Path) -> bool:
    """Could a file be made there, folders included?"""
    import os

    folder = next(each for each in path.absolute().parents if each.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)


def main(arguments: list[str]) -> int:
    """Run ``burst calibrate``; returns the exit status: 0, 1 if a rank failed, 2 if it can't be asked."""
    parsed = tyro.cli(CalibrateArguments, prog=COMMAND, args=arguments)
    try:
        parsed.check()
        running = launch.torchrun_ranks(parsed.ranks)
    except ValueError as error:
        return launch.refuse(COMMAND, error)
    from burst_attention.launch.join import default_ranks

    ranks = running[0] if running else parsed.ranks or default_ranks(parsed.device)
    return launch.start(COMMAND, _calibrate, parsed, ranks=ranks)


def _calibrate(arguments: CalibrateArguments) -> None:
    from burst_attention.attention.calibrate import calibrate
    from burst_attention.launch.join import join

    with join(device=arguments.device, timeout=arguments.timeout) as context:
        rates = calibrate(device=context.device)
        if context.rank == 0:
            write_rates(rates, arguments.path)
            _show(rates, arguments.path)


def _show(rates: Rates, path: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, link in (("inside of a node", rates.inside), ("across nodes", rates.across)):
        shared = ", shared by the ranks of a node" if link.shared else ""
        console.print(f"{name}: {link.latency * 1e6:.0f} us a message, {link.bytes_per_second / 1e9:.3g} GB/s{shared}")
    for size, speed in (("2", rates.half), ("4", rates.single), ("8", rates.double)):
        figures = f"{speed.forward / 1e9:,.3g} forward, {speed.backward / 1e9:,.3g} backward"
        console.print(f"kernels, {size} bytes an element: {figures}, 10^9 operations a second")
    console.print(f"{rates.source}\nwritten to {path}")
