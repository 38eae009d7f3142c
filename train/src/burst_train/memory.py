"""What a run may do to need less memory: its flags, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from burst_attention.cli.flags import Count, flag, require
from burst_attention.planner.choice import Remat as RematName

OffloadName = Literal["none", "activations"]
# Engines whose attention is the operator that a checkpoint can keep by name; those that compute in DTensors.
KEEPING, TENSOR = ("burst", "ring"), ("tensor", "tensor-sequence")


@dataclass(frozen=True)
class MemoryConfig:
    """What is computed again, or lies elsewhere, so that longer sequences fit. None of it changes the loss."""

    remat: RematName = "none"
    """What is recomputed in the backward. layer: every decoder layer, of which its input alone is kept.
    keep-attention: all of it but the attention, so that its exchanges are not repeated (burst and ring)."""
    offload: OffloadName = "none"
    """activations: the layers' inputs that --remat keeps lie in host memory meanwhile (GPUs; never run on one)."""
    mlp_chunks: Count = 1
    """Feed-forward layers take a rank's tokens in so many pieces, each recomputed in the backward."""
    optimizer_offload: bool = False
    """Weights, gradients and AdamW's moments lie in host memory, and AdamW runs there (GPUs; never run on one)."""
    compile: bool = False
    """Compile norms and feed-forward layers by torch.compile; not for tensor and tensor-sequence."""
    ignore_memory: bool = False
    """Start even if the memory that is foretold is more than the machine has."""

    def check(self, engine: str, device: str) -> None:
        """Raise ValueError naming the first flag that can't be with this engine, or on this type of device."""
        keeps = f"is for --engine {' and '.join(KEEPING)}; --engine {engine} has another attention: use --remat layer"
        require(self.remat != "keep-attention" or engine in KEEPING, "remat", self.remat, keeps)
        offload = "needs --remat layer or keep-attention: what it moves are the layers' inputs that those keep"
        require(self.offload == "none" or self.remat != "none", "offload", self.offload, offload)
        there = "is for GPUs: on --device cpu everything lies in host memory already; leave it out"
        require(self.offload == "none" or device != "cpu", "offload", self.offload, there)
        if self.optimizer_offload and device == "cpu":
            raise ValueError(f"{flag('optimizer_offload')} {there}")
        for name in ("optimizer_offload", "compile"):
            if getattr(self, name) and engine in TENSOR:
                raise ValueError(f"{flag(name)} is not for --engine {engine}; leave it out, or use --engine burst")


def free_memory(root: Path = Path("/")) -> tuple[int, str] | None:
    """Bytes that this machine has for new processes, and what limits them; None where nothing tells.

    Args:
        root: of the file system; another for tests.
    """
    limits = [*_of_machine(root / "proc/meminfo"), *_of_cgroup(root)]
    return min(limits) if limits else None


def _of_machine(told: Path) -> Iterator[tuple[int, str]]:
    if told.is_file():
        for line in told.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024, "memory available"


def _of_cgroup(root: Path) -> Iterator[tuple[int, str]]:
    """What the limits of this process's control group (version 2), and of those around it, leave."""
    own = root / "proc/self/cgroup"
    lines = own.read_text().splitlines() if own.is_file() else []
    inside = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    top = root / "sys/fs/cgroup"
    for folder in (top / inside, *(top / inside).parents):
        limit, used = folder / "memory.max", folder / "memory.current"
        if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
            yield max(0, int(most) - int(used.read_text())), "left of the control group's limit"
        if folder == top:
            return


def check_fits(
    parts: Mapping[str, int], free: tuple[int, str] | None, memory: MemoryConfig, *, seq_len: int, ranks: int
) -> None:
    """Raise ValueError if what is foretold for ``ranks`` ranks is more than is free; names what would lower it.

    Args:
        parts: a rank's, of :func:`burst_train.forecast.footprint.training_memory`.
        free: of :func:`free_memory`, or a GPU's.
        ranks: that share what is free.
    """
    per_rank = sum(parts.values())
    if free is None or memory.ignore_memory or per_rank * ranks <= free[0]:
        return
    lower = ["--remat layer"] if memory.remat == "none" else []
    lower += ["--mlp-chunks 8"] if memory.mlp_chunks == 1 else []
    raise ValueError(
        f"{flag('seq_len')} {seq_len} needs {size_text(per_rank)} a rank as foretold ({parts_text(parts)}), for "
        f"{ranks} here {size_text(per_rank * ranks)}, of {size_text(free[0])} {free[1]}; lower it by "
        f"{', '.join([*lower, 'a shorter --seq-len or ranks on more machines'])}, or start anyway by --ignore-memory"
    )


def parts_text(parts: Mapping[str, int]) -> str:
    """The parts that are there, in words."""
    return ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)


def size_text(size: float) -> str:
    """In MiB, or from 10 GiB on in GiB."""
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
