"""What a preset's device is beside its kernels and links: its matrix units, and its memory. Of data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burst_attention.planner.rates import Rates

from ..health.flops import PEAKS

# What of a device's memory a training step may take: the rest is the process's, the allocator's and the libraries'.
USABLE = 0.9


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's.

    Attributes:
        peak: FLOP/s of its matrix units in bf16, without sparsity; None if nobody said.
        memory: bytes; None if nobody said.
    """

    peak: float | None = None
    memory: float | None = None


DEVICES: Mapping[str, Device] = {
    "a100-pcie": Device(peak=PEAKS["A100"], memory=80e9),
    "a100-nvlink": Device(peak=PEAKS["A100"], memory=80e9),
    "h100-hgx": Device(peak=PEAKS["H100"], memory=80e9),
    "h200-hgx": Device(peak=PEAKS["H200"], memory=141e9),
    "b200-hgx": Device(peak=PEAKS["B200"], memory=180e9),
}


def device_of(rates: Rates) -> Device:
    """Of a preset, by the name of its node; of others nothing is known."""
    return DEVICES.get(rates.name.partition("+")[0], Device())
