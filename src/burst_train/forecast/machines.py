"""Peak, memory and memory bandwidth of the devices in presets, from data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burst_attention.planner.rates import Rates

from ..health.flops import PEAKS

# Share of a device's memory that a step may use. The process, the allocator and libraries need the rest.
USABLE = 0.9

# Shares of the data sheet's rates that a step reaches outside attention: matrix products, and element-wise operations.
# Estimates: predictions are within 22 % of published training speeds on 8 H100 (arXiv 2602.21196).
MATMUL_EFFICIENCY = 0.55
BANDWIDTH_EFFICIENCY = 0.8


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one rank; None: unknown."""

    peak: float | None = None  # FLOP/s of its matrix units in bf16, without sparsity
    memory: float | None = None  # bytes
    bandwidth: float | None = None  # bytes/s of its memory
    link: float = 50e9  # bytes/s to host memory, one way: what PCIe 5.0 x16 reaches
    disk: float = 3e9  # bytes/s of a rank's share of a fast NVMe disk


DEVICES: Mapping[str, Device] = {
    "a100-pcie": Device(peak=PEAKS["A100"], memory=80e9, bandwidth=1.935e12, link=25e9),
    "a100-nvlink": Device(peak=PEAKS["A100"], memory=80e9, bandwidth=2.039e12, link=25e9),
    "h100-hgx": Device(peak=PEAKS["H100"], memory=80e9, bandwidth=3.35e12),
    "h200-hgx": Device(peak=PEAKS["H200"], memory=141e9, bandwidth=4.8e12),
    "b200-hgx": Device(peak=PEAKS["B200"], memory=180e9, bandwidth=8e12),
}


def device_of(rates: Rates) -> Device:
    """Return the device of a preset, by the name of its node; unknown rates give an empty device."""
    return DEVICES.get(rates.name.partition("+")[0], Device())
