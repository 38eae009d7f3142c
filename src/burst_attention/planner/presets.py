"""Preset rates of machines, from makers' data sheets and published measurements.

The planner uses them if nothing was measured. A name is ``NODE+NETWORK``: a kind of node, and the network between
nodes. This library has measured no GPU preset; their figures are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .rates import ChosenKernels, Link, Overhead, Rates, Speed

Node = tuple[str, Link, Speed, Speed, Speed, Overhead]  # source; links between its ranks; half, single, double


# Kernel rates for 2 and 4 bytes per element.
# Peak 312 TFLOP/s; FlashAttention-2 reaches 73 % forward, 63 % backward (arXiv 2307.08691). Peak in fp32: 19.5 TFLOP/s.
_A100 = Speed(forward=228e12, backward=197e12), Speed(forward=14e12, backward=12e12)
# Peak 989 TFLOP/s; FlashAttention-3 reaches 75 % forward (arXiv 2407.08608). The backward is a guess from this.
_HOPPER = Speed(forward=740e12, backward=550e12), Speed(forward=45e12, backward=40e12)
# Peak 2,250 TFLOP/s; FlashAttention-4 reaches 1,613 forward (arXiv 2603.05451). The backward is a guess from this.
_BLACKWELL = Speed(forward=1.6e15, backward=1.2e15), Speed(forward=6e13, backward=5e13)


def _gpu(
    device: str, wire: str, paper: str, latency: float, link: float, speeds: tuple[Speed, Speed], fold: float
) -> Node:
    """Return a GPU node; ``link``: the data sheet's bytes per second, of which it gets 0.8, as NCCL's tests reach.

    ``fold``: a third of the memory's bandwidth, because a fold reads the sum and a part, and writes the sum.
    """
    times = {"launch_forward": 1e-5, "launch_backward": 2e-5, "visit": 5e-5, "block": 128.0, "call": 5e-4}
    source = f"{device}: NVIDIA's data sheet ({wire} each way), arXiv {paper}; estimated"
    ports, double = Link(latency=latency, bytes_per_second=0.8 * link), Speed(forward=1e13, backward=8e12)
    return source, ports, *speeds, double, Overhead(fold=fold, **times)


NODES: Mapping[str, Node] = {
    "cpu": (
        "measured by burst calibrate: a thread for each rank of an x86 CPU (avx512_bf16), torch 2.13, gloo",
        Link(latency=2e-4, bytes_per_second=1e9),
        Speed(forward=9e10, backward=1.35e11),
        Speed(forward=9.4e10, backward=8.8e10),
        Speed(forward=4.5e10, backward=3.8e10),
        Overhead(
            launch_forward=1.5e-4, launch_backward=7e-4, visit=1.5e-4, fold=8e8, block=500.0, call=5e-3, read=1.2e10
        ),
    ),
    "a100-pcie": _gpu("A100 80G PCIe", "PCIe 4.0 x16, 32 GB/s", "2307.08691", 2e-5, 3.2e10, _A100, 6e11),
    "a100-nvlink": _gpu("A100 80G SXM", "NVLink 3, 300 GB/s", "2307.08691", 1.5e-5, 3e11, _A100, 6e11),
    "h100-hgx": _gpu("H100 HGX", "NVLink 4, 450 GB/s", "2407.08608", 1.5e-5, 4.5e11, _HOPPER, 1.1e12),
    "h200-hgx": _gpu("H200 HGX", "NVLink 4, 450 GB/s", "2407.08608", 1.5e-5, 4.5e11, _HOPPER, 1.6e12),
    "b200-hgx": _gpu("B200 HGX", "NVLink 5, 900 GB/s", "2603.05451", 1.5e-5, 9e11, _BLACKWELL, 2.6e12),
}

_SAYS = "a port for each {}, nine tenths of it; estimated"
# Kernels of indexed attention, by the preset's node. They have never run on a GPU.
_CHOSEN: Mapping[str, ChosenKernels] = {
    "cpu": ChosenKernels(
        score=5e10,
        keep=9e7,
        pool=2e8,
        look=2.5e7,
        gather_forward=3.4e9,
        gather_backward=1.7e9,
        rows_forward=3e10,
        rows_backward=4.2e10,
        dense_forward=4.5e10,
        dense_backward=5.7e10,
    )
}
NETWORKS: Mapping[str, tuple[str, Link]] = {
    "infiniband-400g": (f"400 Gbit/s InfiniBand, {_SAYS.format('GPU')}", Link(latency=2.5e-5, bytes_per_second=4.5e10)),
    "ethernet-100g": (
        f"100 Gbit/s Ethernet, {_SAYS.format('node')}",
        Link(latency=6e-5, bytes_per_second=1.12e10, shared=True),
    ),
    "ethernet-25g": (
        f"25 Gbit/s Ethernet, {_SAYS.format('node')}",
        Link(latency=8e-5, bytes_per_second=2.8e9, shared=True),
    ),
}


def preset(name: str) -> Rates:
    """Return the rates of ``NODE+NETWORK``, or of ``NODE`` with its usual network. Raise ValueError if unknown."""
    node, _, network = name.partition("+")
    network = network or ("ethernet-25g" if node == "cpu" else "infiniband-400g")
    if node not in NODES or network not in NETWORKS:
        raise ValueError(
            f"rates={name!r} is no preset; choose one of {', '.join(NODES)}, with +{', +'.join(NETWORKS)} after it for "
            "the network between nodes; or pass a file of rates, or Rates"
        )
    (source, inside, half, single, double, overhead), (other, across) = NODES[node], NETWORKS[network]
    kernels: dict[str, Any] = {"half": half, "single": single, "double": double, "overhead": overhead}
    kernels["chosen"] = _CHOSEN.get(node)
    return Rates(name=f"{node}+{network}", source=f"{source}; {other}", inside=inside, across=across, **kernels)


def usual(device: str) -> Rates:
    """Return the preset for a device: torch's name of a GPU, or ``cpu``."""
    lowered = device.lower()
    names = {"b200": "b200-hgx", "h200": "h200-hgx", "h100": "h100-hgx", "pcie": "a100-pcie", "a100": "a100-nvlink"}
    for part, name in names.items():
        if part in lowered:
            return preset(name)
    return preset("cpu" if lowered == "cpu" else "a100-nvlink")
